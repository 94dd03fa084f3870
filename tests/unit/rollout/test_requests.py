"""Seeds of requests."""

from __future__ import annotations

from verl_like.rollout.rollout_engine import request_seed


def test_seeds_differ_and_never_change() -> None:
    assert request_seed(1, 2, 3, 4) == 579868893099880874
    draws = [(s, t, g, k) for s in range(3) for t in ("train", "val") for g in range(12) for k in range(12)]
    seeds = {request_seed(*draw) for draw in draws}
    assert len(seeds) == len(draws) and all(0 <= seed < 2**62 for seed in seeds)
