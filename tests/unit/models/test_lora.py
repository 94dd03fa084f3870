from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine import tiny
from tests.unit.models import zoo
from verl_like.config.model import ModelConfig
from verl_like.models import loading, lora
from verl_like.models.packing import Segments

ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def attached(path: str, kind: str = "policy", **changes: Any) -> tuple[Any, lora.Adapters]:
    keys: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 6} | changes
    config = ModelConfig(path=path, **keys)
    settings: Any = {"kind": kind, "dtype": torch.float32, "vocab_size": None, "seed": 1}
    model = loading.build_token_model(config, loading.load_hf_config(config), **settings)
    return model.hf, lora.attach(model.hf, config, dtype=torch.float32, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


def test_by_hand() -> None:
    """W = 2x2 identity, A = [1 1], B = [1 2]^T, scale 3: W x + 3 B (A x)."""
    base = nn.Linear(2, 2)
    with torch.no_grad():
        base.weight.copy_(torch.eye(2))
        base.bias.fill_(0.5)
    layer = lora.LoRALinear(base, 1, 3.0, torch.float32)
    x = torch.tensor([[1.0, 2.0]])
    assert layer(x).tolist() == [[1.5, 2.5]]  # B starts at zero
    with torch.no_grad():
        layer.lora_A.weight.fill_(1.0)
        layer.lora_B.weight.copy_(torch.tensor([[1.0], [2.0]]))
    assert layer(x).tolist() == [[10.5, 20.5]]
    layer.enabled = False
    assert layer(x).tolist() == [[1.5, 2.5]]


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ({}, ALL),
        ({"target_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
        ({"target_modules": r".*self_attn\.(q|k)_proj"}, ["k_proj", "q_proj"]),
        ({"exclude_modules": ["mlp.down_proj", "o_proj"]}, [n for n in ALL if n not in ("down_proj", "o_proj")]),
        ({"exclude_modules": r".*mlp.*"}, ["k_proj", "o_proj", "q_proj", "v_proj"]),
    ],
)
def test_targets(path: str, changes: dict[str, Any], leaves: list[str]) -> None:
    hf, adapters = attached(path, **changes)
    assert list(adapters.targets) == leaves and len(adapters.names) == 2 * len(leaves)
    trained = {name for name, p in hf.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{part}.weight" for name in adapters.names for part in ("lora_A", "lora_B")}
    assert all(lora.is_trained(name) for name in trained)


def test_one_layer_alone_is_named_in_full(path: str) -> None:
    _, adapters = attached(path, target_modules=r"model\.layers\.1\.mlp\.up_proj")
    assert adapters.targets == adapters.names == ("model.layers.1.mlp.up_proj",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["query"]}, r"target_modules=\['query'\]: query is no module.*some of \['down_proj'"),
        ({"target_modules": ["q_proj", "v_poj"]}, r"v_poj is no module of this model"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"lm_head, a Linear gets no adapter: only linear layers before"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens, a Embedding gets no adapter"),
        ({"target_modules": "query"}, r"target_modules='query'.*names no linear layer.*all-linear"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, r"exclude_modules=\['self_attn"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(path: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attached(path, **changes)


def test_a_value_head_is_trained_whole(path: str) -> None:
    hf, adapters = attached(path, kind="value")
    assert hf.score.weight.requires_grad and "score" not in adapters.names
    assert adapters.peft_config("base", is_value_model=True)["modules_to_save"] == ["score"]


def test_merged_is_the_adapted_model(path: str) -> None:
    hf, adapters = attached(path)
    plain, _ = attached(path)
    generator = torch.Generator().manual_seed(0)
    for module in adapters.modules:
        nn.init.normal_(module.lora_B.weight, std=0.2, generator=generator)
    merged = dict(adapters.merged((name, p.detach()) for name, p in hf.named_parameters()))
    missing, unexpected = plain.load_state_dict(merged, strict=False)
    assert unexpected == [] and all("lora_" in name for name in missing)
    ids = torch.arange(5)[None]
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": ids,
        "segments": Segments([5], torch.device("cpu")),
    }
    with torch.no_grad():
        answers = [model(**inputs).logits for model in (hf, plain)]
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-4)
    with adapters.disabled(), torch.no_grad():
        base = hf(**inputs).logits
    assert float((answers[0] - base).abs().max()) > 0.1


def test_an_adapter_that_does_not_come_is_an_error(path: str) -> None:
    hf, adapters = attached(path)
    stream = [(name, p.detach()) for name, p in hf.named_parameters() if "layers.0.mlp.up_proj.lora_B" not in name]
    with pytest.raises(RuntimeError, match=r"1 LoRA adapters did not reach the merge.*layers\.0\.mlp\.up_proj"):
        list(adapters.merged(stream))


def test_a_matrix_that_is_read_past_its_layer_gets_no_adapter(tmp_path: Path) -> None:
    """Jamba's mixer multiplies by dt_proj.weight: an adapter would act in what is sampled, and nowhere else."""
    jamba = zoo.folder(tmp_path, "jamba")
    leaves = {name.rpartition(".")[2] for name in attached(jamba)[1].names}
    assert "x_proj" in leaves and "dt_proj" not in leaves
    with pytest.raises(ValueError, match=r"dt_proj, a Linear gets no adapter: its layer reads the matrix"):
        attached(jamba, target_modules=["dt_proj"])
