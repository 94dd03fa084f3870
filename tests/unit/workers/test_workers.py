from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_like.batch import Denominators, Experience
from verl_like.cluster.environment import free_port
from verl_like.cluster.local import LocalWorkerGroup
from verl_like.cluster.worker_group import WorkerError
from verl_like.config import FSDPConfig, ModelConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import RoleConfig
from verl_like.parallel.dist import init_distributed, shutdown_distributed
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams
from verl_like.trainer.compose import compose
from verl_like.trainer.replicas import RolloutGroup
from verl_like.trainer.weights import Weights
from verl_like.weight_sync.verdict import SyncReport
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import build_engine
from verl_like.workers.spec import WorkerSpec

REQUEST = GenerationRequest(
    request_id="r", prompt_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=4, stop_token_ids=(1,)), seed=11
)


class Noting:
    """An engine of either kind: what it was asked to do with its memory."""

    def __init__(self, heard: list[str], name: str) -> None:
        self.heard, self.name, self.held = heard, name, None
        self.role = RoleConfig(model=ModelConfig(), fsdp=FSDPConfig(param_offload=name == "big"))

    def sleep(self, discard: bool = False) -> None:
        self.heard.append("sleep")
        if discard:
            self.held = None

    def wake(self) -> None:
        self.heard.append("wake")

    def offload(self, *, params: bool, optimizer: bool) -> None:
        self.heard.append(f"{self.name} leaves: {params}, {optimizer}")


def test_models_make_room_for_the_rollout_engine_and_it_for_them() -> None:
    heard: list[str] = []
    models: Any = [Noting(heard, "big"), Noting(heard, "small")]
    rollout: Any = Noting(heard, "rollout")
    residency = Residency(models, rollout)
    for phase in (Phase.train, Phase.rollout, Phase.rollout, Phase.train):
        residency.enter(phase)
    assert heard == ["sleep", "big leaves: True, False", "small leaves: False, False", "wake", "sleep"]


def test_what_a_sleeping_engine_threw_away_is_restored_unless_a_sync_came_before() -> None:
    heard: list[str] = []
    models: Any = [Noting(heard, "model")]
    rollout: Any = Noting(heard, "rollout")
    residency = Residency(models, rollout, discard=True)
    residency.restore = lambda: heard.append("restore")
    residency.enter(Phase.rollout)  # it never had weights
    rollout.held = "synced"
    residency.enter(Phase.train)
    rollout.held = "synced again"
    residency.enter(Phase.rollout)
    assert "restore" not in heard
    residency.enter(Phase.train)
    assert rollout.held is None
    residency.enter(Phase.rollout)
    assert heard[-3:] == ["restore", "model leaves: False, False", "wake"]


def test_a_process_with_one_kind_of_engine_moves_nothing() -> None:
    heard: list[str] = []
    alone: Any = Noting(heard, "alone")
    for residency in (Residency([], alone), Residency([alone], None)):
        residency.enter(Phase.rollout)
        residency.enter(Phase.train)
    assert heard == []


def config_of(model: Path) -> PPOConfig:
    return compose(
        [
            f"actor_rollout_ref.model.path={model}",
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "data.train_batch_size=2",
            "data.max_prompt_length=4",
            "data.max_response_length=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "critic.ppo_mini_batch_size=2",
        ]
    )


@pytest.fixture
def group(tiny_model: Path, tmp_path: Path) -> Iterator[LocalWorkerGroup]:
    config = config_of(tiny_model)
    plan = BatchPlan.build(config, 1, 100)
    spec = WorkerSpec(config=config, plan=plan, tokenizer_size=18, max_model_len=8, profile_dir=str(tmp_path))
    workers = LocalWorkerGroup("verl_like.workers.host:RoleHost", spec)
    yield workers
    workers.shutdown()


def test_the_actors_entropy_keys_act_on_full_logits_alone(tiny_model: Path) -> None:
    found = []
    for fused in (False, True):
        config = config_of(tiny_model)
        config.actor_rollout_ref.model.use_fused_kernels = fused
        config.actor_rollout_ref.actor.entropy_checkpointing = True
        plan = BatchPlan.build(config, 1, 100)
        spec = WorkerSpec(config=config, plan=plan, tokenizer_size=18, max_model_len=8, profile_dir="")
        process = init_distributed(0, 1, 0, 1, "127.0.0.1", free_port("127.0.0.1"), "cpu")
        try:
            model: Any = build_engine(spec, process, "actor").model
        finally:
            shutdown_distributed()
        found.append(model.reduce.keywords)
    assert found == [{"entropy_rows": None, "recompute_entropy": True}, {"backend": "torch"}]


def experience() -> Experience:
    ids = torch.tensor([[6, 7, 1], [8, 9, 10]], dtype=torch.int32)
    return Experience(
        prompt_ids_BP=torch.tensor([[3, 4], [5, 6]], dtype=torch.int32),
        prompt_length_B=torch.tensor([2, 2]),
        response_ids_BR=ids,
        response_length_B=torch.tensor([3, 3]),
        response_mask_BR=torch.ones(2, 3, dtype=torch.bool),
        group_B=torch.tensor([0, 1]),
        advantages_BR=torch.tensor([[1.0], [-1.0]]).expand(2, 3).clone(),
        ref_log_probs_BR=torch.full((2, 3), -3.0),
        returns_BR=torch.ones(2, 3),
        values_BR=torch.zeros(2, 3),
    )


def sync(group: LocalWorkerGroup, version: int) -> SyncReport:
    report = Weights(group, group, timeout_s=60).sync(version)
    assert report is not None
    return report


def generate(group: LocalWorkerGroup, request: GenerationRequest = REQUEST) -> list[Completion]:
    rollout = RolloutGroup(group, BatchPlan.build(PPOConfig(), 1), timeout_s=60)
    try:
        return [rollout.sample(lambda client: client.submit(request))]
    finally:
        rollout.close()


def test_one_worker_goes_through_a_step(group: LocalWorkerGroup) -> None:
    """Sync, sample, evaluate, update, sync again: the new weights arrive, the reference stays."""
    rows, counts = experience(), Denominators(num_tokens=6, num_sequences=2, max_response_length=4)
    report = sync(group, 0)
    assert report.probe_gap is not None and report.probe_gap < 1e-5
    (first,) = generate(group)
    (old,) = group.call_all("actor.log_probs", rows).wait()
    (reference,) = group.call_all("ref.log_probs", rows).wait()
    assert torch.allclose(old.old_log_probs_BR, reference.ref_log_probs_BR, atol=1e-6)
    (values,) = group.call_all("critic.values", rows).wait()
    assert values.values_BR.shape == (2, 3)
    ((critic,),) = group.call_all("critic.update", [(rows, counts)]).wait()
    ((actor,),) = group.call_all("actor.update", [(rows, counts)]).wait()
    assert critic["vf_loss"].value > 0 and actor["grad_norm"].value > 0
    assert actor["perf/cpu_memory_used_gb"].reduction == "max"
    report = sync(group, 1)
    assert report.num_changed is not None and 0 < report.num_changed <= report.num_tensors
    (second,) = generate(group)
    assert [set(c.sampled.weight_versions) for c in (first, second)] == [{0}, {1}]
    assert first.log_probs != second.log_probs
    (moved,) = group.call_all("actor.log_probs", rows).wait()
    assert not torch.allclose(moved.old_log_probs_BR, old.old_log_probs_BR, atol=1e-3)
    (unmoved,) = group.call_all("ref.log_probs", rows).wait()
    assert torch.equal(unmoved.ref_log_probs_BR, reference.ref_log_probs_BR)


def test_sampling_leaves_the_trainers_random_numbers_alone(group: LocalWorkerGroup) -> None:
    """A request without a seed draws from the engine's own, which go on from call to call."""
    sampling = dataclasses.replace(REQUEST.sampling, stop_token_ids=())
    unseeded = dataclasses.replace(REQUEST, seed=None, sampling=sampling)
    sync(group, 0)
    before = torch.get_rng_state()
    drawn = [str(generate(group, unseeded)[0].token_ids) for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(drawn)) > 1


def test_a_role_that_is_not_in_the_pool_is_named(group: LocalWorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"reward\.scores\(\) was called in the pool main, which hosts critic, actor"):
        group.call_all("reward.scores", experience()).wait()


def test_the_critic_works_while_the_rollout_engine_sleeps(group: LocalWorkerGroup) -> None:
    """Without old log-probs and reference no actor call lies between sampling and the critic."""
    rows, counts = experience(), Denominators(num_tokens=6, num_sequences=2, max_response_length=4)
    worker = group._worker
    for method, argument in (("critic.values", rows), ("critic.update", [(rows, counts)])):
        sync(group, 0)
        assert worker.residency.phase is Phase.rollout
        group.call_all(method, argument).wait()
        assert worker.residency.phase is Phase.train


def test_a_profiled_step_leaves_a_trace_that_opens(group: LocalWorkerGroup, tmp_path: Path) -> None:
    rows, counts = experience(), Denominators(num_tokens=6, num_sequences=2, max_response_length=4)
    group.call_all("start_profile", 3).wait()
    group.call_all("actor.update", [(rows, counts)]).wait()
    group.call_all("stop_profile").wait()
    group.call_all("actor.update", [(rows, counts)]).wait()  # outside the step: nothing is recorded
    (path,) = tmp_path.rglob("*.json.gz")
    assert path == tmp_path / "step_3" / "rank0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if "name" in event}
    assert {"verl_like::actor.update", "aten::mm"} <= names
