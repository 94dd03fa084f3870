"""Floors and utilisation by hand on a model whose cost can be counted on fingers."""

import pytest

from verl_like.kit.speed.roofline import (
    RunShape,
    generation_floor,
    phase_flops,
    speed_line,
    speed_metrics,
    sync_floor,
)
from verl_like.models.cost import ModelCost
from verl_like.parallel.device_peak import DevicePeak

MODEL = ModelCost(body_weights=100, head_weights=10, all_weights=120, attention_width=1, cache_width=2, windows=(None,))


def shape(**changes):
    values = {
        "actor": MODEL,
        "critic": MODEL.with_value_head(),
        "peak": DevicePeak(flops=1000.0, bandwidth=500.0, source="measured"),
        "weight_bytes": 2,
        "responses_per_prompt": 2,
        "rollout_replicas": 1,
        "actor_epochs": 1,
        "critic_epochs": 2,
    }
    return RunShape(**(values | changes))


PROMPTS, RESPONSES = [3, 3], [2, 1]
FORWARD = 2 * (9 * 100 + 3 * 10) + 4 * (5 * 6 / 2 + 4 * 5 / 2)
CRITIC = FORWARD - 2 * 3 * 10


def test_operations_of_each_pass():
    assert phase_flops(shape(), PROMPTS, RESPONSES) == {
        "old_log_prob": FORWARD,
        "ref": FORWARD,
        "update_actor": 3 * FORWARD,
        "values": CRITIC,
        "update_critic": 2 * 3 * CRITIC,
    }


def test_a_shared_prompt_is_needed_once():
    """Of two rows with one prompt of three tokens, one computes it."""
    prompt = 2 * 3 * 100 + 4 * 6
    sharing = shape(actor_shares_prompts=True, critic_shares_prompts=True)
    flops = phase_flops(sharing, PROMPTS, RESPONSES, [0, 3])
    assert flops["update_actor"] == 3 * (FORWARD - prompt) and flops["values"] == CRITIC - prompt
    assert phase_flops(sharing, PROMPTS, RESPONSES, [0, 0]) == phase_flops(shape(), PROMPTS, RESPONSES, [0, 3])


def test_utilisation_is_operations_by_time_and_peak():
    metrics = speed_metrics(shape(), {"update_actor": 10.0, "step": 20.0}, PROMPTS, RESPONSES)
    assert metrics["perf/mfu/actor"] == pytest.approx(3 * FORWARD / (10.0 * 1000.0))
    assert metrics["perf/floor_ratio/update_actor"] == pytest.approx(1 / metrics["perf/mfu/actor"])
    assert "perf/mfu/critic" not in metrics and "perf/mfu/actor_infer" not in metrics  # those passes did not run


def test_two_updates_of_the_same_rows_are_twice_the_work():
    once, twice = (phase_flops(shape(actor_epochs=n), PROMPTS, RESPONSES)["update_actor"] for n in (1, 2))
    assert twice == 2 * once


def test_generation_reads_each_prompt_once_and_is_bound_by_the_slower_resource():
    prefill = (2 * (3 * 100 + 10) + 4 * 6) / 1000  # the second row shares the first one's prompt
    decode = 2 * (3 * 100 + 3 * 10) + 4 * ((15 - 6) + (10 - 6))
    weights = 2 * (100 + 10)  # two steps, as the longest response has two tokens
    cache = 2 * ((15 - 6) + (10 - 6))
    assert generation_floor(shape(), PROMPTS, RESPONSES) == pytest.approx(
        prefill + max(decode / 1000, (weights + cache) * 2 / 500)
    )
    slow_memory = DevicePeak(flops=1000.0, bandwidth=1.0, source="measured")
    assert generation_floor(shape(peak=slow_memory), PROMPTS, RESPONSES) == pytest.approx(
        prefill + (weights + cache) * 2
    )


def test_each_replica_must_get_the_weights():
    assert sync_floor(shape(rollout_replicas=4)) == 4 * sync_floor(shape()) == pytest.approx(4 * 2 * 120 * 2 / 500)


def test_line_names_the_largest_phase_first():
    line = speed_line({"gen": 1.0, "update_actor": 2.0, "step": 3.1}, {"perf/floor_ratio/gen": 4.0})
    assert line == "step 3.10 s: update_actor 2.00 s, gen 1.00 s (4.0x floor)"


def test_tokens_without_a_backward_pass_cost_a_third() -> None:
    half = phase_flops(shape(), PROMPTS, RESPONSES, forward_only=0.5)["update_actor"]
    assert half == pytest.approx(2 * FORWARD)
    assert phase_flops(shape(), PROMPTS, RESPONSES, forward_only=1.0)["update_actor"] == FORWARD


def test_prompts_are_read_once_by_what_rows_repeat_where_that_is_known():
    prompts, responses = [3, 5, 7, 5, 4], [2, 1, 1, 1, 1]
    by_tokens = generation_floor(shape(), prompts, responses, [0, 0, 0, 5, 0])
    by_count = generation_floor(shape(), prompts, responses)  # every other row
    read = [MODEL.forward_flops(once, len(once)) / 1000.0 for once in ([3, 5, 7, 4], [3, 7, 4])]
    assert by_tokens - by_count == pytest.approx(read[0] - read[1])
