"""The memory forecast: sums by hand, what fits, and the search for the key that makes it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import pytest
from transformers import AutoConfig

from tests.unit.bench.tiny import MODEL
from verl_like.config import PPOConfig
from verl_like.kit.bench.inputs import model_config
from verl_like.kit.forecast import sizing_page as sizing_docs
from verl_like.kit.forecast.memory import GIB, Forecast, Machine, changed, forecast, largest_budget, remedies
from verl_like.kit.forecast.sizing_page import shape_of
from verl_like.models.cost import ModelCost
from verl_like.models.memory import Path, Shape, activation_bytes, late_bytes
from verl_like.trainer.compose import compose

ONE, EIGHT = (Machine(on_cpu=False, world=world, capacity=80e9) for world in (1, 8))
MODEL_KEY = "actor_rollout_ref.model"
FSDP = "actor_rollout_ref.actor.fsdp_config"
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@pytest.fixture(scope="module")
def config() -> PPOConfig:
    return compose(
        [
            "data.train_files=a.parquet",
            f"{MODEL_KEY}.path=m",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=8",
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "data.max_prompt_length=1024",
            "data.max_response_length=3072",
        ]
    )


def at(config: PPOConfig, machine: Machine, values: dict[str, Any] | None = None, size: str = "1.5B") -> Forecast:
    return forecast(changed(config, values or {}), shape_of(size), None, machine)


def test_published_sizes_are_counted_as_the_models_themselves() -> None:
    """The formula of shape_of on a small Qwen2, whose weights transformers counts."""
    counted = Shape.of(config := model_config(MODEL, 128), ModelCost.of(config))
    sizes = (32, MODEL.num_layers, 4, 2, MODEL.intermediate_size, MODEL.vocab_size, MODEL.tied_embeddings)
    assert (MODEL.hidden_size, MODEL.num_heads) == (32, counted.heads)
    sizes = (*sizes[:2], counted.heads, counted.kv_heads, *sizes[4:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizing_docs._SIZES, "tiny", sizes)
        assert shape_of("tiny") == counted


def test_published_experts_are_counted_as_the_models_themselves(shared_data: FilePath) -> None:
    for name in ("30B-A3B", "235B-A22B"):
        config = AutoConfig.from_pretrained(shared_data / "model_configs" / f"Qwen__Qwen3-{name}.json")
        assert sizing_docs.experts_shape(name) == Shape.of(config, ModelCost.of(config))


def test_a_stage_by_hand(config: PPOConfig) -> None:
    """The larger of two on eight GPUs, four of which hold it."""
    shape, stages = shape_of("32B"), {f"{FSDP}.pipeline_parallel_size": 2, BUDGET: 16_384}
    whole, cut = at(config, EIGHT, {BUDGET: 16_384}, "32B"), at(config, EIGHT, stages, "32B")
    weights = 32 * shape.layer_weights + shape.vocab * shape.hidden + shape.hidden
    update = cut.phases["update_actor"]
    assert update["actor weights"] == update["actor optimizer"] / 2 == 4 * weights / 4
    assert update["activations"] == whole.phases["update_actor"]["activations"]  # of half the layers, twice
    pieces = at(config, EIGHT, stages | {f"{FSDP}.virtual_pipeline_size": 2}, "32B").phases["update_actor"]
    assert pieces["activations"] / update["activations"] == pytest.approx(5 / 4, rel=0.02)  # five passes of a half
    late = at(config, EIGHT, stages | {f"{FSDP}.pipeline_schedule": "zero_bubble"}, "32B").phases["update_actor"]
    sums, root = 4 * 32 * shape.layer_weights, 4 * (shape.vocab * shape.hidden + shape.hidden)
    assert late["gradients"] == sums + root / 4  # those of the backward passes are summed over the shards each time
    part = late_bytes(shape, Path(c=2)) * 32 * 16_384  # of one micro-batch, beside one micro-batch's activations
    assert late["activations"] == part + activation_bytes(replace(shape, layers=32), Path(c=2), 16_384, 4096)
    saved = whole.phases["update_actor"]["gathered weights"] - update["gathered weights"]
    assert saved == 2 * shape.vocab * shape.hidden  # one of embedding and head, in bfloat16


def test_buckets_to_another_process_are_counted_on_a_cpu_too(config: PPOConfig) -> None:
    """Files of shared memory are its host's memory as well; within a process one tensor is on its way at a time."""
    on_cpu, shape = replace(ONE, on_cpu=True), shape_of("1.5B")
    hf = {"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.dtype": "bfloat16"}
    own = at(config, on_cpu, hf).phases["update_weights"]["buffers"]
    apart = at(config, on_cpu, hf | {"actor_rollout_ref.rollout.server": True}).phases["update_weights"]["buffers"]
    assert own == 2 * shape.vocab * shape.hidden
    assert apart == 2 * 512 * 2**20 + 2 * 2 * shape.hidden * shape.inner  # two buckets, and two of a layer's tensors


def test_gradients_that_wait_for_the_last_micro_batch_are_whole(config: PPOConfig) -> None:
    """On every rank, in float32, also where shards go to the host."""
    trained = shape_of("1.5B").all_weights
    once = {f"{FSDP}.sync_every_micro_batch": False, BUDGET: 8192}
    for values in (once, once | {f"{FSDP}.offload_policy": True}):
        assert at(config, EIGHT, values).phases["update_actor"]["gradients"] == 4 * trained
    assert at(config, EIGHT, {f"{FSDP}.offload_policy": True}).phases["update_actor"]["gradients"] == 0


def test_what_is_resident_by_hand(config: PPOConfig) -> None:
    weights = shape_of("1.5B").all_weights
    one, eight = at(config, ONE).phases["update_actor"], at(config, EIGHT).phases["update_actor"]
    assert one["actor weights"] == one["gradients"] == one["actor optimizer"] / 2 == 4 * weights
    assert eight["actor weights"] == eight["gradients"] == 4 * weights / 8
    gen = at(config, ONE).phases["gen"]
    assert gen["KV cache"] + gen["rollout weights"] == 0.5 * 80e9 and gen["rollout weights"] == 2 * weights
    assert "rollout weights" not in one  # it sleeps


def test_keys_change_their_parts(config: PPOConfig) -> None:
    base = at(config, ONE)
    kept = at(config, ONE, {f"{MODEL_KEY}.enable_gradient_checkpointing": False})
    assert kept.phases["update_actor"]["activations"] > 10 * base.phases["update_actor"]["activations"]
    offloaded = at(config, ONE, {f"{FSDP}.optimizer_offload": True})
    assert "actor optimizer" not in offloaded.phases["gen"] and "actor optimizer" in offloaded.phases["update_actor"]
    eight_bit = at(config, ONE, {"actor_rollout_ref.actor.optim.optimizer": "adamw_8bit"})
    assert eight_bit.phases["update_actor"]["actor optimizer"] == base.phases["update_actor"]["actor optimizer"] / 4
    muon = at(config, ONE, {"actor_rollout_ref.actor.optim.optimizer": "muon"})
    averages = shape_of("1.5B").all_weights + shape_of("1.5B").root_weights
    assert muon.phases["update_actor"]["actor optimizer"] == pytest.approx(4 * averages)
    lora = at(config, ONE, {f"{MODEL_KEY}.lora_rank": 32})
    assert lora.total("update_actor") < 0.3 * base.total("update_actor")
    with_reference = at(config, ONE, {"actor_rollout_ref.actor.use_kl_loss": True})
    assert with_reference.phases["ref"]["ref weights"] == 2 * shape_of("1.5B").all_weights
    awake = at(config, ONE, {"actor_rollout_ref.rollout.free_cache_engine": False})
    assert awake.total("update_actor") == pytest.approx(base.total("update_actor") + 40e9)
    on_cpu, hf = replace(ONE, on_cpu=True), {"actor_rollout_ref.rollout.name": "hf"}
    assert "rollout weights" in at(config, on_cpu, hf).phases["update_actor"]
    gone = at(config, on_cpu, hf | {"actor_rollout_ref.rollout.sleep_level": 2})
    assert "rollout weights" not in gone.phases["update_actor"] and "rollout weights" in gone.phases["gen"]
    small = at(config, ONE, {BUDGET: 8192})
    told = activation_bytes(shape_of("1.5B"), Path(c=2), 8192, 4096)
    assert small.phases["update_actor"]["activations"] == told


def test_the_largest_budget_fits_and_the_next_does_not(config: PPOConfig) -> None:
    tight = Machine(on_cpu=False, world=1, capacity=34e9)
    large = changed(config, {BUDGET: 100_000, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.2})
    predict = partial(forecast, actor=shape_of("1.5B"), critic=None, machine=tight)
    assert predict(large).too_large() == ["update_actor"]
    budget = largest_budget(large, "update_actor", predict)
    assert budget is not None and 4096 <= budget < 100_000
    assert predict(changed(large, {BUDGET: budget})).too_large() == []
    assert predict(changed(large, {BUDGET: budget + 256})).too_large() == ["update_actor"]
    (line,) = remedies(large, shape_of("1.5B"), None, tight)
    assert line.startswith(f"update_actor: {BUDGET}={budget} is the largest that fits")


def test_remedies_fit(config: PPOConfig) -> None:
    """Each first key=value that is told is tried."""
    small = Machine(on_cpu=False, world=1, capacity=24e9)
    lines = remedies(config, shape_of("3B"), None, small)
    assert [line.partition(":")[0] for line in lines] == at(config, small, size="3B").too_large() != []
    for line in lines:
        phase, _, text = line.partition(": ")
        pairs = dict(word.split("=") for word in text.partition(", or ")[0].split() if "=" in word)
        typed = {key: {"True": True, "False": False}.get(value, value) for key, value in pairs.items()}
        typed = {key: float(value) if key.endswith("utilization") else value for key, value in typed.items()}
        assert typed and phase not in at(config, small, typed, "3B").too_large()
    none = remedies(config, shape_of("32B"), None, small)
    assert any("devices would" in line or "nothing makes it fit" in line for line in none)


def test_a_cpu_keeps_the_engine_and_the_gathered_weights(config: PPOConfig) -> None:
    cpu = Machine(on_cpu=True, world=1, capacity=None)
    told = at(config, cpu, {"actor_rollout_ref.rollout.name": "hf"}, "0.5B")
    weights = 4 * shape_of("0.5B").all_weights
    assert told.phases["update_actor"]["rollout weights"] == told.phases["update_actor"]["gathered weights"] == weights
    assert told.too_large() == [] and told.metrics()["perf/memory_forecast/gen"] == told.total("gen") / GIB


def test_chunks_divide_activations_but_not_the_keys_that_a_layer_gathers(config: PPOConfig) -> None:
    """Beside Ulysses' share of a row, the work of a layer has the keys and values of the whole row once more."""
    row = {"data.max_response_length": 31_744, BUDGET: 4096}
    actor, ref = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    heads = {f"{role}.ulysses_sequence_parallel_size": 4 for role in (actor, ref)}
    chunks = {f"{role}.fsdp_config.context_parallel_size": 4 for role in (actor, ref)}
    sharing = {"heads": heads, "chunks": chunks, "none": {}}
    found = {n: at(config, EIGHT, row | values).phases["update_actor"] for n, values in sharing.items()}
    assert found["chunks"]["activations"] == found["heads"]["activations"] < found["none"]["activations"] / 1.9
    added = 2 * 2 * shape_of("1.5B").keys * (4 - 1) * 32_768 / 8
    assert found["chunks"]["work"] - found["heads"]["work"] == pytest.approx(added * 2, rel=1e-6)


def test_the_page_is_that_of_the_code() -> None:
    here = sizing_docs.PAGE.read_text(encoding="utf-8")
    assert here == sizing_docs.page(), "run python -m verl_like.kit.forecast.sizing_page"


def test_a_reward_model_has_no_head_over_the_vocabulary() -> None:
    """What is trained by preference.loss=reward takes the work of a critic's pass, not that of a policy's."""
    keys = ["trainer.objective=preference", "data.train_files=a.parquet", f"{MODEL_KEY}.path=m"]
    keys.append(f"{MODEL_KEY}.use_fused_kernels=False")
    work = {}
    for loss in ("simpo", "reward"):
        found = at(compose([*keys, f"preference.loss={loss}"]), ONE, size="1.5B").phases["update_actor"]
        work[loss] = found["work"]
    assert work["reward"] < 0.8 * work["simpo"], work
