"""Conversations with a slow tool: a batch takes as long as its longest chain, unless something waits for a batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.bench.tiny import bench, use_tiny_shapes
from verl_like.episodes.episode import Ask, Episode, Turn
from verl_like.kit.bench import agents
from verl_like.kit.bench.agents import Work, simulate

WORK = Work.drawn(40, 3, 20, 0.2)
EVERY = range(40)


def test_the_longest_chain_is_as_long_as_its_steps_and_its_calls() -> None:
    tokens = sum(WORK.lengths[WORK.longest])
    alone = simulate(WORK, [WORK.longest], 2)
    assert tokens * 0.01 + 2 * 0.2 < alone < 1.05 * (tokens * 0.01 + 2 * 0.2)


def test_episodes_do_not_wait_for_each_other() -> None:
    assert simulate(WORK, EVERY, 2) < 1.1 * simulate(WORK, [WORK.longest], 2)


def test_a_barrier_after_each_turn_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rollouts in rounds would cost: every turn begins when the last of the turn before has ended."""

    class InRounds:
        def __init__(self) -> None:
            self.barrier = asyncio.Barrier(len(EVERY))

        async def run(self, prompt: object, sample: int, ask: Ask) -> Episode:
            turns, context = [], [5]
            for _ in range(3):
                turns.append(Turn.of(context, await ask(context)))
                await self.barrier.wait()
            return Episode(turns=tuple(turns))

    apart = simulate(WORK, EVERY, 2)
    monkeypatch.setattr(agents, "_agent", lambda *parts: InRounds())
    assert simulate(WORK, EVERY, 2) + 2 * 0.2 > 1.3 * apart  # it calls no tool


def test_turns_of_another_length_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents._Timed, "__call__", lambda self, *ids, **more: self.ask(*ids, max_tokens=1))
    with pytest.raises(RuntimeError, match="has turns of"):
        simulate(WORK, EVERY, 2)


def test_a_real_engine_and_real_tool_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_shapes(monkeypatch)
    sizes = ("--episodes", "6", "--turns", "3", "--tokens", "4", "--tool-ms", "10", "--rounds", "1", "--threads", "1")
    report = bench(tmp_path / "agents.json", "agents", "--engine", "hf", *sizes)
    alone, plain, whole = (report.row(n).seconds for n in ("the longest alone", "the same tokens without tools", "all"))
    assert alone and plain and whole and min(alone, whole) > 2 * 0.01  # the tool does wait
    assert report.figures["to_floor"] == pytest.approx(whole / max(alone, plain))
