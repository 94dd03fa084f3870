"""Which calls are recorded, and in how many traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl_like.config import ProfilerConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.trainer import ProfileTool
from verl_like.parallel.dist import ProcessInfo
from verl_like.trainer.compose import compose
from verl_like.workers.host import WorkerProfiler, build_profiler, is_chosen
from verl_like.workers.spec import WorkerSpec


def profiler(folder: Path, rank: int = 0, **sections: ProfilerConfig) -> WorkerProfiler:
    return WorkerProfiler(sections, rank=rank, device=torch.device("cpu"), folder=folder, tool=ProfileTool.torch)


def run_step(recorder: WorkerProfiler, step: int) -> None:
    recorder.start(step)
    for role, name in (("rollout", "serve"), ("ref", "log_probs"), ("actor", "update")):
        with recorder.phase(role, name):
            torch.ones(2).sum()
    recorder.stop()


@pytest.mark.parametrize(
    "section, ranks",
    [
        (ProfilerConfig(), {0}),
        (ProfilerConfig(ranks=[1, 2]), {1, 2}),
        (ProfilerConfig(ranks=[]), set()),
        (ProfilerConfig(all_ranks=True), {0, 1, 2, 3}),
        (ProfilerConfig(all_ranks=True, enable=False), set()),
    ],
)
def test_ranks(section: ProfilerConfig, ranks: set[int]) -> None:
    assert {rank for rank in range(4) if is_chosen(section, rank)} == ranks


def test_discrete_gives_a_trace_for_each_call(tmp_path: Path) -> None:
    recorder = profiler(tmp_path, actor=ProfilerConfig(discrete=True),
                        rollout=ProfilerConfig(discrete=True), ref=ProfilerConfig(ranks=[]))  # fmt: skip
    run_step(recorder, 7)
    written = sorted(path.name for path in (tmp_path / "step_7").iterdir())
    assert written == ["rank0_actor_update.json.gz", "rank0_rollout_serve.json.gz"]  # the reference is not chosen


def test_one_whole_step_role_covers_all(tmp_path: Path) -> None:
    recorder = profiler(tmp_path, actor=ProfilerConfig(), ref=ProfilerConfig(discrete=True))
    run_step(recorder, 2)
    run_step(recorder, 5)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.gz")) == [
        "step_2/rank0.json.gz",
        "step_5/rank0.json.gz",
    ]


def test_a_rank_that_nobody_chose_writes_nothing(tmp_path: Path) -> None:
    run_step(profiler(tmp_path, rank=1, actor=ProfilerConfig()), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("with_reference", "traces"), [(False, ["rank0_actor_update", "rank0_rollout_serve"]), (True, ["rank0"])]
)
def test_roles_that_the_run_lacks_do_not_vote(tmp_path: Path, with_reference: bool, traces: list[str]) -> None:
    """A trace for each call needs the consent of the roles that are there: GRPO has no critic, maybe no reference."""
    sections = [f"{section}.profiler.discrete=false" for section in ("critic", "reward_model", "actor_rollout_ref.ref")]
    config = compose(
        ["algorithm=grpo", "actor_rollout_ref.rollout.n=2", "trainer.profile_steps=[1]", *sections,
         "actor_rollout_ref.actor.profiler.discrete=true", f"actor_rollout_ref.actor.use_kl_loss={with_reference}"]
    )  # fmt: skip
    plan = BatchPlan.build(config, 1)
    spec = WorkerSpec(config=config, plan=plan, tokenizer_size=9, max_model_len=8, profile_dir=str(tmp_path))
    recorder = build_profiler(spec, ProcessInfo(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")))
    run_step(recorder, 1)
    assert sorted(path.name.partition(".")[0] for path in (tmp_path / "step_1").iterdir()) == traces
