"""The loop's own state: one update of the KL coefficient a step, and a round trip through a checkpoint."""

from __future__ import annotations

import pytest

from verl_like.algorithms.kl import KLController
from verl_like.config import KLControlConfig
from verl_like.trainer.state import TrainState


def fresh(kind: str) -> TrainState:
    config = KLControlConfig(type=kind, kl_coef=0.2, target_kl=2.0, horizon=1000)  # type: ignore[arg-type]
    return TrainState(step=0, weight_version=0, kl=KLController.from_config(config))


def test_the_coefficient_moves_once_a_step() -> None:
    """However many mini-batches, domains or epochs a step has: it is told one KL and one number of responses."""
    state = fresh("adaptive").advance({"critic/kl": 50.0, "actor/kl_loss": 9.0}, num_sequences=100, actor_updated=True)
    assert state.kl_coef == pytest.approx(0.2 * (1 + 0.2 * 100 / 1000))
    assert state.advance({}, num_sequences=100, actor_updated=True).kl_coef == state.kl_coef


@pytest.mark.parametrize(("kind", "coef"), [("adaptive", 0.2 * 1.02), ("fixed", 0.2)])
def test_a_resumed_state_goes_on_where_it_was(kind: str, coef: float) -> None:
    moved = fresh(kind).advance({"critic/kl": 50.0}, num_sequences=100, actor_updated=False)
    resumed = fresh(kind).load_state_dict(moved.state_dict())
    assert resumed == moved and resumed.kl_coef == pytest.approx(coef)
    assert (resumed.step, resumed.weight_version) == (1, 0)
