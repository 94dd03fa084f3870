"""What tests of tensor parallelism run in each process: the same numbers with and without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.unit.engine.scenarios import RULE, by_row, gradients
from tests.unit.engine.tiny import (
    ONE_BATCH,
    PolicyLoss,
    ValueLoss,
    build_engine,
    denominators,
    experience,
    model_folder,
    weights,
)
from tests.unit.models import zoo
from verl_like.batch import Experience
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.optim import OptimConfig, OptimizerName
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import computed_tokens
from verl_like.models import lora
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import local_tensor

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ALL = ["model", "optimizer", "extra"]
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"override_config": {"tie_word_embeddings": True}}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "selective": {"model": {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}},
    "offload_policy": {"fsdp": {"offload_policy": True}},
    "keep_gathered": {
        "fsdp": {"reshard_after_forward": False, "forward_prefetch": True, "sync_every_micro_batch": False}
    },
    "lora": {"model": {"lora_rank": 4, "lora_alpha": 8}},
}


def folders(path: Any) -> dict[str, str]:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # Phi-3's own lie outside the small vocabulary
    biases = {"attention_bias": True, "mlp_bias": True}  # of layers split by rows too
    return {
        "qwen2": model_folder(path, "qwen2", **HEADS),
        "qwen3": model_folder(path, "qwen3", **HEADS),
        "llama": model_folder(path, "llama", **HEADS, **biases),
        "phi3": model_folder(path, "phi3", **HEADS, **special),
        "qwen3_moe": zoo.folder(path, "qwen3_moe"),
    }


class Ranks:
    """One process of groups of `size`, and the rows of its group."""

    def __init__(self, process: ProcessInfo, size: int) -> None:
        self.process, self.size = process, size
        self.group, self.groups = process.rank // size, process.world_size // size

    def engine(self, path: str, *, fsdp: dict[str, Any] | None = None, **changes: Any) -> FSDPEngine:
        config = FSDPConfig(tensor_parallel_size=self.size, **(fsdp or {}))
        return build_engine(self.process, path, fsdp=config, **changes)

    def mine(self, batch: Any) -> Any:
        return batch.select(range(self.group, len(batch), self.groups))

    def gradients(self, engine: FSDPEngine, **options: Any) -> dict[str, Tensor]:
        batch = experience(9)
        return gradients(engine, self.mine(batch), batch, **options)

    def step(self, engine: FSDPEngine, seed: int = 0) -> dict[str, Any]:
        batch = experience(7, seed=seed)
        loss = PolicyLoss() if engine.kind == "policy" else ValueLoss()
        metrics = engine.train_minibatch(self.mine(batch), loss, denominators(batch), rule=RULE)
        engine.advance_schedule()
        return {name: metric.value for name, metric in metrics.items()}


def everything(
    process: ProcessInfo, paths: dict[str, str], size: int, saved: str, others: str | None, *, all_options: bool
) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    ranks, result = Ranks(process, size), {}
    for name, path in paths.items():
        engine = ranks.engine(path)
        result[f"gradients_{name}"] = ranks.gradients(engine)
        result[f"norm_{name}"] = ranks.step(engine)["grad_norm"]
        result[f"weights_{name}"] = weights(engine)
    for name in OPTIONS if all_options else ("lora", "keep_gathered"):
        result[f"gradients_{name}"] = ranks.gradients(trained_lora(ranks.engine(paths["qwen2"], **OPTIONS[name])))
    result |= (
        rows_and_outputs(ranks, paths["qwen3"])
        | critic(ranks, paths["qwen2"])
        | lean(ranks, paths["qwen2"], all_options)
    )
    return result | checkpoints(ranks, paths["qwen2"], saved, others)


def trained_lora(engine: FSDPEngine) -> FSDPEngine:
    """B of a new adapter is zero, and with it the gradient of A: give it other values, the same on all ranks."""
    for name, parameter in engine.sharding.root.named_parameters():
        if lora.is_adapter(name) and "lora_B" in name:
            parameter.data.fill_(0.05)
    return engine


def rows_and_outputs(ranks: Ranks, path: str) -> dict[str, Any]:
    """Only the first group has rows; gradients reduced once; what a forward pass gives, and who reports the loss."""
    engine, batch = ranks.engine(path), experience(9)
    alone = batch.select(range(len(batch) if ranks.group == 0 else 0))
    result: dict[str, Any] = {"gradients_alone": gradients(engine, alone, batch)}
    shared = experience(12, rows_per_prompt=4)
    groups = shared.select([b for b in range(12) if b // 4 % ranks.groups == ranks.group])
    result["gradients_shared_prompts"] = gradients(engine, groups, shared)
    result["gradients_sync_last"] = ranks.gradients(ranks.engine(path, fsdp={"sync_every_micro_batch": False}))
    want = frozenset({"log_probs", "entropy"})
    mine = ranks.mine(batch)
    result["outputs"] = by_row(mine, engine.forward(mine, want=want, rule=RULE, temperature=0.7))
    result["held"], result["tokens"] = held(engine), tokens_between_blocks(engine, batch)
    result["reports_loss"] = "pg_loss" in ranks.step(engine)
    return result


def held(engine: FSDPEngine) -> dict[str, float]:
    """Which share of the root's weights and of the layers' matrices this rank holds."""
    held = {"root": [0, 0], "matrices": [0, 0]}
    for name, parameter in engine.sharding.root.named_parameters():
        kind = "matrices" if ".layers." in name and parameter.ndim == 2 else "root"
        if kind == "matrices" or ".layers." not in name:
            held[kind][0] += local_tensor(parameter).numel()
            held[kind][1] += parameter.numel()
    return {kind: mine / total for kind, (mine, total) in held.items()}


def tokens_between_blocks(engine: FSDPEngine, batch: Experience) -> tuple[int, int]:
    """Tokens that a layer of this rank is given, of how many in the micro-batch."""
    seen: list[int] = []
    layer = engine.model.hf.get_submodule("model.layers.1")
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    engine.forward(batch, want=frozenset({"log_probs"}), rule=ONE_BATCH)
    handle.remove()
    return seen[0], computed_tokens(batch) - len(batch)


def families(process: ProcessInfo, paths: dict[str, str], size: int) -> dict[str, dict[str, Tensor]]:
    ranks = Ranks(process, size)
    return {name: ranks.gradients(ranks.engine(path)) for name, path in paths.items()}


def compiled(process: ProcessInfo, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of one split layer, compiled and not."""
    ranks, shallow = Ranks(process, 2), {"override_config": {"num_hidden_layers": 1}}
    engines = [ranks.engine(path, model=shallow, compile_blocks=compile_blocks) for compile_blocks in (True, False)]
    return ranks.gradients(engines[0]), ranks.gradients(engines[1])


def critic(ranks: Ranks, path: str) -> dict[str, Any]:
    engine, batch = ranks.engine(path, kind="value"), experience(9)
    mine = ranks.mine(batch)
    return {
        "values": by_row(mine, engine.forward(mine, want=frozenset({"values"}), rule=RULE))["values"],
        "gradients_critic": ranks.gradients(engine, loss=ValueLoss()),
        "norm_critic": ranks.step(engine)["grad_norm"],
        "weights_critic": weights(engine),
    }


def lean(ranks: Ranks, path: str, both: bool) -> dict[str, Any]:
    """Optimizers that round at random: the first step's float32 weights, and bfloat16 weights after three."""
    result: dict[str, Any] = {}
    for name in ("adamw_8bit", "adamw_bf16") if both else ("adamw_8bit",):
        optim = OptimConfig(lr=1e-2, eps=1e-3, optimizer=OptimizerName(name))
        engine = ranks.engine(path, optim=optim)
        ranks.step(engine)
        result[f"weights_{name}"] = weights(engine)
        engine = ranks.engine(path, optim=optim, fsdp={"model_dtype": "bfloat16"})
        for seed in range(3):
            ranks.step(engine, seed)
        result[f"rounded_{name}"] = weights(engine)
    return result


def checkpoints(ranks: Ranks, path: str, saved: str, others: str | None) -> dict[str, Any]:
    """Two steps, a checkpoint written in the background, one more step; and the last step from `others`."""
    engine = ranks.engine(path)
    for seed in range(2):
        ranks.step(engine, seed)
    engine.save(saved, contents=[*ALL, "hf_model"], background=True)
    ranks.step(engine, 2)
    engine.saved(wait=True)
    result = {"uninterrupted": weights(engine), "shapes": dict(engine.weight_names())}
    if others is not None:
        engine = ranks.engine(path, seed=50)
        engine.load(others, contents=ALL)
        ranks.step(engine, 2)
        result["resumed"] = weights(engine)
    return result


def hybrid(process: ProcessInfo, path: str) -> dict[str, Any]:
    """Four ranks: two replicas of one copy each, itself split in two."""
    ranks = Ranks(process, 2)
    engine = ranks.engine(path, fsdp={"fsdp_size": 2})
    result: dict[str, Any] = {"gradients": ranks.gradients(engine)}
    result["norm"] = ranks.step(engine)["grad_norm"]
    result["weights"] = weights(engine)
    return result


def one_group(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    return everything(process, paths, 2, saved, others, all_options=True)


def two_by_two(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    return {
        "all": everything(process, paths, 2, saved, others, all_options=False),
        "hybrid": hybrid(process, paths["qwen2"]),
        "by_four": Ranks(process, 4).gradients(Ranks(process, 4).engine(paths["llama"], model=FOUR)),
    }


FOUR = {"override_config": {"num_attention_heads": 4, "num_key_value_heads": 4}}


def whole_by_four(process: ProcessInfo, paths: dict[str, str]) -> dict[str, Tensor]:
    ranks = Ranks(process, 1)
    return ranks.gradients(ranks.engine(paths["llama"], model=FOUR))
