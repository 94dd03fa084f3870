"""Conversion of an agent loop's result to turns of exactly what the policy sampled in that episode. Pure.

    context that was sent + what was sampled = beginning of prompt_ids + response_ids        (the proof, per completion)

A token is trained on where the loop's mask says so and such a proof covers it; log-probs and weight versions come from
the completion. What the mask says was sampled, but no proof covers (written by the loop, tokenised again, or sampled
after another context), is observation, and counted. Turns that read the same before they began, began alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verl_like.episodes.episode import Turn
from verl_like.plugins.agents.tools.text import to_reward
from verl_like.plugins.agents.tools.tool_call import state_id
from verl_like.plugins.verl_agents.messages import LoopRow
from verl_like.rollout.rollout_engine import Completion, FinishReason, Sampled

Record = Sequence[tuple[list[int], Completion]]  # of one episode: contexts that were sent, and what came back


def turns_of(
    rows: Sequence[LoopRow], record: Record, *, response: int, total: int, turn_rewards: bool = False
) -> tuple[list[Turn], Counter[str]]:
    """Convert the rows to turns, and count the tokens that were cut or not trained on.

    `calls` are the texts that the loop put between two answers: what it did for them is its own business. Tokens behind
    the last sampled one are left out, and so are rows without one. Raises ValueError where no row is left, for a prompt
    that leaves no room, and for more scores than turns.

    response: most tokens of a row after its prompt.
    total: most tokens of a row with its prompt.
    turn_rewards: extra_fields["turn_scores"] of a row are the rewards of its turns, in order.
    """
    turns: list[Turn] = []
    counts: Counter[str] = Counter()
    for row in rows:
        room = min(response, total - len(row.prompt_ids_P))
        if room < 1:
            what = f"an AgentLoopOutput has {len(row.prompt_ids_P)} prompt_ids"
            raise ValueError(f"{what}; data.max_prompt_length + data.max_response_length = {total}")
        cut = max(0, len(row.response_ids_R) - room)
        unsampled = counts["unsampled_tokens"]
        numbered = list(_turns_of_row(row, record, room, counts))
        found = [turn for _, turn in numbered]
        scores = row.extra.get("turn_scores") if turn_rewards else None
        if scores:
            if counts["unsampled_tokens"] > unsampled:
                raise ValueError(
                    "extra_fields['turn_scores'] of a row whose mask has tokens that were not sampled there"
                )
            found = _rewarded(numbered, scores, is_cut=cut > 0)
        if cut and found:  # what follows does not fit: the answer is not whole
            found[-1] = dataclasses.replace(found[-1], finish_reason="length")
        counts["cut_tokens"] += cut
        counts["calls"] += sum(
            one != other and len(turn.observation_ids) > 0 for (one, _), (other, turn) in itertools.pairwise(numbered)
        )
        turns += found
    if not turns:
        raise ValueError("no token of what the loop returned was sampled by the policy in this episode")
    if record and not len(record[-1][1].sampled) and record[-1][1].finish_reason == "length":  # there was no room left
        turns[-1] = dataclasses.replace(turns[-1], finish_reason="length")
    return turns, counts


def _turns_of_row(row: LoopRow, record: Record, room: int, counts: Counter[str]) -> Iterator[tuple[int, Turn]]:
    """Yield each turn with the number of its completion, of which a mask with holes makes several."""
    ids_T = np.concatenate([row.prompt_ids_P, row.response_ids_R[:room]])
    start = len(row.prompt_ids_P)
    source_T = np.full(len(ids_T), -1)  # which completion a token is from
    proved = []
    for number, (context_ids, completion) in enumerate(record):
        begin = len(context_ids)
        if start <= begin < len(ids_T) and np.array_equal(ids_T[:begin], context_ids):
            proved.append((begin, _common(ids_T[begin:], completion.sampled.token_ids), number))
    for begin, length, number in sorted(proved):  # of two completions of one context the longer proof counts
        source_T[begin : begin + length] = number
    wanted_T = np.concatenate([np.zeros(start, dtype=bool), row.mask_R[:room]])
    counts["unsampled_tokens"] += int((wanted_T & (source_T < 0)).sum())
    source_T[~wanted_T] = -1
    last, edges = 0, np.flatnonzero(np.diff(source_T, prepend=-2, append=-2))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if (number := int(source_T[begin])) >= 0:
            context_ids, completion = record[number]
            observation_ids = ids_T[last:begin].tolist()
            turn = Turn(
                observation_ids=observation_ids,
                sampled=_part(completion.sampled, len(context_ids), begin, end),
                finish_reason=_reason(completion, end - len(context_ids), is_cut=end == len(ids_T) == start + room),
                new_row=last == 0,
                state_id=state_id(str(observation_ids)),
            )
            yield number, turn
            last = end


def _rewarded(numbered: Sequence[tuple[int, Turn]], scores: Any, *, is_cut: bool) -> list[Turn]:
    """Give the row's turns the scores of its completions, in order; each stands on the last turn of its completion.

    is_cut: there may be scores of completions that are no longer in the row.
    """
    completions = list(dict.fromkeys(number for number, _ in numbered))
    if not isinstance(scores, list) or (len(scores) > len(completions) and not is_cut):
        what = f"extra_fields['turn_scores']={scores!r:.200}"
        raise ValueError(
            f"{what}: must be a list with at most one score for each of the row's {len(completions)} turns"
        )
    rewards = dict(zip(completions, map(to_reward, scores), strict=False))
    last = {number: place for place, (number, _) in enumerate(numbered)}
    return [
        dataclasses.replace(turn, reward=rewards.get(number)) if last[number] == place else turn
        for place, (number, turn) in enumerate(numbered)
    ]


def _common(ids_T: np.ndarray, sampled_T: np.ndarray) -> int:
    """Count the tokens with which both begin."""
    length = min(len(ids_T), len(sampled_T))
    different = np.flatnonzero(ids_T[:length] != sampled_T[:length])
    return int(different[0]) if len(different) else length


def _part(sampled: Sampled, context: int, begin: int, end: int) -> Sampled:
    """Cut tokens out of a completion, by their places in the row: routes stay those of all up to them."""
    own = slice(begin - context, end - context)
    return Sampled(
        token_ids=sampled.token_ids[own],
        log_probs=sampled.log_probs[own],
        weight_versions=sampled.weight_versions[own],
        routes=None if sampled.routes is None else sampled.routes[:end],
    )


def _reason(completion: Completion, end: int, *, is_cut: bool) -> FinishReason:
    if end == len(completion.sampled):
        return completion.finish_reason
    return "length" if is_cut else "stop"  # the loop took less than was sampled
