"""The simulated fleet: what each order of taking groups costs."""

from __future__ import annotations

from benchmarks.scheduler import Fleet
from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits


def test_the_fastest_groups_are_shorter_and_waiting_for_the_others_wins_nothing() -> None:
    plain, more = Limits(wanted=16, in_flight=16, most=64), Limits(wanted=16, in_flight=24, most=64, extra=8)
    sizes = {"num_prompts": 16, "n": 4, "num_replicas": 2}
    whole = Fleet(**sizes).run("", plain, DrawOrder, 6)
    dropped = Fleet(**sizes, aborted="drop").run("", more, CompletionOrder, 6)
    waited = Fleet(**sizes, aborted="wait").run("", more, CompletionOrder, 6)
    assert whole.seconds is not None and dropped.seconds is not None and waited.seconds is not None
    assert whole.figures["used_by_written"] == 1
    assert dropped.seconds < 0.7 * whole.seconds and dropped.figures["used_by_written"] < 0.9
    assert waited.seconds > 0.8 * whole.seconds


def test_dynamic_sampling_in_flight_takes_the_same_groups_sooner() -> None:
    limits = Limits(wanted=16, in_flight=16, most=800)
    fleets = [Fleet(num_prompts=16, n=4, num_replicas=2, signal=0.5) for _ in range(2)]
    draws, flight = (fleet.run("", limits, DrawOrder, 6, in_draws=number == 0) for number, fleet in enumerate(fleets))
    assert draws.figures["used_tokens"] == flight.figures["used_tokens"]
    assert draws.seconds is not None and flight.seconds is not None and flight.seconds < 0.9 * draws.seconds
