"""Episodes as rows of a batch. Pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import MediaHandle, Prompt, Rollouts
from verl_like.episodes.episode import Episode, Turn
from verl_like.models.routes import continued, filled


def assemble_rollouts(prompts: Sequence[Prompt], episodes: Sequence[Sequence[Episode]]) -> Rollouts:
    """The episodes of each prompt: a row each, or several where the context was rewritten. A group's are neighbours."""
    flat = [(place, episode) for place, group in enumerate(episodes) for episode in group]
    rows = [(place, number, turns) for number, (place, episode) in enumerate(flat) for turns in episode.rows()]
    turns_of = [turns for _, _, turns in rows]
    numbers_of = [numbers for _, episode in flat for numbers in _numbers(episode)]
    response_length_B = torch.tensor([sum(_lengths(turns)) for turns in turns_of], dtype=torch.int64)
    if all(len(turns) == 1 for turns in turns_of):
        mask_T = torch.ones(int(response_length_B.sum()), dtype=torch.bool)
    else:
        mask_T = _column(turns_of, lambda turn: np.ones(len(turn.sampled)), _nothing, torch.bool)
    prompt_ids_T, prompt_length_B = _contexts(turns_of)
    media = [_media(prompts[place], turns) for place, _, turns in rows]
    return Rollouts(
        prompt_ids_T=prompt_ids_T,
        prompt_length_B=prompt_length_B,
        response_ids_T=_column(turns_of, lambda turn: turn.sampled.token_ids, _observed, torch.int32),
        response_length_B=response_length_B,
        response_mask_T=mask_T,
        group_B=torch.tensor([prompts[place].group for place, _, _ in rows], dtype=torch.int64),
        rollout_log_probs_T=_column(turns_of, lambda turn: turn.sampled.log_probs, _nothing, torch.float32),
        weight_version_T=_column(turns_of, lambda turn: turn.sampled.weight_versions, _nothing, torch.int32),
        finish_reasons=[turns[-1].finish_reason for turns in turns_of],
        episode_names=[flat[number][1].name for _, number, _ in rows],
        rows=[prompts[place].row for place, _, _ in rows],
        media=media if any(media) else None,
        **_turn_columns(turns_of, numbers_of),
        episode_B=_episode_numbers(prompts, episodes) if len(rows) > len(flat) else None,
        **_routes(turns_of, prompt_length_B + response_length_B),
    )


def _media(prompt: Prompt, turns: Sequence[Turn]) -> list[MediaHandle]:
    """The images of a row, in their order."""
    first = prompt.row.media if turns[0].media is None else turns[0].media
    return [*first, *(handle for turn in turns[1:] for handle in turn.media or ())]


def episode_of_rows(episodes: Sequence[Sequence[Episode]]) -> list[int]:
    """Number of the episode that each row of `assemble_rollouts` is a part of."""
    flat = [episode for group in episodes for episode in group]
    return [number for number, episode in enumerate(flat) for _ in episode.rows()]


def _numbers(episode: Episode) -> list[list[int]]:
    """The numbers of the turns in each row: they are counted in the whole episode."""
    counter = itertools.count()
    return [[next(counter) for _ in turns] for turns in episode.rows()]


def _episode_numbers(prompts: Sequence[Prompt], episodes: Sequence[Sequence[Episode]]) -> Tensor:
    """Unique within a run, as groups are, which have at most as many episodes as the largest of them."""
    most = max(map(len, episodes))
    numbers = [
        prompt.group * most + sample
        for prompt, group in zip(prompts, episodes, strict=True)
        for sample, episode in enumerate(group)
        for _ in episode.rows()
    ]
    return torch.tensor(numbers, dtype=torch.int64)


def _contexts(turns_of: Sequence[Sequence[Turn]]) -> tuple[Tensor, Tensor]:
    """Return the contexts before the rows' first turns, joined [T], and the length of each [B].

    A list that several rows share, such as the prompt of a group, becomes an array once.
    """
    known: dict[int, NDArray[np.int32]] = {}
    arrays = []
    for turns in turns_of:
        ids = turns[0].observation_ids
        if id(ids) not in known:
            known[id(ids)] = np.asarray(ids, dtype=np.int32)
        arrays.append(known[id(ids)])
    return torch.from_numpy(np.concatenate(arrays)), torch.tensor([len(ids) for ids in arrays])


def _lengths(turns: Sequence[Turn]) -> list[int]:
    """Tokens that each turn adds to the response: its observation, but for the first, and what was sampled."""
    return [len(turn.sampled) + (len(turn.observation_ids) if place else 0) for place, turn in enumerate(turns)]


def _column(
    turns_of: Sequence[Sequence[Turn]],
    sampled: Callable[[Turn], NDArray[Any]],
    observed: Callable[[Turn], NDArray[Any]],
    dtype: torch.dtype,
) -> Tensor:
    """One column [T]: of each turn what the observation has, but for a row's first, then what is sampled has."""
    parts = []
    for turns in turns_of:
        for place, turn in enumerate(turns):
            if place:
                parts.append(observed(turn))
            parts.append(sampled(turn))
    return torch.from_numpy(np.concatenate(parts)).to(dtype)


def _observed(turn: Turn) -> NDArray[np.int32]:
    return np.asarray(turn.observation_ids, dtype=np.int32)


def _nothing(turn: Turn) -> NDArray[np.float32]:
    return np.zeros(len(turn.observation_ids), dtype=np.float32)


def _routes(turns_of: Sequence[Sequence[Turn]], length_B: Tensor) -> dict[str, Tensor]:
    """routes_T, where an engine noted any: of a token the routes of the first turn that saw it; else unknown."""
    known = [functools.reduce(continued, (turn.sampled.routes for turn in turns)) for turns in turns_of]
    like = next((routes for routes in known if routes is not None), None)
    if like is None:
        return {}
    columns = [filled(routes, length, like) for routes, length in zip(known, length_B.tolist(), strict=True)]
    return {"routes_T": torch.from_numpy(np.concatenate(columns)), "routed_length_B": length_B}


def _turn_columns(turns_of: Sequence[Sequence[Turn]], numbers_of: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """step_T, anchor_T and step_rewards_T, where there is more to say than that each row is one turn."""
    turns = [turn for each in turns_of for turn in each]
    columns: dict[str, Tensor] = {}
    if len(turns) > len(turns_of) or any(turn.state_id >= 0 or turn.reward is not None for turn in turns):
        states_of = [[turn.state_id for turn in each] for each in turns_of]
        for name, values_of, dtype in (("step_T", numbers_of, torch.int32), ("anchor_T", states_of, torch.int64)):
            columns[name] = torch.cat(list(map(_of_turns, turns_of, values_of))).to(dtype)
    if any(turn.reward is not None for turn in turns):
        columns["step_rewards_T"] = torch.cat(list(map(_rewards, turns_of)))
    return columns


def _of_turns(turns: Sequence[Turn], values: Sequence[int]) -> Tensor:
    """One row: at each sampled token the value of its turn, -1 elsewhere."""
    parts = [
        part
        for turn, value in zip(turns, values, strict=True)
        for part in (np.full(len(turn.observation_ids), -1), np.full(len(turn.sampled), value))
    ]
    return torch.from_numpy(np.concatenate(parts[1:]))


def _rewards(turns: Sequence[Turn]) -> Tensor:
    """One row: the reward of each turn on its last token; of one without a token, on the last one before it.

    ValueError where a row has none before it.
    """
    rewards = np.zeros(sum(_lengths(turns)), dtype=np.float32)
    end, last = -len(turns[0].observation_ids), -1
    for turn in turns:
        end += len(turn.observation_ids) + len(turn.sampled)
        last = end - 1 if len(turn.sampled) else last
        if turn.reward is not None:
            if last < 0:
                raise ValueError(f"a turn has reward {turn.reward:g}, but no token was sampled up to its end")
            rewards[last] += turn.reward
    return torch.from_numpy(rewards)
