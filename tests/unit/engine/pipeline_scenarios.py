"""What tests of pipeline parallelism run in each process: the same numbers with layers in stages and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.unit.engine.row_groups import RowGroup
from tests.unit.engine.scenarios import by_row
from tests.unit.engine.tensor_scenarios import trained_lora
from tests.unit.engine.tiny import (
    PolicyLoss,
    build_engine,
    denominators,
    experience,
    model_folder,
    unlike_shards,
    weights,
)
from verl_like.batch import Experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import WeightChanges
from verl_like.parallel.dist import ProcessInfo

RULE = MicroBatchRule(max_tokens=40)  # several micro-batches, of unlike lengths
WAYS: dict[str, dict[str, Any]] = {  # of the first model
    "gpipe": {"fsdp": {"pipeline_schedule": "gpipe"}},
    "kept": {"fsdp": {"reshard_after_forward": False, "sync_every_micro_batch": False}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "padded": {"model": {"use_remove_padding": False}},
}


PIECES = "tied"  # the model whose stages have several
WAYS_IN_PIECES: dict[str, dict[str, Any]] = {
    "gpipe": {"fsdp": {"pipeline_schedule": "gpipe"}},
    "kept": {"fsdp": {"reshard_after_forward": False, "sync_every_micro_batch": False}},
    "once": {"fsdp": {"sync_every_micro_batch": False, "forward_prefetch": True}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
}


LATE_WAYS: dict[str, dict[str, Any]] = {
    "kept": {"fsdp": {"reshard_after_forward": False, "sync_every_micro_batch": False}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "selective": {"model": {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}},
    "padded": {"model": {"use_remove_padding": False}},
}


class Line(RowGroup):
    """This rank's place among the pipelines."""

    rule = RULE

    def __init__(
        self, process: ProcessInfo, stages: int, fsdp_size: int = -1, pieces: int = 1, schedule: str = "1f1b"
    ) -> None:
        super().__init__(process, stages)
        self.stages, self.fsdp_size, self.pieces, self.schedule = stages, fsdp_size, pieces, schedule

    def engine(self, path: str, fsdp: dict[str, Any] | None = None, **more: Any) -> FSDPEngine:
        sizes: dict[str, Any] = {"pipeline_parallel_size": self.stages, "fsdp_size": self.fsdp_size}
        sizes |= {"virtual_pipeline_size": self.pieces, "pipeline_schedule": self.schedule}
        return build_engine(self.process, path, fsdp=FSDPConfig(**(sizes | (fsdp or {}))), **more)


class Adapted(Line):
    """Ranks that train adapters on a base of which all weights are there."""

    targets, linear = r".*(q_proj|o_proj|experts)", r".*(q_proj|o_proj)"

    def engine(self, path: str, fsdp: dict[str, Any] | None = None, **more: Any) -> FSDPEngine:
        model = more.get("model", {})
        targets = self.targets if "experts_implementation" not in model else self.linear  # float64 has linear ones
        more["model"] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": targets} | model
        return trained_lora(super().engine(path, fsdp, **more))


class AdaptedLate(Adapted):
    """Only the last layer has adapters: all stages but the last have nothing that is trained."""

    targets = linear = r".*layers\.3\..*q_proj"


def batch_of() -> Experience:
    return experience(9, rows_per_prompt=3, max_response=30)


def everything(line: Line, paths: dict[str, str], saved: str, others: str | None) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    batch, found = batch_of(), dict[str, Any]()
    for name, path in paths.items():
        found[f"gradients_{name}"] = line.gradients(engine := line.engine(path), batch)
        found[f"gradients_{name}_first"] = line.gradients(engine, batch, batch.select(range(9 * (not line.index))))
        found[f"double_{name}"] = line.in_float64(path, batch)
        steps = line.checkpoints(path, f"{saved}_{name}", others and f"{others}_{name}")
        found |= {f"{key}_{name}": value for key, value in steps.items()}
    path, mine = paths["plain"], line.rows(batch)
    for way, settings in WAYS.items():
        found[f"gradients_{way}"] = line.gradients(line.engine(path, **settings), batch)
    critic = line.engine(path, kind="value")
    found["gradients_critic"] = line.gradients(critic, batch)
    found["outputs"] = by_row(mine, critic.forward(mine, want=frozenset({"values"}), rule=RULE))
    engine = line.engine(path)
    want = frozenset({"log_probs", "entropy"})
    found["outputs"] |= by_row(mine, engine.forward(mine, want=want, rule=RULE, temperature=0.7))
    tied = line.engine(paths[PIECES])
    found["outputs_tied"], found["gradients_few"] = outputs_of(line, tied), line.gradients(tied, few_of(batch))
    watched_B = torch.arange(len(batch))[line.index :: line.count] % 2 == 0
    told = engine.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=RULE, without_gradient_B=watched_B)
    found["told_watched"] = {name: told[name].value for name in ("grad_norm", "pg_loss") if name in told}
    found["held"] = sorted(name for name, _ in engine.sharding.root.named_parameters())
    for lines in (Adapted, AdaptedLate):
        found[lines.__name__] = adapted(lines, line, saved, others, ({}, WAYS["checkpointed"]))
    found["changes"] = changes_of_narrow(AdaptedLate(line.process, line.stages, line.fsdp_size), saved)
    return found


def changes_of_narrow(line: Line, saved: str) -> WeightChanges:
    """What an engine counts after a step of adapters in bfloat16."""
    engine = line.engine(trained_base(saved), {"model_dtype": "bfloat16"})
    line.step(engine, 0)
    return engine.changes


def trained_base(saved: str) -> str:
    return str(Path(saved).parent / "one_experts" / "huggingface")


def adapted(lines: type[Adapted], line: Line, saved: str, others: str | None, ways: Any = ({},)) -> dict[str, Any]:
    """LoRA: gradients, steps, checkpoints, and what leaves for the rollout engine in each form.

    The base is what one rank has exported. ways: settings that leave the gradients as they are.
    """
    line, path = lines(line.process, line.stages, line.fsdp_size, line.pieces), trained_base(saved)
    batch, name = batch_of(), lines.__name__
    found: dict[str, Any] = line.checkpoints(path, f"{saved}_{name}", others and f"{others}_{name}")
    found["gradients"] = [line.gradients(line.engine(path, **settings), batch) for settings in ways]
    found["double"] = line.in_float64(path, batch)
    engine = line.engine(path)
    with engine.base_model():
        found["base"] = outputs_of(line, engine)
    found["unlike"] = unlike_shards(engine, "apart") + unlike_shards(engine, "adapters")
    found["apart"] = {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32, "apart")}
    found["trained"] = sorted(n for n, p in engine.sharding.root.named_parameters() if p.requires_grad)
    return found


def late(line: Line, paths: dict[str, str], saved: str) -> dict[str, Any]:
    """Zero bubble: gradients of weights in passes of their own."""
    batch, found = batch_of(), dict[str, Any]()
    for name, path in paths.items():
        found[f"gradients_{name}"] = line.gradients(line.engine(path), batch)
        found[f"double_{name}"] = line.in_float64(path, batch)
    for way, settings in LATE_WAYS.items():
        found[f"gradients_{way}"] = line.gradients(line.engine(paths[PIECES], **settings), batch)
    found["gradients_few"] = line.gradients(engine := line.engine(paths[PIECES]), few_of(batch))
    found["told"] = [line.step(engine, seed) for seed in range(3)]
    found["weights"] = weights(engine)
    found["gradients_critic"] = line.gradients(line.engine(paths["plain"], kind="value"), batch)
    adapters = Adapted(line.process, line.stages, line.fsdp_size, line.pieces, line.schedule)
    found["gradients_adapters"] = adapters.gradients(adapters.engine(trained_base(saved)), batch)
    return found


def deep(folder: Path) -> str:
    """Config of a model for eight pieces, some of two layers."""
    return model_folder(folder, num_hidden_layers=10)


def outputs_of(line: Line, engine: FSDPEngine) -> dict[str, list[torch.Tensor]]:
    rows = line.rows(batch_of())
    return by_row(rows, engine.forward(rows, want=frozenset({"log_probs"}), rule=RULE))


def few_of(batch: Experience) -> Experience:
    """Rows of one micro-batch: fewer than there are stages."""
    return batch.select(range(1))


def in_pieces(line: Line, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    """Stages in pieces. others: a folder that another mesh has saved, to go on from."""
    batch, path = batch_of(), paths[PIECES]
    found = {f"gradients_{name}": line.gradients(line.engine(each), batch) for name, each in paths.items()}
    found["gradients_critic"] = line.gradients(line.engine(paths["plain"], kind="value"), batch)
    engine = line.engine(path)
    found["outputs"] = outputs_of(line, engine)
    for way, settings in WAYS_IN_PIECES.items():
        found[f"gradients_{way}"] = line.gradients(line.engine(path, **settings), batch)
    found["gradients_few"] = line.gradients(engine, few_of(batch))
    found["double"] = line.in_float64(path, batch)
    found["held"] = sorted(name for name, _ in engine.sharding.root.named_parameters())
    found["Adapted"] = adapted(Adapted, line, saved, str(Path(saved).parent / "one"))
    return found | line.checkpoints(path, saved, others)


def two(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    found = everything(Line(process, 2), paths, saved, others)
    found["late"] = late(Line(process, 2, schedule="zero_bubble"), paths, saved)
    found["late_pieces"] = late(Line(process, 2, pieces=2, schedule="zero_bubble"), paths, saved)
    found["pieces"] = in_pieces(Line(process, 2, pieces=2), paths, f"{saved}_pieces", f"{saved}_{PIECES}")
    return found


def four(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    """Two pipelines that share the weights of their stages, also in pieces and with late gradients of weights."""
    found = everything(Line(process, 2), paths, saved, others)
    found["pieces"] = in_pieces(Line(process, 2, pieces=2), paths, f"{saved}_pieces", f"{others}_pieces")
    found["late"] = late(Line(process, 2, schedule="zero_bubble"), paths, saved)
    found["late_pieces"] = late(Line(process, 2, 2, 2, schedule="zero_bubble"), paths, saved)
    return found


def meshes(process: ProcessInfo, paths: dict[str, str], saved: str) -> dict[str, Any]:
    """Two copies of the model; four stages, also in pieces and with late gradients of weights."""
    found, batch = dict[str, Any](), batch_of()
    for name, line in {"copies": Line(process, 2, fsdp_size=2), "stages": Line(process, 4)}.items():
        engine = line.engine(paths["tied"])
        found[f"{name}_gradients"] = line.gradients(engine, batch)
        found[f"{name}_told"] = line.step(engine, 0)
    four_stages = Line(process, 4, schedule="zero_bubble")
    found["stages_late"] = four_stages.gradients(four_stages.engine(paths["tied"]), batch)
    line, path = Line(process, 4, pieces=2), deep(Path(f"{saved}_deep_{process.rank}"))
    found["deep"] = line.gradients(line.engine(path), batch)
    found["deep_double"] = line.in_float64(path, batch)
    return found
