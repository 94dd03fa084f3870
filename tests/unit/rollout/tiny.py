"""A tiny random Qwen2, and a training engine made of it: what rollout and weight sync tests share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_like.batch import Sequences
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.train_engine import WeightChanges
from verl_like.models.loading import load_hf_config
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo, init_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.workers.rollout import start_engine

VOCAB, TOKENIZER_SIZE, MAX_LEN = 80, 70, 128

Items = Iterator[tuple[str, Tensor]]


def tiny_config(**changes: object) -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tiny_model(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    """Weights large enough that every tensor matters for the log-probs."""
    model = Qwen2ForCausalLM(tiny_config(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def state(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def log_probs(model: Qwen2ForCausalLM, tokens: list[int]) -> Tensor:
    """Oracle: log-prob of tokens 1.. over the tokenizer's ids, by one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1, :TOKENIZER_SIZE]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


class FakeTrainEngine:
    """Export (with names and checksums) and forward of an FSDPEngine, with a hook that spoils the exported stream."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model, self.changes = model, WeightChanges()
        self.spoil: Callable[[Items], Items] = lambda items: items

    def weight_names(self, form: str = "merged") -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in state(self.model).items()}

    def export_weights(self, dtype: torch.dtype, form: str = "merged") -> Items:
        return self.spoil((name, tensor.to(dtype)) for name, tensor in state(self.model).items())

    def weight_checksums(self, dtype: torch.dtype, form: str = "merged") -> dict[str, int]:
        return {name: int(checksum(tensor.to(dtype))) for name, tensor in state(self.model).items()}

    def forward(
        self, batch: Sequences, *, want: frozenset[str], rule: MicroBatchRule, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        tokens = torch.cat([batch.prompt_ids_BP, batch.response_ids_BR], dim=1).tolist()
        width = batch.response_ids_BR.shape[1]
        return {"log_probs": torch.stack([log_probs(self.model, row)[-width:] for row in tokens])}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def single_process(device: str = "cpu") -> ProcessInfo:
    return init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), device)


def build(name: str, folder: Path, process: ProcessInfo, **rollout: Any) -> RolloutEngine:
    """An engine over the tiny model's config."""
    tiny_config().save_pretrained(folder)
    return build_for(
        name, ModelConfig(path=str(folder)), process, tokenizer_size=TOKENIZER_SIZE, max_num_seqs=32, **rollout
    )


@contextmanager
def hf_engines(folder: Path, model: Qwen2ForCausalLM, process: ProcessInfo) -> Iterator[Callable[..., HFRolloutEngine]]:
    """Maker of hf engines that hold this model's weights, with other settings each; all are shut down at the end."""
    model.config.save_pretrained(folder)
    made: list[HFRolloutEngine] = []

    def make(**rollout: Any) -> HFRolloutEngine:
        built = build_for("hf", ModelConfig(path=str(folder)), process, tokenizer_size=TOKENIZER_SIZE, **rollout)
        assert isinstance(built, HFRolloutEngine)
        built.load_weights(iter(state(model).items()), 1)
        made.append(built)
        return built

    yield make
    for engine in made:
        engine.shutdown()


def build_for(
    name: str,
    model: ModelConfig,
    process: ProcessInfo,
    *,
    tokenizer_size: int,
    max_model_len: int = MAX_LEN,
    **rollout: Any,
) -> RolloutEngine:
    """An engine over a model's folder."""
    return start_engine(
        RolloutConfig(
            **{"name": name, "enforce_eager": True, "max_num_seqs": 8, "max_num_batched_tokens": 64, **rollout}
        ),
        model,
        process=process,
        hf_config=load_hf_config(model),
        tokenizer_size=tokenizer_size,
        max_model_len=max_model_len,
        seed=1,
        run_id=f"test-{os.getpid()}",
    )
