"""Small random models, random experience, a simple loss, and ranks in spawned processes, for tests of the engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.worlds.processes import START_METHOD, forks
from verl_like.batch import Denominators, Experience, Metric, pad_rows
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.model import ModelConfig
from verl_like.config.optim import OptimConfig
from verl_like.config.roles import RoleConfig
from verl_like.engine import sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

VOCAB = 61
ONE_BATCH = MicroBatchRule(max_tokens=10_000)
_CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
}


def model_folder(path: Path, architecture: str = "qwen2", **changes: Any) -> str:
    """A folder with the config of a tiny model and no weights; initialisation is wide, so that answers differ."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    config: PretrainedConfig = _CONFIGS[architecture](**(settings | changes))
    folder = path / architecture
    config.save_pretrained(folder)
    return str(folder)


def trained_folder(path: Path, process: ProcessInfo, **changes: Any) -> str:
    """A folder with weights: a run starts from a trained model."""
    build_engine(process, model_folder(path, **changes)).export_hf(str(path / "full"))
    return str(path / "full")


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Equal by name, up to `tolerance` of each tensor's largest number."""
    assert a.keys() == b.keys()
    for name in a:
        scale = float(a[name].abs().max()) + 1e-12
        gap = float((a[name] - b[name]).abs().max()) / scale
        assert gap <= tolerance, f"{name}: relative difference {gap:.1e}"


def by_parameter(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Equal by name, up to `tolerance` of each tensor's own norm."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        gap = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        assert gap <= tolerance, f"{name}: {gap:.1e} of its norm"


def experience(
    num_rows: int, *, seed: int = 0, vocab: int = VOCAB, max_response: int = 12, rows_per_prompt: int = 1
) -> Experience:
    """Rows of mixed lengths; in some, part of the response is not the policy's own."""
    g = torch.Generator().manual_seed(seed)
    prompt_length_B = torch.randint(1, 9, (num_rows,), generator=g)
    prompt_length_B = prompt_length_B[torch.arange(num_rows) // rows_per_prompt]
    response_length_B = torch.randint(1, max_response + 1, (num_rows,), generator=g)
    prompts = [torch.randint(vocab, (n,), generator=g).tolist() for n in prompt_length_B.tolist()]
    responses = [torch.randint(vocab, (n,), generator=g).tolist() for n in response_length_B.tolist()]
    prompts = [prompts[b - b % rows_per_prompt] for b in range(num_rows)]
    prompts = [[b // rows_per_prompt % vocab, *prompt[1:]] for b, prompt in enumerate(prompts)]  # none begin alike
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    inside = torch.arange(response_ids_BR.shape[1])[None] < response_length_B[:, None]
    return Experience(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=prompt_length_B,
        response_ids_BR=response_ids_BR,
        response_length_B=response_length_B,
        response_mask_BR=inside & (torch.rand(response_ids_BR.shape, generator=g) < 0.8),
        group_B=torch.arange(num_rows) // rows_per_prompt,
        advantages_BR=torch.randn(response_ids_BR.shape, generator=g) * inside,
    )


def denominators(batch: Experience) -> Denominators:
    return Denominators(num_tokens=int(batch.response_mask_BR.sum()), num_sequences=len(batch), max_response_length=64)


class PolicyLoss:
    """Policy gradient with an entropy bonus, divided by the number of tokens of the mini-batch."""

    wants = frozenset({"log_probs", "entropy"})

    def __init__(self, factor: float = 1.0, entropy: float = 0.1) -> None:
        self.factor, self.entropy = factor, entropy

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        terms_BR = -experience.advantages_BR * outputs["log_probs"] - self.entropy * outputs["entropy"]
        loss = self.factor * (terms_BR * experience.response_mask_BR).sum() / denominators.num_tokens
        return loss, {"pg_loss": Metric(value=loss.item(), reduction="sum")}


class ValueLoss:
    """Squared distance of values to the advantages."""

    wants = frozenset({"values"})

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        error_BR = (outputs["values"] - experience.advantages_BR).square() * experience.response_mask_BR
        loss = error_BR.sum() / denominators.num_tokens
        return loss, {"vf_loss": Metric(value=loss.item(), reduction="sum")}


def build_engine(process: ProcessInfo, path: str, *, kind: str = "policy", **changes: Any) -> FSDPEngine:
    model_keys = {"enable_gradient_checkpointing": False} | changes.pop("model", {})
    sizes: dict[str, Any] = {"num_schedule_steps": 10, "tokenizer_size": VOCAB, "seed": 3}
    sizes |= {name: changes.pop(name) for name in (*sizes, "lowered") if name in changes}
    settings: dict[str, Any] = {
        "kind": kind,
        "model": ModelConfig(path=path, **model_keys),
        "fsdp": FSDPConfig(),
        "optim": OptimConfig(lr=1e-2, eps=1e-3),  # a large eps: rounding noise in zero gradients stays noise
        "grad_clip": 1.0,
    }
    return FSDPEngine(RoleConfig(**(settings | changes)), process, **sizes)


def wide_engine(process: ProcessInfo, path: str, **changes: Any) -> FSDPEngine:
    """`build_engine` in float64, where two orders of one sum differ by 1e-14 and a fault by more."""
    with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
        return build_engine(process, path, **changes)


class WideTorch:
    """Torch for a module of transformers that computes parts in float32, whatever the weights are."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    """What is exported; on the way, that its checksums are those of the shards, however these are cut."""
    assert unlike_shards(engine) == []
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}


def unlike_shards(engine: FSDPEngine, form: Any = "merged") -> list[str]:
    """Names whose exported tensor has another checksum than the shards it came from, in any rollout dtype."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        told = engine.weight_checksums(dtype, form)
        sent = {name: int(checksum(tensor)) for name, tensor in engine.export_weights(dtype, form)}
        wrong += [name for name in told.keys() | sent.keys() if told.get(name) != sent.get(name)]
    return wrong


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def single_process() -> ProcessInfo:
    return init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cpu", 300.0)


def spawn_ranks(world_size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """function(process, *args) on every rank of a gloo group; what each returned."""
    folder.mkdir(parents=True, exist_ok=True)
    about = (world_size, free_port(), function, str(folder), args)
    forks()
    mp.start_processes(_rank_main, (dict(os.environ), *about), nprocs=world_size, start_method=START_METHOD)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int,
    environment: dict[str, str],
    world_size: int,
    port: int,
    function: Callable[..., Any],
    folder: str,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    process = init_distributed(rank, world_size, rank, world_size, "127.0.0.1", port, "cpu", 300.0)
    torch.save(function(process, *args), Path(folder) / f"result_{rank}.pt")
    shutdown_distributed()
