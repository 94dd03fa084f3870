"""Proof of a whole step: the honest program passes, and faults at the seams are found where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.models import tiny_vision, zoo
from verl_like.algorithms import corrections, experience, reward_shaping
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.cluster.worker_group import WorkerError
from verl_like.config import PPOConfig
from verl_like.engine import export, optim, sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.selfcheck.plain_adapters import with_noise
from verl_like.kit.selfcheck.plain_step import PlainRecord
from verl_like.kit.selfcheck.real_step import real_steps, small
from verl_like.kit.selfcheck.report import Finding, table
from verl_like.kit.selfcheck.step_proof import (
    compared,
    frozen_rollouts,
    plain_step,
    prove_step,
    schedules,
)
from verl_like.kit.selfcheck.tiny import CHARACTERS, write_tiny_model
from verl_like.kit.selfcheck.work import comparable
from verl_like.models import exact, families, lora, packing, vision
from verl_like.models.loading import load_tokenizer
from verl_like.models.token_layout import TokenLayout
from verl_like.trainer import ppo, roles
from verl_like.trainer.compose import compose
from verl_like.trainer.state import TrainState
from verl_like.workers import roles as worker_roles

ACTOR, CORRECTION, ROLLOUT = "actor_rollout_ref.actor", "algorithm.rollout_correction", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
COMMON = [
    "data.train_files=x.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=24",
    "data.max_response_length=24",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.temperature=0.7",
    f"{ACTOR}.ppo_mini_batch_size=4",
    "critic.ppo_mini_batch_size=4",
]
CONFIGS: dict[str, list[str]] = {
    "grpo": ["algorithm.adv_estimator=grpo", f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.entropy_checkpointing=True"],
    "gae": ["algorithm.adv_estimator=gae", "algorithm.lam=0.9"],
    "one update": [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=2.0",
    ],
    "l2, wide clip": [
        "algorithm.adv_estimator=dr_grpo",
        f"{ACTOR}.grad_clip=1000",
        f"{ACTOR}.optim.l2_coeff=0.1",
        f"{ACTOR}.optim.weight_decay=0",
    ],
    "lora": ["algorithm.adv_estimator=rloo", "actor_rollout_ref.model.lora_rank=4"],
    "kl in reward": ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=True"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("step"))


class Plain:
    """Configuration of the proof with its first plain step, which no fault touches."""

    def __init__(self, keys: list[str], model: str, folder: Path) -> None:
        composed = compose([*COMMON, *keys, f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"])
        self.config = small(comparable(with_noise(composed, folder / "adapters")), 1, str(folder))
        step = plain_step(self.config, len(CHARACTERS) + 3)
        self.rollouts, self.scores = step.rollouts, step.scores
        self.record: PlainRecord = step.run()

    def findings(self) -> list[Finding]:
        (real,) = real_steps(self.config, self.rollouts, self.scores, count=1)
        return list(compared(self.record, real, self.rollouts.response_mask_BR))


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Plain]:
    made: dict[str, Plain] = {}

    def make(name: str) -> Plain:
        if name not in made:
            made[name] = Plain(CONFIGS[name], model, tmp_path_factory.mktemp("adapters"))
        return made[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sound_step_passes(plain: Callable[[str], Plain], name: str) -> None:
    findings = plain(name).findings()
    assert all(each.passed for each in findings), table(findings)
    assert max(each.difference for each in findings) > 0  # not a comparison of a thing with itself


def test_weights_come_from_ranks_on_another_machine(
    plain: Callable[[str], Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not find the driver's file there."""
    monkeypatch.setattr("verl_like.workers.roles.os", SimpleNamespace(path=SimpleNamespace(exists=lambda _: False)))
    monkeypatch.setattr(torch, "from_file", None)  # nor is it read
    findings = plain("lora").findings()
    assert len(findings) > 10 and all(each.passed for each in findings), table(findings)


Plant = Callable[[pytest.MonkeyPatch], None]
OF_AGENTS = ["algorithm.agent_reward_norm.method=asym_clip", "algorithm.agent_reward_norm.grouping=kind"]
KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.5"]


def around(target: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace target.name by `change`, which gets it as first argument."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        own = getattr(target, name)
        patch.setattr(target, name, lambda *given, **options: change(own, *given, **options))

    return plant


def shifted(own: Any, role: Any, batch: Any) -> Any:
    found = own(role, batch)
    return found.replace(old_log_probs_T=found.old_log_probs_T.roll(1))


def without_temperature(own: Any, role: Any, *given: Any) -> None:
    own(role, *given)
    role.temperature = 1.0


def of_another_group(own: Any, inputs: Any, algorithm: Any) -> Any:
    return own(inputs.replace(group_B=inputs.group_B.roll(1)), algorithm)


def of_another_token(own: Any, inputs: Any, algorithm: Any) -> Any:
    return own(inputs.replace(values_T=inputs.values_T.roll(1)), algorithm)


def without_correction(own: Any, role: Any, *given: Any) -> None:
    own(role, *given)
    role.objective = PolicyObjective(role.objective.actor)


def of_the_whole_batch(own: Any, *given: Any) -> Any:
    found = own(*given)
    return dataclasses.replace(found, num_tokens=2 * found.num_tokens, num_sequences=2 * found.num_sequences)


def without_the_last(own: Any, *given: Any) -> Iterator[Any]:
    return iter(list(own(*given))[:-1])


def by_alpha_alone(own: Any, adapters: Any, parts: dict[str, Tensor]) -> Tensor:
    delta = parts["lora_B.weight"].float() @ parts["lora_A.weight"].float()
    return (parts["weight"].float() + adapters.alpha * delta).to(parts["weight"].dtype)


def scaled_by_alpha(own: Any, module: Any, base: Any, rank: int, scale: float, *given: Any) -> None:
    own(module, base, rank, scale * rank, *given)


def with_few_positions(own: Any, *given: Any, **options: Any) -> Any:
    inputs = own(*given, **options)
    return dataclasses.replace(inputs, position_ids=inputs.position_ids.clamp(max=40))


def with_a_frozen(own: Any, *given: Any, **options: Any) -> Any:
    adapters = own(*given, **options)
    for module in adapters.modules:
        module.lora_A.weight.requires_grad_(False)
    return adapters


def half_of_them(own: Any, *given: Any) -> list[str]:
    return own(*given)[::2]


def a_twice(own: Any, module: Any, given: Tensor) -> Tensor:
    base = nn.functional.linear(given, module.weight, module.bias)
    inner = module.lora_A(given)
    return base + module.lora_B(2 * inner - inner.detach()) * module.scale


def with_padded_vocabulary(own: Any, spec: Any, *given: Any) -> Any:
    return own(dataclasses.replace(spec, tokenizer_size=len(CHARACTERS) + 6), *given)


def one_stale(own: Any, *given: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in own(*given):
        yield name, tensor * 1.001 if name == "model.layers.1.mlp.up_proj.weight" else tensor


def entropy_detached(own: Any, objective: Any, outputs: Any, *given: Any) -> Any:
    return own(objective, outputs | {"entropy": outputs["entropy"].detach()}, *given)


def losers_apart(own: Any, objective: Any, rows: Any) -> Tensor:
    return (rows.advantages_BR * rows.response_mask_BR).sum(dim=1) <= 0


def rejected_left_in(own: Any, *given: Any) -> Any:
    found = own(*given)
    return dataclasses.replace(found, weights_T=None)


def undecayed(own: Any, parameters: Any, settings: Any, matrices: Any) -> Any:
    return own(parameters, dataclasses.replace(settings, weight_decay=0.5), matrices)


def own_again(own: Any, trainer: Any, rollouts: Any) -> Any:
    return own(trainer, rollouts.replace(rollout_log_probs_T=rollouts.rollout_log_probs_T * 0.5))


FAULTS: dict[str, tuple[str, Plant, str]] = {
    "log-probs come back a token late": (
        "grpo",
        around(worker_roles.ActorRole, "log_probs", shifted),
        "old log-probs",
    ),
    "the worker forgets the temperature": (
        "grpo",
        around(worker_roles.ActorRole, "__init__", without_temperature),
        "old log-probs",
    ),
    "advantages of another group": ("grpo", around(experience, "compute_advantages", of_another_group), "advantages"),
    "values of another token": ("gae", around(experience, "compute_advantages", of_another_token), "advantages"),
    "the worker forgets the correction": (
        "one update",
        around(worker_roles.ActorRole, "__init__", without_correction),
        "actor: mini-batch 1: policy loss",
    ),
    "denominators of the whole batch": (
        "grpo",
        around(roles, "denominators_of", of_the_whole_batch),
        "actor: mini-batch 1: denominators",
    ),
    "the last mini-batch is dropped": (
        "grpo",
        around(roles.RoleHandle, "_minibatches", without_the_last),
        "actor: optimizer steps",
    ),
    "the merge scales by alpha": ("lora", around(lora.Adapters, "_sum", by_alpha_alone), "actor: change"),
    "training scales by alpha": ("lora", around(lora.LoRALinear, "__init__", scaled_by_alpha), "old log-probs"),
    "positions wrong behind what other rows reach": (
        "grpo",
        around(packing, "pack", with_few_positions),
        "old log-probs",
    ),
    "A is frozen": ("lora", around(lora, "attach", with_a_frozen), "actor: mini-batch 1: gradient norm"),
    "A learns twice": ("lora", around(lora.LoRALinear, "forward", a_twice), "actor: mini-batch 1: gradient norm"),
    "ids that only pad are likely": (
        "grpo",
        around(worker_roles, "build_engine", with_padded_vocabulary),
        "old log-probs",
    ),
    "one weight is stale in the export": ("grpo", around(export.WeightExport, "stream", one_stale), "actor: change"),
    "the entropy has no gradient": (
        "grpo",
        around(PolicyObjective, "__call__", entropy_detached),
        "actor: mini-batch 1: gradient norm",
    ),
    "losing rows are not trained": (
        "gae",
        around(PolicyObjective, "without_gradient", losers_apart),
        "actor: mini-batch 1: gradient norm",
    ),
    "third copies of a token give no gradient": (
        "grpo",
        around(
            TokenLayout, "of", lambda own, *given: dataclasses.replace(found := own(*given), further=found.further[:1])
        ),
        "actor: mini-batch",
    ),
    "another weight decay": ("grpo", around(sharded_model, "build_optimizer", undecayed), "actor: change"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(
    plain: Callable[[str], Plain], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, plant, where = FAULTS[name]
    sound = plain(config)
    plant(monkeypatch)
    wrong = [each.name for each in sound.findings() if not each.passed]
    assert wrong and wrong[0].startswith(where)


def test_adapters_on_fewer_layers_do_not_start(plain: Callable[[str], Plain], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = plain("lora")
    around(lora, "_targets", half_of_them)(monkeypatch)
    with pytest.raises(WorkerError, match="does not fit"):
        sound.findings()


def with_the_actors_optimizer(own: Any, spec: Any, process: Any, name: str) -> Any:
    roles_of_run = spec.plan.roles
    for role in roles_of_run.values():
        if role.config.optim is not None:
            object.__setattr__(role.config, "optim", roles_of_run["actor"].config.optim)
    return own(spec, process, name)


def one_too_many(own: Any, *given: Any) -> Iterator[tuple[str, Tensor]]:
    yield from own(*given)
    yield "model.layers.9.mlp.up_proj.weight", torch.zeros(1)


def kl_added(own: Any, rewards_T: Tensor, mask_T: Tensor, known: Any, algorithm: Any, kl_coef: float) -> Any:
    return own(rewards_T, mask_T, known, algorithm, -kl_coef)


def test_the_second_step_has_a_penalty(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first the policy is its own reference."""
    keys = [*COMMON, *CONFIGS["kl in reward"], "algorithm.kl_ctrl.kl_coef=0.5", f"actor_rollout_ref.model.path={model}"]
    findings, notes = prove_step(compose(keys), ranks=1)
    assert notes == [] and all(each.passed for each in findings), table(findings)
    around(experience, "subtract_kl", kl_added)(monkeypatch)
    findings, _ = prove_step(compose(keys), ranks=1)
    assert next(each.name for each in findings if not each.passed) == "step 2: rewards"


def test_the_schedule_of_the_whole_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_warmup_steps=3", "trainer.total_training_steps=20"]
    config: PPOConfig = compose([*COMMON, *CONFIGS["grpo"], *keys, f"actor_rollout_ref.model.path={model}"])
    (line,) = schedules(config)
    assert line.passed
    around(optim, "cosine_factor", lambda own, step, *given: own(step + 1, *given))(monkeypatch)
    (line,) = schedules(config)
    assert line.name == "actor: learning rate of every step" and not line.passed


def test_a_shared_formula_is_said(model: str) -> None:
    keys = ["algorithm.adv_estimator=opo", "algorithm.whiten_advantages=True", f"actor_rollout_ref.model.path={model}"]
    findings, notes = prove_step(compose([*COMMON, *keys]), ranks=1)
    assert all(each.passed for each in findings), table(findings)
    (note,) = notes
    assert note == "credit: shared formula (algorithm.adv_estimator=opo)"


def summed(own: Any, gap: Any, rejection: Any) -> Tensor:
    return own(gap, dataclasses.replace(rejection, level="seq_sum"))


CREDIT: dict[str, tuple[list[str], Plant, str]] = {
    "whitening over tool text": (
        ["algorithm.adv_estimator=grpo", "algorithm.whiten_advantages=True"],
        around(reward_shaping, "masked_whiten", lambda own, values, mask: own(values, torch.ones_like(mask))),
        "step 1: advantages",
    ),
    "opo with rows of another group": (
        ["algorithm.adv_estimator=opo"],
        around(experience, "compute_advantages", of_another_group),
        "step 1: advantages",
    ),
    "penalty of the wrong sign beside whitening": (
        ["algorithm.adv_estimator=grpo", "algorithm.whiten_advantages=True", *KL],
        around(experience, "subtract_kl", kl_added),
        "step 2: rewards",
    ),
    "reward on the last token, sampled or not": (
        ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
        around(experience, "place_on_last_token", lambda own, score, mask, length: own(score, mask | True, length)),
        "step 1: rewards",
    ),
    "a reward on text that was not sampled is lost": (
        ["algorithm.adv_estimator=grpo"],
        around(experience, "place_on_last_token", lambda own, score, mask, length: own(score, mask | True, length)),
        "step 1: rewards",
    ),
    "a warm-up that begins a step late": (
        ["algorithm.adv_estimator=grpo", f"{ACTOR}.optim.lr_warmup_steps=5"],
        around(optim.Schedule, "rate", lambda own, schedule: own(schedule) * 0.9),
        "actor: learning rate of every step",
    ),
    "the critic with the actor's rate": (
        ["algorithm.adv_estimator=gae"],
        around(worker_roles, "build_engine", with_the_actors_optimizer),
        "step 1: critic: mini-batch 1: learning rate",
    ),
    "an incomplete last mini-batch that is left out": (
        ["algorithm.adv_estimator=grpo"],
        around(roles, "cut_minibatches", lambda own, *given, **how: [p for p in own(*given, **how) if len(p) > 4]),
        "step 1: actor: optimizer steps",
    ),
    "the critic is cut by the actor's rules": (
        ["algorithm.adv_estimator=gae", "critic.ppo_epochs=2"],
        around(
            ppo.PPOTrainer, "update_rules", lambda own, trainer, _: own(trainer, trainer.config.actor_rollout_ref.actor)
        ),
        "step 1: critic: optimizer steps",
    ),
    "the coefficient of the penalty stays": (
        ["algorithm.adv_estimator=grpo", *KL, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"],
        around(ppo, "make_experience", lambda own, *given, **named: own(*given, **named | {"kl_coef": 0.5})),
        "step 2: rewards",
    ),
    "the controller of the penalty counts a sequence too many": (
        ["algorithm.adv_estimator=grpo", *KL, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"],
        around(
            TrainState,
            "advance",
            lambda own, *given, num_sequences, **named: own(*given, num_sequences=num_sequences + 1, **named),
        ),
        "step 1: KL coefficient of the next step",
    ),
    "the controller of the penalty gets a mean over tokens": (
        ["algorithm.adv_estimator=grpo", *KL, "algorithm.kl_ctrl.type=adaptive"],
        around(experience, "mean_sequence_kl", lambda own, kl_T, mask_T, _: (kl_T.sum() / mask_T.sum()).item()),
        "step 2: mean KL of responses",
    ),
    "rewards are bounded on one side": (
        ["algorithm.adv_estimator=grpo", "algorithm.reward_clip=0.4"],
        around(reward_shaping, "clip", lambda own, values, bound, *_: (values.clamp(max=bound or 1e9), {})),
        "step 1: rewards",
    ),
    "rewards of agents are compared within a state": (
        ["algorithm.adv_estimator=grpo", *OF_AGENTS],
        around(reward_shaping, "row_groups", lambda own, rollouts, grouping: own(rollouts, "state")),
        "step 1: rewards",
    ),
    "the overlong buffer punishes every row": (
        [
            "algorithm.adv_estimator=grpo",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=16",
            "reward_model.overlong_buffer.penalty_factor=1.0",
            "reward_model.overlong_buffer.only_key=right",
        ],
        around(reward_shaping, "_chosen", lambda own, key, scores: own(None, scores)),
        "step 1: rewards",
    ),
    "a row is rejected by the sum of its tokens, not by their mean": (
        [
            "algorithm.adv_estimator=grpo",
            f"{CORRECTION}.rollout_rs=seq_mean_k3",
            f"{CORRECTION}.rollout_rs_threshold=1",
        ],
        around(corrections, "rejection_statistic", summed),
        "step 1: actor: mini-batch",
    ),
    "of a cut episode the last row alone is left out": (
        ["algorithm.adv_estimator=grpo", f"{ACTOR}.mask_truncated=True"],
        around(
            experience,
            "put_together",
            lambda own, actor, rollouts, *given: own(actor, rollouts, *given).replace(truncated_B=rollouts.cut_off_B),
        ),
        "step 1: actor: mini-batch 1: denominators",
    ),
    "a schedule that stands still": (
        ["algorithm.adv_estimator=grpo"],
        around(FSDPEngine, "advance_schedule", lambda own, engine: None),
        "step 2: actor: mini-batch 1: learning rate",
    ),
    "the reference at temperature 1": (
        ["algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True"],
        around(worker_roles.ReferenceRole, "__init__", without_temperature),
        "step 1: ref log-probs",
    ),
    "exact layers leave out their bias": (
        ["algorithm.adv_estimator=grpo", "trainer.parity=exact", f"{ROLLOUT}.name=hf"],
        around(exact, "linear", lambda own, x, weight, bias=None: own(x, weight)),
        "step 1: actor: mini-batch 1: gradient norm",
    ),
    "a tensor too many in the export": (
        ["algorithm.adv_estimator=grpo"],
        around(export.WeightExport, "stream", one_too_many),
        "step 1: actor: change",
    ),
}


@pytest.mark.parametrize("n", [2, 4])
def test_a_reward_tells_where_it_lies(model: str, tmp_path: Path, n: int) -> None:
    """A score of 0 would hide whether it is lost: two rows have it. Some are below 0, where a bound is another one."""
    keys = [*COMMON, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n={n}", f"actor_rollout_ref.model.path={model}"]
    rollouts, scores, _ = frozen_rollouts(small(compose(keys), 1, str(tmp_path)), len(CHARACTERS) + 3)
    earned = scores.valid_B & (scores.score_B != 0)
    assert (scores.score_B[earned] > 0).any() and (scores.score_B[earned] < 0).any()
    assert (scores.valid_B & ~earned).sum() <= 2
    ends_in_text = ~rollouts.response_mask_BR[torch.arange(len(rollouts)), rollouts.response_length_B - 1]
    assert (earned & ends_in_text & (rollouts.group_B != 1)).any()  # that group's rewards are all the same


@pytest.mark.parametrize("name", CREDIT)
def test_what_others_planted_is_found(model: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Faults of a second pair of eyes that an earlier form of the proof did not see."""
    keys, plant, where = CREDIT[name]
    config = compose([*COMMON, *keys, f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"])
    plant(monkeypatch)
    findings, _ = prove_step(config, ranks=1)
    assert next(each.name for each in findings if not each.passed).startswith(where)


@pytest.mark.parametrize(
    "keys",
    [
        [f"{ACTOR}.sample_weight.difficulty=True"],
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"],
        ["algorithm.whiten_rewards=True", "algorithm.token_reward_clip=0.5", "algorithm.advantage_clip=1.0", *KL[:1]],
        [
            "reward_model.length_reward.enable=True",
            "reward_model.length_reward.coef=-0.5",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=12",
            "reward_model.overlong_buffer.penalty_factor=1.0",
            "reward_model.overlong_buffer.truncated=zero",
            "algorithm.reward_norm.mean=running",
            "algorithm.reward_norm.std=group",
            "algorithm.reward_clip=0.4",
        ],
        [
            *OF_AGENTS,
            "algorithm.agent_reward_norm.clip=[-0.5,0.8]",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=16",
            "reward_model.overlong_buffer.penalty_factor=1.0",
            "reward_model.overlong_buffer.only_key=right",
        ],
    ],
    ids=["difficulty", "metric", "shaping", "rewards", "agents"],
)
def test_no_false_alarm(model: str, keys: list[str]) -> None:
    config = compose([*COMMON, "algorithm.adv_estimator=grpo", *keys, f"actor_rollout_ref.model.path={model}"])
    findings, notes = prove_step(config, ranks=1)
    assert notes == [] and all(each.passed for each in findings), table(findings)


FAMILIES = families.FAMILIES | families.NESTED
OFTEN = ("jamba", "deepseek_v3", "qwen3_5", "qwen3_vl_moe")
OF_TYPES = [(name, rank) for name in OFTEN for rank in (0, 4)] + [
    pytest.param(name, 0, marks=pytest.mark.slow) for name in FAMILIES if name not in OFTEN
]


@pytest.mark.parametrize(("name", "lora_rank"), OF_TYPES)
def test_no_false_alarm_of_a_family(model: str, tmp_path: Path, name: str, lora_rank: int) -> None:
    """State, experts that files hold one by one or turned, a bias of a router, a tower that stays as it is."""
    folder, tokenizer = zoo.folder(tmp_path, name), load_tokenizer(model)
    tokenizer.save_pretrained(folder)
    own = [f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.model.lora_rank={lora_rank}"]
    findings, notes = prove_step(compose([*COMMON, "algorithm.adv_estimator=rloo", *own]), ranks=1)
    assert all(each.passed for each in findings) and len(findings) > 20, table(findings)
    assert any("experts and routers" in each for each in notes) == (lora_rank > 0 and name not in ("qwen3_5",))


def test_losses_of_routers_are_off_and_said(model: str, tmp_path: Path) -> None:
    folder = zoo.folder(tmp_path, "qwen3_moe")
    load_tokenizer(model).save_pretrained(folder)
    own = [f"actor_rollout_ref.model.path={folder}", f"{ACTOR}.router.balance_loss_coef=0.5"]
    findings, notes = prove_step(compose([*COMMON, "algorithm.adv_estimator=grpo", *own]), ranks=1)
    assert all(each.passed for each in findings), table(findings)
    assert notes == ["not checked: actor.router's losses and bias, off here"]


def with_plain_positions(patch: pytest.MonkeyPatch) -> None:
    """Images as if they were text."""
    patch.setattr(vision.VisionProcessor, "positions", lambda _, length, media: torch.arange(length).expand(3, -1))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("qwen2_vl", None),
        ("qwen2_vl", with_plain_positions),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in families.VISION if name != "qwen2_vl"),
    ],
)
def test_a_model_that_sees_is_proved_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    tiny_vision.save(tmp_path, name)
    own = [f"actor_rollout_ref.model.path={tmp_path}", "data.max_prompt_length=64", f"{ROLLOUT}.n=2"]
    if fault is not None:
        fault(monkeypatch)
    findings, notes = prove_step(compose([*COMMON, "algorithm.adv_estimator=grpo", *own]), ranks=1)
    wrong = [each.name for each in findings if not each.passed]
    assert notes == [] and (wrong == [] if fault is None else wrong[0] == "step 1: old log-probs"), table(findings)
