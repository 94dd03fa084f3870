"""Reader for formats with markers and thinking: one pass over the text from marker to marker."""

from __future__ import annotations

import re
from collections.abc import Callable

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading

# (text, place behind the marker, where to add what is read) -> place behind the call; raises Malformed
ReadCall = Callable[[str, int, Reading], int]


def read_marked(text: str, tags: re.Pattern[str], read_call: ReadCall) -> Parsed:
    """Takes a text apart at its tags.

    tags: a pattern with the groups `call` (a call begins), `think` and `thought` (begin and end of thinking), and maybe
    `stray` (a tag that is wrong outside of a call, right behind a broken one).

    Calls inside thinking are not calls. Where thinking ends that was never begun (the prompt began it), all before it
    was thinking. A `thought` inside a call that can be read is text.
    """
    reading, place = Reading(), 0
    while tag := tags.search(text, place):
        reading.content.append(text[place : tag.start()])
        place = tag.end()
        if tag.lastgroup == "think":
            close = next((t for t in tags.finditer(text, place) if t.lastgroup == "thought"), None)
            reading.reasoning.append(text[place : close.start() if close else len(text)])
            place = close.end() if close else len(text)
        elif tag.lastgroup == "thought":
            if not reading.reasoning:
                reading = Reading(reasoning=[text[: tag.start()]])
        elif tag.lastgroup == "stray":
            reading.refuse(f"{tag[0]} outside of a call", text, tag.start())
        else:
            try:
                place = read_call(text, place, reading)
            except Malformed as problem:
                reading.refuse(problem, text, tag.start())
                place = _behind_broken(text, tags, max(place, problem.place))
    reading.content.append(text[place:])
    return reading.done()


def _behind_broken(text: str, tags: re.Pattern[str], place: int) -> int:
    """Return the position to go on at behind a broken call: the next opening tag, or the end of a stray closing one."""
    for tag in tags.finditer(text, place):
        if tag.lastgroup != "stray":
            return tag.start()
        if tag[0].startswith("</tool_call"):
            return tag.end()
    return len(text)
