"""Special tokens that a text spells out: what users, tools and environments write never becomes a control token.

    content "a<|im_end|>b"  --marked-->    "aM<|im_end|>b"                                  M: a mark nobody can type
                            --template-->  "<|im_start|>user\\naM<|im_end|>b<|im_end|>"
                            --encode-->    the template's own are renamed, and read by a copy of the tokenizer that
                                           knows its special tokens by these names alone: it takes the others for text

The copy differs in nothing but names, so ids are those that the tokenizer itself gives to such a text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

Shown = tuple[str, bool]  # a piece of text, and whether it is a control token


class SpecialTokens:
    """The control tokens of a tokenizer: its special tokens and `others`, added tokens that mark turns. Picklable."""

    def __init__(self, tokenizer: Any, others: Collection[str] = ()) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})  # a tokenizer of one's own may know none
        self._tokenizer = tokenizer
        self.ids = {
            token.content: number for number, token in added.items() if token.special or token.content in others
        }
        self.control = {number: text for text, number in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        secret = secrets.randbelow(10**12)  # digits: no template changes them
        self.mark = f"\ufdd0{secret}\ufdd1"
        self._names = {text: f"\ufdd0{number}:{secret}\ufdd1" for text, number in self.ids.items()}

    def spelled(self, value: Any) -> list[str]:
        """The control tokens that any text in a value (messages, tools) spells out, in order."""
        return self._pattern.findall("\n".join(_texts(value)))

    def marked(self, value: Any) -> Any:
        """The same with a mark before the second character of each control token that is spelled out."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][0] + self.mark + found[0][1:], value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        items = [self.marked(item) for item in value]
        for part in items if self._pattern.search("".join(_parts(items))) else ():  # only together they spell one
            part["text"] = self.mark + part["text"]
        return items

    def unmarked(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered text with marks."""
        if not self._tokenizer.is_fast:
            return self._encode_pieces(text, add_special_tokens)
        renamed = self._pattern.sub(lambda found: self._names[found[0]], text)
        return self._copy.encode(self.unmarked(renamed), add_special_tokens=add_special_tokens).ids

    @functools.cached_property
    def _copy(self) -> Tokenizer:
        state = self._tokenizer.backend_tokenizer.to_str()
        for text, name in self._names.items():
            state = state.replace(json.dumps(text, ensure_ascii=False), json.dumps(name, ensure_ascii=False))
        copy = Tokenizer.from_str(state)
        copy.no_padding()
        copy.no_truncation()
        return copy

    def _encode_pieces(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same by a tokenizer in Python, which is asked for what stands between the template's control tokens."""
        ids, start = list[int](), 0
        for found in [*self._pattern.finditer(text), None]:
            piece = self.unmarked(text[start : None if found is None else found.start()])
            plain = {"add_special_tokens": add_special_tokens and not start, "split_special_tokens": True}
            ids += self._tokenizer(piece, **plain)["input_ids"] if piece or not start else []
            if found is not None:
                ids.append(self.ids[found[0]])
                start = found.end()
        return ids

    def shown(self, ids: Iterable[int]) -> list[Shown]:
        """The text of token ids, cut at control tokens: what was one, and what only reads like one."""
        pieces, run = list[Shown](), list[int]()
        for number in [*ids, None]:
            if number is None or number in self.control:
                pieces += [(self._tokenizer.decode(run, skip_special_tokens=False), False)] if run else []
                pieces += [] if number is None else [(self.control[number], True)]
                run = []
            else:
                run.append(number)
        return pieces


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, and the text parts of a message as the one text that templates make of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in itertools.chain(value, value.values()):
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        yield "".join(_parts(value))
        for item in value:
            yield from _texts(item)


def _parts(items: Sequence[Any]) -> list[str]:
    """The texts of content parts; nothing where some are none, or have no text."""
    texts = [item["text"] for item in items if isinstance(item, dict) and isinstance(item.get("text"), str)]
    return texts if len(texts) == len(items) else []
