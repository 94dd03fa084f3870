"""Two processes in lockstep over gloo: what one of them notices when the other one ends."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.contracts.two_ranks import fork_on_two_ranks
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout
from verl_like.parallel.dist import init_distributed
from verl_like.rollout import step_loop
from verl_like.rollout.orders import lockstep_of
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, SamplingParams

GONE = "another rank of this replica has ended, left it or said nothing"
ENDLESS = GenerationRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(max_tokens=10**9), seed=1)


def test_a_rank_that_ends_is_noticed_at_once(tmp_path: Path) -> None:
    first, _ = fork_on_two_ranks(__file__, tmp_path)
    assert set(first) == {"closes", "fails", "dies"}
    assert all(seconds < 10 for seconds in first.values()), first  # a silent one would be waited for 600


def rank_main(rank: int, port: int, folder: Path) -> None:
    init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    step_loop._KEEPALIVE_S, step_loop._PARTING_S = 0.2, 0.5
    seconds = {}
    for case in ("closes", "fails", "dies"):
        fake = FakeTimeEngine(max_model_len=10**10, length_of=lambda request: 10**9)
        rollout = FakeTimeRollout(fake, lockstep=lockstep_of(rank, 2, 2))
        rollout.open()
        if rank == 0:
            future = rollout.submit(ENDLESS)
            time.sleep(1)
            (folder / case).touch()
            begun = time.monotonic()
            with pytest.raises(RolloutError, match=GONE):
                future.result(60)
            with pytest.raises(RolloutError, match=GONE):
                rollout.pause()
            seconds[case] = time.monotonic() - begun
        else:
            while not (folder / case).exists():
                time.sleep(0.01)
            if case == "closes":
                rollout.shutdown()
                assert not rollout._loop._thread.is_alive()
            elif case == "fails":
                fake.failure = KeyError("broken")
                with pytest.raises(RolloutError, match="broken"):
                    rollout.pause()
            else:
                (folder / "rank1.json").write_text("{}")
                os._exit(0)
        rollout.shutdown()
    (folder / "rank0.json").write_text(json.dumps(seconds))
    os._exit(0)  # the other process is gone: nothing that is collective can end well


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
