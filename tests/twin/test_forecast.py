"""The forecast of memory against what whole steps allocate on fake devices; operations against models/cost.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.twin.cases import FORECAST, SMALL, case
from tests.twin.inner import TIMEOUT_S
from tests.twin.test_step import Run
from verl_like.models.cost import ModelCost

FAR = 0.03  # of what a phase took; the goal is 0.05


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("number", range(0, len(FORECAST), 5))
def test_the_forecast_is_near(on_twin: Run, number: int) -> None:
    """Phase by phase, within 3% (all but one within 1%)."""
    far = {}
    for name, outcome in on_twin(FORECAST[number : number + 5]).items():
        assert "error" not in outcome, f"{name}: {outcome['error']}"
        for phase, told in outcome["forecast"].items():
            peak = outcome["phases"].get(phase, {}).get("peak")
            if peak and abs(told / peak - 1) > FAR:
                far[f"{name}, {phase}"] = f"told {told / 2**30:.2f} GiB, took {peak / 2**30:.2f}"
    assert far == {}


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
def test_operations_are_those_of_the_cost_model(on_twin: Run, tmp_path: Path) -> None:
    """Within 1% for rows of equal length: a pass, and an update that recomputes nothing but the head's product."""
    keys = ("actor_rollout_ref.model.enable_gradient_checkpointing=false", "actor_rollout_ref.actor.use_kl_loss=false")
    given = case("flops", SMALL, *keys, world=1, layers=4)
    (outcome,) = on_twin([given]).values()
    assert "error" not in outcome, outcome["error"]
    config = AutoConfig.from_pretrained(given["model"])
    config.num_hidden_layers, config.layer_types = 4, config.layer_types[:4]
    cost = ModelCost.of(config)
    head = 2.0 * cost.head_weights * 8 * 384
    forward = cost.forward_flops([512] * 8, 8 * 384)
    assert outcome["phases"]["old_log_prob"]["flops"] == pytest.approx(forward, rel=0.01)
    assert outcome["phases"]["update_actor"]["flops"] == pytest.approx(3 * forward + head, rel=0.01)
