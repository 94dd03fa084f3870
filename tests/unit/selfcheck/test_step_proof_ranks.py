"""Proof of whole steps on two ranks: the honest program passes, faults of the mesh and of the join are found."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import zoo
from verl_like.kit.selfcheck.report import table
from verl_like.kit.selfcheck.step_proof import prove_step
from verl_like.kit.selfcheck.tiny import write_tiny_model
from verl_like.models.loading import load_tokenizer
from verl_like.trainer import roles
from verl_like.trainer.compose import compose

pytestmark = pytest.mark.engines  # two more processes, and Ray
ACTOR = "actor_rollout_ref.actor"
COMMON = [
    "data.train_files=x.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=24",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    f"{ACTOR}.ppo_mini_batch_size=4",
    "critic.ppo_mini_batch_size=4",
]
GRPO, GAE = ["algorithm.adv_estimator=grpo"], ["algorithm.adv_estimator=gae"]
CHUNKS = [*GAE, *(f"{name}.fsdp_config.context_parallel_size=2" for name in (ACTOR, "critic.model"))]
STAGES = [*GAE, *(f"{name}.fsdp_config.pipeline_parallel_size=2" for name in (ACTOR, "critic.model"))]
ULYSSES = [*GRPO, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
POOLS = [*GAE, f"{ACTOR}.use_kl_loss=True", "trainer.placement={critic:2,apart:{roles:[ref]}}"]

# What every worker imports (VERL_USE_EXTERNAL_MODULES), the configuration, and the line that must find it first.
FAULTS = {
    "norm_of_own_shard": (
        """
        import torch
        from verl_like.parallel import fsdp
        from verl_like.parallel.sharding import local_tensor

        def own(self):
            gradients = [local_tensor(p.grad) for p in self.parameters() if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients)

        fsdp.Sharding.gradient_norm = own
        """,
        GRPO,
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "gradients_averaged": (
        """
        from verl_like.parallel import fsdp
        from verl_like.parallel.sharding import local_tensor

        own = fsdp.Sharding.complete_gradients

        def averaged(self):
            own(self)
            for p in self.parameters():
                if p.grad is not None:
                    local_tensor(p.grad).div_(2)

        fsdp.Sharding.complete_gradients = averaged
        """,
        GRPO,
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "gradients_of_own_rows": (
        """
        from verl_like.parallel import broken_pass

        def alone(self, output_tensor, input_tensor, group, **named):
            self.done = True
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

        broken_pass.Reduction.__call__ = alone
        """,
        GRPO,
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "copies_apart": (
        """
        import inspect
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_torch

        own = of_torch.foreach_reduce

        def apart(*given, **named):
            bound = inspect.signature(own).bind(*given, **named)
            bound.arguments["all_reduce_group"] = None
            return own(*bound.args, **bound.kwargs)

        of_torch.foreach_reduce = apart
        """,
        [*GRPO, f"{ACTOR}.fsdp_config.fsdp_size=1"],
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "ranks_swapped": (
        """
        import dataclasses
        from verl_like.models import packing

        own = packing.take_slice

        def swapped(whole, group):
            return own(whole, dataclasses.replace(group, rank=group.size - 1 - group.rank))

        packing.take_slice = swapped
        """,
        ULYSSES,
        "step 1: old log-probs",
    ),
    "keys_of_this_rank_alone": (
        """
        from verl_like.parallel import context

        own = context._GatherSeen.backward

        def kept(ctx, grad):
            whole = grad.new_zeros(ctx.keys.ranks.size * ctx.tokens, *grad.shape[1:])
            whole.index_copy_(0, ctx.keys.places_U, grad)
            return whole.view(-1, ctx.tokens, *grad.shape[1:])[ctx.keys.ranks.rank], None

        context._GatherSeen.backward = staticmethod(kept)
        """,
        CHUNKS,
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "critic_by_ranks": (
        """
        from verl_like.algorithms.objectives import ValueObjective

        own = ValueObjective.__call__

        def half(self, *given):
            loss, metrics = own(self, *given)
            return loss / 2, metrics

        ValueObjective.__call__ = half
        """,
        GAE,
        "step 1: critic: mini-batch 1: gradient norm",
    ),
}


def first_difference(keys: list[str], model: Path) -> str:
    findings, _ = prove_step(compose([*COMMON, *keys, f"actor_rollout_ref.model.path={model}"]), ranks=2)
    return next((each.name for each in findings if not each.passed), "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("step")))


@pytest.mark.parametrize(
    "keys", [GAE, ULYSSES, CHUNKS, STAGES, POOLS], ids=["gae", "ulysses", "chunks", "stages", "pools"]
)
def test_a_sound_step_passes(model: Path, keys: list[str]) -> None:
    findings, _ = prove_step(compose([*COMMON, *keys, f"actor_rollout_ref.model.path={model}"]), ranks=2)
    assert all(each.passed for each in findings), table(findings)


def test_a_sound_step_passes_with_experts_handed_out(model: Path, tmp_path: Path) -> None:
    """On as many ranks as that needs; routes are not replayed in it."""
    folder = zoo.folder(tmp_path, "qwen3_moe")
    load_tokenizer(str(model)).save_pretrained(folder)
    keys = [*GRPO, "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2", "trainer.n_gpus_per_node=2"]
    keys.append("actor_rollout_ref.actor.router_replay.mode=R2")
    findings, notes = prove_step(compose([*COMMON, *keys, f"actor_rollout_ref.model.path={folder}"]), ranks=1)
    assert all(each.passed for each in findings), table(findings)
    assert notes == ["not checked: router_replay.mode=R2, which is off in the proof"]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["expert", "context", "tensor", "pipeline"])
def test_a_sound_step_passes_with_an_axis_beside_fsdp(model: Path, tmp_path: Path, axis: str) -> None:
    """On four ranks; of experts the policy alone."""
    folder, roles_too = str(model), (ACTOR, "critic.model")
    if axis == "expert":
        folder, roles_too = zoo.folder(tmp_path, "qwen3_moe"), (ACTOR,)
        load_tokenizer(str(model)).save_pretrained(folder)
    keys = [*GAE, f"actor_rollout_ref.model.path={folder}", f"critic.model.path={model}", "trainer.n_gpus_per_node=4"]
    keys += [f"{name}.fsdp_config.{axis}_parallel_size=2" for name in roles_too]
    findings, _ = prove_step(compose([*COMMON, *keys]), ranks=4)
    assert all(each.passed for each in findings), table(findings)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_workers_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    text, keys, where = FAULTS[fault]
    elsewhere = f"import os\nif os.getpid() != {os.getpid()}:\n"  # the plain step is computed in this process
    (tmp_path / f"{fault}.py").write_text(elsewhere + textwrap.indent(textwrap.dedent(text), "    "))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", fault)
    assert first_difference(keys, model) == where


def test_rows_joined_in_another_order_are_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsorted(parts: list[Any], shares: object) -> Any:
        return type(parts[0]).concat(parts)

    monkeypatch.setattr(roles, "join_rows", unsorted)
    assert first_difference(GRPO, model) == "step 1: old log-probs"
