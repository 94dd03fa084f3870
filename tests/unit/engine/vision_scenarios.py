"""Vision-language models on one rank and on two: what each process runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.unit.engine.scenarios import RULE, gradients, my_rows
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, weights
from tests.unit.models import tiny_vision
from verl_like.batch import Experience
from verl_like.config import ModelConfig, OptimConfig
from verl_like.models.loading import load_hf_config
from verl_like.models.vision import processor_of
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo

SIZES: dict[str, Any] = {"tokenizer_size": None}


def experience(path: str) -> Experience:
    """Rows with one image, two, none, and a video, in an order in which ranks have other numbers of them."""
    model = ModelConfig(path=path)
    vision = processor_of(model, load_hf_config(model))
    assert vision is not None
    rows, _ = tiny_vision.rows_with_images(Path(tempfile.mkdtemp()), vision)  # ranks must not write one file
    rows = rows.select([3, 2, 3, 0, 1, 4, 5, 3])
    count = len(rows.response_ids_T)
    return Experience(
        **{name: getattr(rows, name) for name in rows.__dataclass_fields__},
        group_B=torch.arange(len(rows)),
        advantages_T=torch.randn(count, generator=torch.Generator().manual_seed(1)),
    )


def everything(process: ProcessInfo, paths: dict[str, str]) -> dict[str, Any]:
    """Gradients of each family; of the first, in all the ways in which a model can be trained."""
    result: dict[str, Any] = {}
    for family, path in paths.items():
        batch = experience(path)
        mine, alone = my_rows(process, batch, "even"), my_rows(process, batch, "first")
        engine = build_engine(process, path, **SIZES)
        found = {"even": gradients(engine, mine, batch), "first": gradients(engine, alone, batch)}
        if family == "qwen2_vl":
            ways: dict[str, dict[str, Any]] = {
                "small_parts": {"model": {"vision_max_patches_per_gpu": 20}},
                "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
                "padded": {"model": {"use_remove_padding": False}},
                "frozen": {"freeze_vision_tower": True},
            }
            for way, changes in ways.items():
                found[way] = gradients(build_engine(process, path, **SIZES, **changes), mine, batch)
            adapted = build_engine(process, path, model={"lora_rank": 2}, optim=OptimConfig(lr=1e-2), **SIZES)
            found["adapters"] = gradients(adapted, mine, batch)
            adapted.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=RULE)
            sent = {name: checksum(tensor) for name, tensor in adapted.export_weights(torch.float32)}
            found["sent"] = {name: int(number) for name, number in sent.items()}
            found["told"] = adapted.weight_checksums(torch.float32)
            half = {"model": {"lora_rank": 2}, "freeze_vision_tower": True, "optim": OptimConfig(lr=1e-2)}
            found["half"] = list(gradients(build_engine(process, path, **half, **SIZES), mine, batch))
            frozen = build_engine(process, path, freeze_vision_tower=True, **SIZES)
            before = weights(frozen)
            frozen.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=RULE)
            after = weights(frozen)
            found["moved"] = sorted(name for name in before if not torch.equal(before[name], after[name]))
        result[family] = found
    return result
