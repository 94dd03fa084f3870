"""Routes that vLLM returns by its own flag on CUDA: of every token, through its cache and its graphs; and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts import test_routes as routes
from tests.contracts.engine_ends import within
from tests.unit.rollout.tiny import free_port
from verl_like.config import RolloutConfig
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    pytest.importorskip("vllm")
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cuda")
    shutdown_distributed()


@pytest.mark.parametrize("eager", [True, False])
def test_the_flag_gives_the_routes_of_every_token(
    process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory, eager: bool
) -> None:
    path = routes.mixture(Path(tmp_path_factory.mktemp("model")))
    engine, rollout = routes.ends("vllm", path, process, "bfloat16", enforce_eager=eager, gpu_memory_utilization=0.2)
    within(engine, rollout, RolloutConfig(), process)(1)
    for _ in range(2):  # the second time all prompts begin in the cache
        rows = routes.rows_of(rollout, routes.requests(16, 24))
        assert rows.routes_T is not None and rows.routes_T.shape[1:] == (2, 3)
        for each in rows.routes_T.split(rows.num_tokens_B().tolist()):
            assert int(each[:-1].max()) < 8 and bool((each[-1] == routes.X).all())
    assert rows.routes_T is not None
    replayed, live = (routes.gap(engine, given) for given in (rows, rows.with_routes(None)))
    print(f"replayed / live: {replayed / live:.3f} ({replayed:.5f}, {live:.5f} nats)")
    assert replayed < 1.05 * live < routes.gap(engine, rows.replace(routes_T=rows.routes_T.roll(1, 0)))
    rollout.shutdown()
