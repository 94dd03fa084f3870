"""`verl-like check-template MODEL`: what the model's chat template does to a conversation of several turns.

Each case is played by a model that writes what the template itself would write, so whatever is cut here is cut by the
template in any run. No weights are loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_like.data.chat import PromptEncoder
    from verl_like.kit.verbs.template_cases import Case, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a case.

    cuts: reasons why a turn began a new row instead of continuing the last one.
    unequal: number of contexts that differ from apply_chat_template of the messages.
    drift: number of tokens in which the rows that were sent differ from the transcript's contexts.
    left_out: parts of the first messages and tools that the prompt does not contain.
    """

    case: str
    refused: str = ""
    cuts: tuple[str, ...] = ()
    unequal: int = 0
    drift: int = 0
    left_out: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verl-like check-template`."""
    parser.add_argument("model", metavar="MODEL", help="a folder or hub name with a tokenizer; no weights are loaded")
    parser.add_argument("--chat-template", default="native", help="data.chat_template: a name, or a Jinja file")
    parser.add_argument("--template-kwargs", type=json.loads, default={}, metavar="JSON", help="variables of it")
    parser.add_argument("--no-tools", action="store_true", help="leave out the cases with tools")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer bring code of its own")


def run(arguments: argparse.Namespace) -> None:
    """Print the table; exit status 1 when the template refuses a case, 2 when there is no tokenizer or template."""
    from verl_like.data.chat import PromptEncoder
    from verl_like.data.prompt_truth import own_text
    from verl_like.data.templates import find_template
    from verl_like.kit.verbs.template_cases import cases
    from verl_like.models.loading import load_tokenizer

    try:
        tokenizer = load_tokenizer(arguments.model, arguments.trust_remote_code, key="MODEL")
        encoder = PromptEncoder(tokenizer, arguments.template_kwargs, find_template(arguments.chat_template))
        if not encoder.has_template:
            raise ValueError(f"{arguments.model} has no chat template; name one: --chat-template NAME|FILE")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    findings = []
    for case, with_json in zip(cases(), cases(json_arguments=True), strict=True):
        if not (case.tools and arguments.no_tools):
            finding = check(encoder, case)
            again = check(encoder, with_json) if finding.refused else finding
            findings.append(finding if again.refused else again)
    print("\n".join([f"model: {arguments.model}, template: {arguments.chat_template}", *report(findings)]))
    if adds := own_text(encoder):
        print(f"note: the chat template adds where there is no system message: {adds!r}", file=sys.stderr)
    left_out = dict.fromkeys(error for finding in findings for error in finding.left_out)
    for error in left_out:
        print(f"error: {error}", file=sys.stderr)
    if left_out or any(finding.refused or finding.drift for finding in findings):
        sys.exit(1)


def check(encoder: PromptEncoder, case: Case) -> Finding:
    """Play a case twice: with the template's history, and with the model's own, which must never be cut."""
    try:
        followed, kept = (play(encoder, case, follow_template=follow) for follow in (True, False))
    except ValueError as error:
        return Finding(case=case.name, refused=str(error))
    assert not kept.cuts
    return dataclasses.replace(followed, drift=followed.drift + kept.drift)


def play(encoder: PromptEncoder, case: Case, *, follow_template: bool) -> Finding:
    """One conversation. Raises ValueError where the template refuses something."""
    from verl_like.data.prompt_truth import look
    from verl_like.episodes.transcript import Transcript
    from verl_like.kit.verbs.template_cases import TOOLS, answer, as_written

    messages: list[Message] = [{"role": "system", "content": "Answer briefly."}] if case.system else []
    messages.append({"role": "user", "content": "What is the weather like in Paris?"})
    tools = TOOLS if case.tools else None
    left_out = tuple(look(encoder, (messages, tools)).errors)
    row = encoder.encode([(messages, tools)])[0]  # what was sent and sampled, put together here a second time
    transcript = Transcript(encoder, row, messages, tools, follow_template=follow_template)
    cuts, unequal, drift = [], 0, 0
    for message, observed in case.steps:
        if encoder.render((transcript.messages, tools)).rstrip().endswith("</think>"):  # it is asked not to think
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
        sampled = as_written(encoder, transcript.messages, message, tools, spaces=True)
        if case.cut_off:
            sampled = sampled[:-2]  # the end of the turn, and a token of the answer
            message = answer(encoder.tokenizer.decode(sampled, skip_special_tokens=True))
        transcript.wrote(sampled, message)
        seen = transcript.observe(observed)
        row = seen.ids if seen.new_row else [*row, *sampled, *seen.ids]
        drift += sum(a != b for a, b in zip_longest(row, transcript.context_ids))
        cuts += [seen.reason] if seen.new_row else []
        try:
            unequal += row != encoder.encode([(transcript.messages, tools)])[0]
        except ValueError:  # it takes the answer as the text that it is, but not these tool calls
            unequal += 1
    return Finding(case=case.name, cuts=tuple(cuts), unequal=unequal, drift=drift, left_out=left_out)


def report(findings: Sequence[Finding]) -> list[str]:
    """A table: whether the history stayed as it was, or what was rendered anew; a line of totals."""
    width = max(len(finding.case) for finding in findings)
    lines = [f"{'case':<{width}}  {'history':<8} {'ids':<8}  drift"]
    for found in findings:
        if found.refused:
            lines.append(f"{found.case:<{width}}  REFUSED  {found.refused}")
            continue
        history, ids = "CUT" if found.cuts else "exact", f"{found.unequal} differ" if found.unequal else "equal"
        cuts = "; ".join(dict.fromkeys(found.cuts))
        lines.append(f"{found.case:<{width}}  {history:<8} {ids:<8}  {found.drift:>5}  {cuts}".rstrip())
    num_refused = sum(bool(finding.refused) for finding in findings)
    num_cut = sum(bool(finding.cuts) for finding in findings)
    num_exact = len(findings) - num_refused - num_cut
    return [*lines, f"{len(findings)} cases: {num_exact} exact, {num_cut} cut, {num_refused} refused"]
