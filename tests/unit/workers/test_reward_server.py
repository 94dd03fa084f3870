"""A pool whose processes host nothing but a reward model's server, and the driver's way to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.services.test_server import SERVER, gone, helper_of
from verl_like.cluster.local import LocalWorkerGroup
from verl_like.cluster.worker_group import WorkerDied
from verl_like.config.batch_plan import BatchPlan
from verl_like.rewards.grading import ServedModel
from verl_like.services.server import answers
from verl_like.trainer.compose import compose
from verl_like.trainer.reward_models import use_reward_model
from verl_like.trainer.workers import Pools
from verl_like.workers.spec import WorkerSpec


class Told:
    """Of a RewardManager what the driver uses here."""

    awaits_servers = True
    served: ServedModel

    def use_servers(self, served: ServedModel) -> None:
        self.served = served


def test_a_pool_of_its_own_serves_until_it_ends(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of vLLM's server; everything around it is the run's own."""

    def command(rollout: Any, path: str, *, host: str, port: int, **more: Any) -> list[str]:
        return [sys.executable, "-c", SERVER, str(port)]

    monkeypatch.setattr("verl_like.plugins.reward_models.server.server_command", command)
    config = compose(
        [
            *("algorithm=grpo", "actor_rollout_ref.rollout.n=2", f"trainer.default_local_dir={tmp_path}"),
            *(
                "reward_model.enable=true",
                f"reward_model.model.path={tiny_model}",
                "reward_model.model_type=generative",
            ),
            *("reward_model.rollout.name=vllm", "reward_model.enable_resource_pool=true", "reward_model.nnodes=1"),
            "reward_model.n_gpus_per_node=1",
        ]
    )
    plan = BatchPlan.build(config, 1, num_train_prompts=4096)
    assert [pool.roles for pool in plan.pools] == [("actor", "rollout"), ("reward",)]
    sizes: dict[str, Any] = {"tokenizer_size": 9, "max_model_len": 8, "profile_dir": str(tmp_path / "profile")}
    workers = LocalWorkerGroup(
        "verl_like.workers.host:RoleHost", WorkerSpec(config=config, plan=plan, pool="reward", **sizes)
    )
    pools, told = Pools({"reward": workers}, plan, 60), Told()
    try:
        assert list(pools.ask("start_seconds")[0]) == ["imports", "reward"] and pools.ask("device_peak")
        with pools.profiled(1):
            use_reward_model(config, plan, pools, told, (None, None))  # pyright: ignore[reportArgumentType]
        told.served.require_alive()
        (address,) = told.served.addresses
        assert told.served.path == str(tiny_model) and told.served.next_address() == address
        server = workers._worker.roles["reward"]._server
        assert server.log == tmp_path / "workers" / "judge0.log"
        helper = helper_of(server)
    finally:
        workers.shutdown()
    assert gone(helper) and not answers(f"http://{address}/health", 5)
    with pytest.raises(WorkerDied, match=rf"the reward model's server at {address} .* does not answer"):
        told.served.require_alive()
