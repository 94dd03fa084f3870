"""The server's engines on CUDA, in float32: shared passes beside those of each alone, samples, the same bits twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.tinker_server import test_shared as shared
from verl_like.plugins.tinker_server.engine import Engines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def engines(shared_data: Path) -> Iterator[Engines]:
    """Engines on the device."""
    made = shared.engines_on("cuda", shared_data / "stories260k" / "hf")
    yield made
    made.close()


def test_shared_passes_are_those_of_each_alone(engines: Engines, tmp_path: Path) -> None:
    """Kernels choose another order of sums by the number of tokens: ten times the difference of a CPU is allowed."""
    shared.test_gradients_of_a_shared_pass_are_those_of_each_alone(engines, most=1e-5)
    shared.test_numbers_that_are_not_finite_stay_with_their_model(engines)
    shared.test_samples_of_several_models_share_a_batch(engines, tmp_path)


def test_one_request_gives_the_same_bits_twice(engines: Engines) -> None:
    found = []
    for _ in range(2):
        engines.forward_backward([shared.work("bob")], backward=True, seed=1)
        found.append(shared.gradients(engines, "bob"))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
