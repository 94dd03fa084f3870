"""Races of tasks that end in any order, also within a few passes of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

import pytest

from verl_like.episodes import first_n
from verl_like.episodes.first_n import all_of, first_of


async def after(passes: int, value: Any) -> Any:
    for _ in range(passes):
        await asyncio.sleep(0)
    if isinstance(value, Exception):
        raise value
    return value


async def stuck(log: list[str]) -> Any:
    try:
        await asyncio.sleep(1000)
    finally:
        log.append("ended")


def good(value: Any) -> bool:
    return value != "lost"


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


@pytest.mark.parametrize("others", ["stuck", "lost"])
def test_the_first_good_ones_are_kept_whenever_they_end(others: str) -> None:
    async def raced(first: int, second: int) -> None:
        log: list[str] = []
        third = stuck(log) if others == "stuck" else after(second + 1, "lost")
        kept, _ = await first_of([third, after(first, "b"), after(second, "c")], 2, good)
        assert kept == {1: "b", 2: "c"} and log == ["ended"] * (others == "stuck")

    for first, second in itertools.product(range(5), repeat=2):
        run(raced(first, second))


def test_lost_ones_fill_up_where_too_few_are_good() -> None:
    for first, second, third in itertools.product(range(4), repeat=3):
        racing = [after(first, "a"), after(second, "lost"), after(third, "lost")]
        kept, _ = run(_gathered(racing, 2))
        assert len(kept) == 2 and kept[0] == "a"


async def _gathered(racing: list[Any], count: int, besides: list[Any] | None = None) -> Any:
    return await first_of(racing, count, good, besides or [])


def test_losers_end_before_what_runs_besides_is_waited_for() -> None:
    log: list[str] = []

    async def beside() -> str:
        while not log:
            await asyncio.sleep(0)
        return "baseline"

    assert run(_gathered([after(1, "a"), stuck(log)], 1, [beside()])) == ({0: "a"}, ["baseline"])


@pytest.mark.parametrize("besides", [False, True])
def test_the_first_error_ends_everything_at_once(besides: bool) -> None:
    log: list[str] = []
    broken, others = after(3, KeyError("a mistake")), [stuck(log), stuck(log)]
    with pytest.raises(KeyError, match="a mistake"):
        run(_gathered(others, 1, [broken]) if besides else _gathered([*others, broken], 2))
    assert log == ["ended", "ended"]
    with pytest.raises(KeyError, match="a mistake"):
        run(all_of_them([stuck(log), after(1, KeyError("a mistake"))]))
    assert len(log) == 3


async def all_of_them(coroutines: list[Any]) -> Any:
    return await all_of(coroutines)


def test_who_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(first_n, "GRACE_S", 0.1)

    async def stubborn() -> None:
        for _ in range(40):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)

    async def falls() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            raise OSError("while it cleaned up") from None

    with caplog.at_level(logging.WARNING):
        assert run(_gathered([after(1, "a"), stubborn(), falls()], 1)) == ({0: "a"}, [])
    assert "no longer wanted goes on" in caplog.text and "stubborn" in caplog.text
    assert "no longer wanted failed" in caplog.text and "while it cleaned up" in caplog.text
