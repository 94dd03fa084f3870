"""What the table of model types says is tested with each: LoRA, the hf rollout, two ranks, sequence parallelism."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.contracts.engine_ends import within
from tests.unit.engine import moe_scenarios, tiny
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, assert_same, build_engine, denominators, experience, weights
from tests.unit.models import zoo
from tests.unit.models.matrix import refusals
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, OptimConfig, RolloutConfig
from verl_like.config.model import LoraConfig
from verl_like.models import families
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams

WIDE = moe_scenarios.OFTEN
TYPES = moe_scenarios.TYPES
LOAD = {"moe_max_load", "moe_load_entropy", "moe_idle_experts"}
MIXTURES = [name for name in WIDE if "experts" in families.FAMILIES[name].kind]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: zoo.folder(folder, name) for name in WIDE}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, paths: dict[str, str], saved: Path) -> list[dict[str, Any]]:
    return tiny.spawn_ranks(2, moe_scenarios.everything, tmp_path_factory.mktemp("ranks"), paths, str(saved))


@pytest.fixture(scope="module")
def one(process: ProcessInfo, paths: dict[str, str], two: Any) -> dict[str, Any]:
    return moe_scenarios.everything(process, paths, None)


def generated(rollout: Any) -> tiny.Experience:
    """Responses of mixed lengths to prompts of mixed lengths, with the log-probs the rollout engine reported."""
    asked = [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_ids=[(5 * i + j) % 50 + 3 for j in range(2 + 2 * i)],
            sampling=SamplingParams(max_tokens=12 - 3 * i),
            seed=i,
        )
        for i in range(3)
    ]
    done = rollout.generate(asked)
    return moe_scenarios.rows([r.prompt_ids for r in asked], done)


def often(name: str) -> Any:
    """Plain dense types share all code that matters here: `make test-all` runs them."""
    return pytest.param(name, marks=pytest.mark.slow) if families.FAMILIES[name].kind == "dense" else name


@pytest.mark.parametrize("name", [often(n) for n, family in families.FAMILIES.items() if families.HF in family.tested])
def test_an_adapted_model_is_delivered_and_generates_what_the_trainer_scores(
    process: ProcessInfo, tmp_path: Path, name: str
) -> None:
    """LoRA step, merged sync with its proof, generation with a cache, and the trainer's log-probs of those tokens."""
    path = zoo.folder(tmp_path, name)
    lora = {"lora_rank": 4} if families.LORA in families.FAMILIES[name].tested else {}
    engine = build_engine(process, path, model=lora, optim=OptimConfig(lr=1e-2))
    batch = experience(4)
    engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    config = ModelConfig(path=path)
    rollout = build_for("hf", config, process, tokenizer_size=tiny.VOCAB, max_model_len=40)
    report = within(engine, rollout, RolloutConfig(), process)(1)
    assert report.num_read_back == report.num_tensors == len(engine.weight_names())
    rows = generated(rollout)
    trained = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
    assert rows.rollout_log_probs_T is not None
    gap = (trained - rows.rollout_log_probs_T)[rows.response_mask_T].abs().max()
    assert float(gap) < 2e-4
    rollout.shutdown()


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("way", ["one_batch", "eager", "checkpointed"])
def test_gradients_do_not_depend_on_the_way(one: dict[str, Any], name: str, way: str) -> None:
    """Micro-batches of 24 tokens against one of all; other kernels of the experts; recomputed layers."""
    assert_same(one[name]["gradients"], one[name][way], 2e-5)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("way", ["gradients", "first", "ulysses"])
def test_two_ranks_give_the_gradients_of_one(
    one: dict[str, Any], two: list[dict[str, Any]], name: str, way: str
) -> None:
    for result in two:
        assert_same(one[name]["gradients"], result[name][way], 2e-5)


@pytest.mark.slow
def test_two_ranks_give_the_gradients_of_one_for_all_types(process: ProcessInfo, tmp_path: Path) -> None:
    """Spread in every way that no check refuses: Ulysses where the table says so, and as many others as it has."""
    paths = {name: zoo.folder(tmp_path, name) for name in moe_scenarios.FAMILIES}
    two = tiny.spawn_ranks(2, moe_scenarios.only_gradients, tmp_path / "ranks", paths)
    one = moe_scenarios.only_gradients(process, paths)
    for name in moe_scenarios.FAMILIES:
        ways = {"gradients"} | {way for way, why in refusals(name, paths[name]).items() if not why}
        assert ("Ulysses" in ways) == (families.ULYSSES in TYPES[name].tested)
        for result in two:
            assert set(result[name]) == ways
            for way in ways:
                assert_same(one[name]["gradients"], result[name][way], 1e-4)


@pytest.mark.parametrize("name", WIDE)
def test_the_load_of_experts_is_that_of_all_ranks(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    assert set(one[name]["load"]) == (LOAD if name in MIXTURES else set())
    for result in two:
        assert result[name]["load"] == pytest.approx(one[name]["load"], rel=1e-12)


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_and_experts_have_gradients(one: dict[str, Any], name: str) -> None:
    found = {key.rsplit(".layers.1.", 1)[-1]: g for key, g in one[name]["gradients"].items() if ".layers.1." in key}
    for part in ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        gradient = found[part]
        assert float(gradient.abs().max()) > 1e-4
        assert int((gradient.flatten(1).abs().sum(1) > 0).sum()) > 2  # of 8 experts


@pytest.mark.parametrize("name", MIXTURES)
def test_saved_folder_is_what_transformers_saves(
    process: ProcessInfo, paths: dict[str, str], saved: Path, two: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    """Names, shapes and numbers in the file; it loads into transformers and into another engine; two ranks wrote it."""
    folder = saved / name / "huggingface"
    stored = load_file(folder / "model.safetensors")
    assert_same(stored, two[0][name]["weights"], 0.0)
    assert any(".experts.7." in key for key in stored)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    assert_same(stored, load_file(tmp_path / "model.safetensors"), 0.0)
    engine = build_engine(process, str(folder), seed=99)
    assert_same(weights(engine), stored, 0.0)
    assert {key: tensor.shape for key, tensor in stored.items()} == engine.weight_names()
    resumed = build_engine(process, paths[name], seed=98)
    resumed.load(str(saved / name), contents=["model", "optimizer", "extra"])
    assert_same(weights(resumed), stored, 0.0)


def test_a_critic_of_experts_is_trained_and_read_back(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path
) -> None:
    engine, batch = build_engine(process, paths["qwen3_moe"], kind="value"), experience(9)
    engine.train_minibatch(batch, ValueLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    engine.export_hf(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert {"score.weight", "model.layers.0.mlp.experts.7.up_proj.weight"} <= stored.keys()
    assert_same(weights(build_engine(process, str(tmp_path), kind="value", seed=99)), stored, 0.0)


def test_adapters_of_experts_are_sent_apart_and_saved(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path
) -> None:
    """On two ranks as on one; the hf engine keeps them beside the base, proved, and samples what the trainer scores."""
    base = build_engine(process, paths["qwen3_moe"])
    base.export_hf(str(tmp_path / "base"))
    two = tiny.spawn_ranks(2, moe_scenarios.adapted, tmp_path / "ranks", str(tmp_path / "base"), str(tmp_path / "two"))
    engine, gradients = moe_scenarios.adapted_engine(process, str(tmp_path / "base"), str(tmp_path / "one"))
    for theirs in two:
        assert_same(theirs, gradients, 2e-5)
    stored = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two")]
    assert any("experts.base_layer.lora_B" in key for key in stored[0]) and any(
        "gate.lora_A" in key for key in stored[0]
    )
    assert_same(stored[0], stored[1], 1e-4)
    model: dict[str, Any] = moe_scenarios.ADAPTED | {"lora": LoraConfig(merge=False)}
    rollout = build_for("hf", ModelConfig(path=str(tmp_path / "base"), **model), process, tokenizer_size=tiny.VOCAB)
    sync = within(engine, rollout, RolloutConfig(), process)
    for version in (1, 2):  # with the base, and alone
        report = sync(version)
        assert report.num_read_back == report.num_tensors
        batch = experience(9)
        engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    sync(3)
    rows = generated(rollout)
    trained = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
    assert rows.rollout_log_probs_T is not None
    assert float((trained - rows.rollout_log_probs_T)[rows.response_mask_T].abs().max()) < 2e-4
    rollout.shutdown()
    resumed = build_engine(
        process,
        str(tmp_path / "base"),
        model=moe_scenarios.ADAPTED | {"lora_adapter_path": str(tmp_path / "two/adapter")},
    )
    assert_same(dict(resumed.export_weights(torch.float32, "adapters")), two_adapters(stored[1]), 0.0)


def two_adapters(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file as they are sent: B with alpha / rank, which is 2."""
    names = {key.removeprefix("base_model.model."): tensor for key, tensor in stored.items()}
    return {key: tensor * 2 if "lora_B" in key else tensor for key, tensor in names.items()}


def test_lora_says_that_experts_stay_frozen(
    process: ProcessInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = zoo.folder(tmp_path, "qwen2_moe")
    with caplog.at_level(logging.WARNING):
        engine = build_engine(process, path, model={"lora_rank": 2, "target_modules": ["gate_proj"]})
    assert "stay frozen" in caplog.text  # the shared expert's gate_proj is a linear layer
    trained = [key for key, parameter in engine.model.named_parameters() if parameter.requires_grad]
    assert trained and all("shared_expert.gate_proj.lora_" in key for key in trained)


def test_a_lost_expert_fails_the_sync_by_name(process: ProcessInfo, paths: dict[str, str]) -> None:
    """Planted: the stream leaves out one projection of one expert."""
    from verl_like.weight_sync.header import Header
    from verl_like.weight_sync.ledger import WeightLedger

    engine = build_engine(process, paths["mixtral"])
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    shapes = engine.weight_names()
    ledger = WeightLedger(Header(version=1, form="merged", dtype=torch.float32, shapes=shapes, checksums=None))
    list(ledger.watch((key, t) for key, t in engine.export_weights(torch.float32) if key != lost))
    assert ledger.problems() == [f"missing: {lost}"]


def test_the_load_balancing_loss_is_refused(paths: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="load-balancing loss"):
        load_hf_config(ModelConfig(path=paths["qwen3_moe"], override_config={"output_router_logits": True}))
