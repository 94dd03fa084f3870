"""Weights that are published quantised: loaded as numbers decoded by hand, named as the plain model's, exported."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.models import zoo
from verl_like.config import ModelConfig
from verl_like.models import loading
from verl_like.parallel.dist import ProcessInfo

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])  # e2m1, OCP microscaling formats 1.0, section 5.3.3


def quantised(folder: Path, tensors: dict[str, Tensor], settings: dict[str, object]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def mxfp4(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace stacks [E, in, out] by random blocks [E, out, in / 32, 16] and scales; the numbers that these mean."""
    g, expected = torch.Generator().manual_seed(0), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 128, blocks.shape[:3], generator=g, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1)  # the low half first
        values = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = values.flatten(2).transpose(1, 2)
    quantised(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return expected


def fp8(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace linear weights by e4m3 and a scale for each block of 32 x 32; the numbers that these mean."""
    g, expected = torch.Generator().manual_seed(0), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randn(rows, columns, generator=g).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 32), -(-columns // 32), generator=g) + 0.5
        tensors[f"{name}_scale_inv"] = scales
        whole = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :columns]
        expected[name] = tensors[name].float() * whole
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}
    quantised(folder, tensors, settings)
    return expected


@pytest.mark.parametrize(("name", "encode"), [("gpt_oss", mxfp4), ("deepseek_v3", fp8), ("qwen3", fp8)])
def test_weights_are_the_numbers_that_were_published(
    process: ProcessInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, encode
) -> None:
    if encode is fp8:
        pytest.importorskip("accelerate")
    tiny.build_engine(process, zoo.folder(tmp_path, name)).export_hf(str(tmp_path / "quantised"))
    stored = load_file(tmp_path / "quantised" / "model.safetensors")
    expected = encode(tmp_path / "quantised", dict(stored))
    model = ModelConfig(path=str(tmp_path / "quantised"))
    with caplog.at_level(logging.INFO):
        engine = tiny.build_engine(process, model.path)
    assert "weights are dequantised as they are loaded" in caplog.text
    assert engine.weight_names() == {key: tensor.shape for key, tensor in stored.items()}
    tiny.assert_same(tiny.weights(engine), expected, 0.0)
    batch = tiny.experience(4)
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    engine.export_hf(str(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    tiny.assert_same(tiny.weights(tiny.build_engine(process, str(tmp_path / "out"))), tiny.weights(engine), 0.0)
    assert loading.as_sent(model) == {"quantization_config": None}  # an engine is sent plain weights
