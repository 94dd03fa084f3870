"""The self-check passes on a sound trainer, and finds each of the faults that trainers of this kind have had.

Faults are planted into the running code. The yardstick's answers, and an engine, are made once for each configuration.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models import zoo
from tests.worlds.processes import forks
from verl_like.algorithms import corrections, objectives
from verl_like.algorithms.masked import masked_mean, masked_var
from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective, ValueObjective
from verl_like.batch import Denominators, Experience
from verl_like.engine import microbatch
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.selfcheck import check, driver
from verl_like.kit.selfcheck.check import SelfCheck
from verl_like.kit.selfcheck.plain_adapters import with_noise
from verl_like.kit.selfcheck.report import Finding, table
from verl_like.kit.selfcheck.tiny import write_tiny_model
from verl_like.kit.selfcheck.work import Case, Work
from verl_like.models import attention, packing
from verl_like.models.heads import ValueModel
from verl_like.models.loading import load_tokenizer
from verl_like.parallel.dist import ProcessInfo
from verl_like.trainer import roles
from verl_like.trainer.compose import compose

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ROWS_ALONE = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.train_files=x.parquet"]
BY_ROW = [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]
IS_AND_RS = [
    f"{CORRECTION}.rollout_is=token",
    f"{CORRECTION}.rollout_rs=token_k1",
    f"{CORRECTION}.rollout_rs_threshold=2.0",
]
CONFIGS: dict[str, list[str]] = {
    "by token": [*ROWS_ALONE, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.entropy_coeff=0.1"],
    "by row": [*ROWS_ALONE, *BY_ROW, f"{ACTOR}.mask_truncated=True", *IS_AND_RS],
    "two policies": [
        *ROWS_ALONE,
        *IS_AND_RS[:1],
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.loss_type=reinforce",
    ],
    "one update": [*ROWS_ALONE, *IS_AND_RS[:1], f"{ACTOR}.ppo_mini_batch_size=1024"],
    "capped": [*ROWS_ALONE, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=5.0"],
    "vetoed": [*ROWS_ALONE, f"{CORRECTION}.rollout_token_veto_threshold=1e-4"],
    "skipped": [*ROWS_ALONE, f"{ACTOR}.ratio_skip_threshold=2.0", f"{ACTOR}.clip_ratio_high=0.4"],
    "padded": [*ROWS_ALONE, "actor_rollout_ref.model.use_remove_padding=False"],
    "critic": ["actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=gae", "data.train_files=x.parquet"],
}
FULL_KL = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_coef=0.5"]
LONG = "plain model: a row of 600 tokens: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sliding window of 256 tokens, RoPE scaling; attention in blocks of 64 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("selfcheck"))


class Prepared:
    """The check of one configuration, with its yardstick and engines kept from fault to fault."""

    def __init__(self, settings: list[str], model: str, process: ProcessInfo) -> None:
        self.check = SelfCheck(config=compose([*settings, f"actor_rollout_ref.model.path={model}"]), num_rows=8)
        self.process, self.work = process, self.check.prepare()
        packed = self.check.config.actor_rollout_ref.model.use_remove_padding
        self.engine = self.check.policy(process, self.work, packed=packed)
        self.critic = None if self.work.critic is None else self.check.critic(process)

    def failures(self) -> set[str]:
        """Lines that find a difference, with the driver's part done again; those about cuts are left out."""
        config, found = self.check.settings(), []
        for case in self.work.policy:
            shares = {1: driver.shares_of(config, case.material, case.old, ranks=1)}
            found += self.lines(self.engine, dataclasses.replace(case, shares=shares))
        if self.critic is not None and self.work.critic is not None:
            case = self.work.critic
            shares = {1: driver.shares_of(config, case.material, case.old, ranks=1, critic=True)}
            found += self.lines(self.critic, dataclasses.replace(case, shares=shares))
        return {finding.name for finding in found if not finding.passed}

    def lines(self, engine: FSDPEngine, case: Case) -> list[Finding]:
        return self.check.against_plain(engine, case, self.check.measure(engine, case, case.shares[1][0]))


@pytest.fixture(scope="module")
def prepared(process: ProcessInfo, model: str) -> Callable[[str], Prepared]:
    kept: dict[str, Prepared] = {}

    def prepare(name: str) -> Prepared:
        if name not in kept:
            kept[name] = Prepared(CONFIGS[name], model, process)
        return kept[name]

    return prepare


def test_a_sound_trainer_passes_each_configuration(prepared: Callable[[str], Prepared]) -> None:
    assert {name: prepared(name).failures() for name in CONFIGS} == {name: set() for name in CONFIGS}


# ---- faults


def objective(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], kind: Any = PolicyObjective) -> None:
    """change(call, outputs, experience, denominators) takes the place of the objective."""
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *given: change(lambda *others: call(self, *others), *given))


def scaled(monkeypatch: pytest.MonkeyPatch, factor: float, kind: Any = PolicyObjective) -> None:
    def change(call: Any, *given: Any) -> Any:
        loss, metrics = call(*given)
        return factor * loss, metrics

    objective(monkeypatch, change, kind)


def counted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Experience, Denominators], Denominators]) -> None:
    monkeypatch.setattr(roles, "denominators_of", lambda rows, most: change(rows, denominators_of(rows, most)))


def masked(monkeypatch: pytest.MonkeyPatch, change: Callable[[Experience], Tensor]) -> None:
    """The driver's mask of what is trained on."""
    put_together = driver.put_together

    def other(*given: Any) -> Experience:
        rows = put_together(*given)
        return rows.replace(response_mask_T=change(rows))

    monkeypatch.setattr(driver, "put_together", other)


def inside(rows: Experience) -> Tensor:
    return torch.ones_like(rows.response_mask_T)


def without_last(rows: Experience) -> Tensor:
    found = rows.response_mask_T.clone()
    found[rows.response_length_B.cumsum(0) - 1] = False
    return found


def engine_without_last(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = packing.response_positions

    def other(batch: Any, **options: Any) -> Tensor:
        return wanted(batch, **options) & without_last(batch)

    monkeypatch.setattr(packing, "response_positions", other)


def packed(
    monkeypatch: pytest.MonkeyPatch, column: str, change: Callable[[Tensor], Tensor], layout: str = "pack"
) -> None:
    own = getattr(packing, layout)

    def other(*given: Any, **options: Any) -> Any:
        inputs = own(*given, **options)
        return dataclasses.replace(inputs, **{column: change(getattr(inputs, column))})

    monkeypatch.setattr(packing, layout, other)


def prompts_shared_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows begin with in common is taken to be a token longer."""
    own = packing.beginnings

    def longer(rows: Any, *given: Any) -> Any:
        found, last = own(rows, *given), (rows.num_tokens_B() - 1).tolist()
        pairs = zip(found.order[:1] + found.order, found.order, found.common, strict=False)
        return dataclasses.replace(found, common=[min(last[a], last[b], n + 1) if n else 0 for a, b, n in pairs])

    monkeypatch.setattr(packing, "beginnings", longer)


def rows_changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Experience], dict[str, Any]]) -> None:
    """What the objective gets, once the engine has chosen its tokens."""
    objective(monkeypatch, lambda call, outputs, rows, by: call(outputs, rows.replace(**change(rows)), by))


def of_the_kl(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    own = objectives.kl_penalty
    monkeypatch.setattr(objectives, "kl_penalty", lambda *given: change(own(*given)))


def narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention._attend

    def other(*given: Any) -> Tensor:
        *tensors, how = given
        return attend(*tensors, dataclasses.replace(how, window=how.window and how.window - 1))

    monkeypatch.setattr(attention, "_attend", other)


def corrected(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    correct = corrections.correct
    for module in (corrections, objectives):
        monkeypatch.setattr(module, "correct", lambda *given, **options: change(correct(*given, **options)))


def heavier(found: Any) -> Any:
    return found if found.weights_BR is None else dataclasses.replace(found, weights_BR=1.1 * found.weights_BR)


def never_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypass mode with reinforce falls back to the PPO clip without a word."""
    start = PolicyObjective.__init__

    def other(self: PolicyObjective, actor: Any, correction: Any = None, **options: Any) -> None:
        start(self, actor, correction, **options | {"two_policies": False})

    monkeypatch.setattr(PolicyObjective, "__init__", other)


def wrong_reference(call: Any, outputs: Any, experience: Experience, denominators: Denominators) -> Any:
    return call(outputs, experience.replace(ref_log_probs_BR=experience.old_log_probs_BR), denominators)


def zero_rows_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without an advantage leave the denominators."""

    def change(rows: Experience, found: Denominators) -> Denominators:
        empty = int((rows.advantages_BR == 0).all(dim=1).sum())
        return dataclasses.replace(found, num_sequences=found.num_sequences - empty)

    counted(monkeypatch, change)


def first_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyObjective, "without_gradient", lambda self, rows: torch.arange(len(rows)) == 0)


def truncated_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    none = "verl_like.algorithms.preparation._left_out"
    monkeypatch.setattr(none, lambda rows, actor: torch.zeros(len(rows), dtype=torch.bool))


def rejected_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    corrected(monkeypatch, lambda found: dataclasses.replace(found, keep_BR=torch.ones_like(found.keep_BR)))


def rejected_rows_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a token left leave the mini-batch, and N_seq with them."""
    put_together = driver.put_together

    def other(*given: Any) -> Experience:
        rows = put_together(*given)
        return rows.select(rows.response_mask_BR.any(dim=1))

    monkeypatch.setattr(driver, "put_together", other)


def late_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the state after each token."""
    forward = ValueModel.forward

    def other(self: ValueModel, inputs: Any, *given: Any) -> dict[str, Tensor]:
        last = inputs.input_ids.numel() - 1
        return forward(self, dataclasses.replace(inputs, select_N=(inputs.select_N + 1).clamp(max=last)), *given)

    monkeypatch.setattr(ValueModel, "forward", other)


def unclipped_values(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = objectives.clipped_value_loss
    monkeypatch.setattr(objectives, "clipped_value_loss", lambda v, old, returns, clip: loss(v, old, returns, 1e9))


def without_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = FSDPEngine._answers

    def other(self: FSDPEngine, rows: Any, want: Any, temperature: float, *rest: Any) -> Any:
        return answers(self, rows, want, 1.0, *rest)

    monkeypatch.setattr(FSDPEngine, "_answers", other)


def of_another_actor(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """Build the objective with some of the actor's keys set otherwise."""
    own = PolicyObjective.__init__

    def other(self: PolicyObjective, actor: Any, *given: Any, **options: Any) -> None:
        own(self, dataclasses.replace(actor, **keys), *given, **options)

    monkeypatch.setattr(PolicyObjective, "__init__", other)


def of_another_correction(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """Correct on the driver with some keys set otherwise."""
    own = driver.correct_on_driver
    monkeypatch.setattr(
        driver, "correct_on_driver", lambda rule, *given: own(dataclasses.replace(rule, **keys), *given)
    )


def parts_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a micro-batch is divided by their number."""
    cut, objective, count = microbatch.cut, PolicyObjective.__call__, [1]

    def counting(*given: Any, **named: Any) -> Any:
        parts = cut(*given, **named)
        count[0] = len(parts)
        return parts

    def divided(*given: Any) -> Any:
        value, metrics = objective(*given)
        return value / count[0], metrics

    monkeypatch.setattr(microbatch, "cut", counting)
    monkeypatch.setattr(PolicyObjective, "__call__", divided)


def last_part_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = microbatch.cut

    def without(*given: Any, **named: Any) -> Any:
        parts = cut(*given, **named)
        return parts[:-1] if len(parts) > 2 else parts

    monkeypatch.setattr(microbatch, "cut", without)


VALUE, GRADIENT, LOG_PROBS = "plain model: loss", "plain model: gradient", "plain model: log-probs"
BOTH = {VALUE, GRADIENT}
OWN = {f"plain model: old log-probs of the update itself: {name}" for name in ("loss", "gradient")}
CRITIC = {f"plain model: critic: {name}" for name in ("loss", "gradient")}
# fault -> configuration, how it is planted, lines of the table that must find it (docs/selfcheck.md shows this list)
FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "loss x2": ("by token", lambda m: scaled(m, 2.0), BOTH),
    "sign flipped": ("by token", lambda m: scaled(m, -1.0), BOTH),
    "N_tok counts padding": (
        "by token",
        lambda m: counted(m, lambda r, d: dataclasses.replace(d, num_tokens=r.response_mask_BR.numel())),
        BOTH,
    ),
    "N_seq x2": (
        "by row",
        lambda m: counted(m, lambda r, d: dataclasses.replace(d, num_sequences=2 * d.num_sequences)),
        BOTH,
    ),
    "N_seq counts the rows of an episode": (
        "by row",
        lambda m: counted(m, lambda r, d: dataclasses.replace(d, num_sequences=len(r))),
        BOTH,
    ),
    "mean over each row of an episode": (
        "by row",
        lambda m: m.setattr(roles, "count_episode_tokens", lambda rows: rows),
        BOTH,
    ),
    "last token left out by the driver": ("by token", lambda m: masked(m, without_last), BOTH),
    "last token left out by the engine": ("by token", engine_without_last, {*BOTH, LOG_PROBS}),
    "response mask ignored": ("by token", lambda m: masked(m, inside), BOTH),
    "temperature left out": ("by token", without_temperature, {*BOTH, LOG_PROBS}),
    "reference and old log-probs exchanged": ("by token", lambda m: objective(m, wrong_reference), BOTH),
    "positions above 300": (
        "by token",
        lambda m: packed(m, "position_ids", lambda p: torch.where(p > 300, p + 40, p)),
        {LONG + "log-probs", LONG + "gradient", LONG + "loss"},
    ),
    "sliding window one short": ("by token", narrow_window, {LONG + "log-probs", LONG + "gradient"}),
    "importance weights x1.1 on the driver": ("by row", lambda m: corrected(m, heavier), BOTH),
    "rejected tokens trained on": ("by row", rejected_kept, BOTH),
    "rows without a token left uncounted": ("by row", rejected_rows_dropped, BOTH),
    "importance weights x1.1 in the update": ("one update", lambda m: corrected(m, heavier), OWN),
    "importance weights x1.1 with two policies": ("two policies", lambda m: corrected(m, heavier), BOTH),
    "PPO clip in place of reinforce": ("two policies", never_two, BOTH),
    "rows without advantage uncounted": ("by row", zero_rows_uncounted, BOTH),
    "a row set apart that has a gradient": ("by row", first_set_apart, {GRADIENT}),
    "truncated rows trained on": ("by row", truncated_kept, BOTH),
    "no dual clip": ("by token", lambda m: of_another_actor(m, clip_ratio_c=None), BOTH),
    "far rows not skipped": ("skipped", lambda m: of_another_actor(m, ratio_skip_threshold=None), BOTH),
    "no cap on importance weights": (
        "capped",
        lambda m: of_another_correction(m, rollout_is_threshold="1e9"),
        BOTH,
    ),
    "tool text in the loss": ("by token", lambda m: rows_changed(m, lambda r: {"response_mask_T": inside(r)}), {VALUE}),
    "old log-probs of another token": (
        "by token",
        lambda m: rows_changed(m, lambda r: {"old_log_probs_T": r.old_log_probs_T.roll(1)}),
        BOTH,
    ),
    "advantages of another row": (
        "by token",
        lambda m: rows_changed(m, lambda r: {"advantages_BR": r.advantages_BR.roll(1, 0)}),
        BOTH,
    ),
    "sign of the KL": ("by token", lambda m: of_the_kl(m, lambda kl: -kl), BOTH),
    "KL x2": ("by token", lambda m: of_another_actor(m, kl_loss_coef=1.0), BOTH),
    "the KL has no gradient": ("by token", lambda m: of_the_kl(m, Tensor.detach), {GRADIENT}),
    "sign of the entropy": ("by token", lambda m: of_another_actor(m, entropy_coeff=-0.1), BOTH),
    "clip range x2": ("by token", lambda m: of_another_actor(m, clip_ratio_low=0.4, clip_ratio_high=0.4), BOTH),
    "clip bounds exchanged": ("skipped", lambda m: of_another_actor(m, clip_ratio_low=0.4, clip_ratio_high=0.2), BOTH),
    "importance weights left out of the loss": (
        "by row",
        lambda m: rows_changed(m, lambda _: {"rollout_is_weights_T": None}),
        BOTH,
    ),
    "importance weights left out by the driver": (
        "by row",
        lambda m: of_another_correction(m, rollout_is=None),
        BOTH,
    ),
    "labels of another token": (
        "by token",
        lambda m: packed(m, "targets_N", lambda targets: targets.roll(1)),
        {*BOTH, LOG_PROBS},
    ),
    "labels of another token, padded": (
        "padded",
        lambda m: packed(m, "targets_N", lambda targets: targets.roll(1), "pad"),
        {*BOTH, LOG_PROBS},
    ),
    "shared prompts a token too long": ("by token", prompts_shared_too_far, {*BOTH, LOG_PROBS}),
    "hidden states of the next token": (
        "by token",
        lambda m: packed(m, "select_N", lambda places: (places + 1).clamp(max=int(places.max()))),
        {*BOTH, LOG_PROBS},
    ),
    "positions that do not restart": (
        "by token",
        lambda m: packed(m, "position_ids", lambda ids: torch.arange(ids.numel()).view(ids.shape)),
        {*BOTH, LOG_PROBS},
    ),
    "no veto": ("vetoed", lambda m: of_another_correction(m, rollout_token_veto_threshold=None), BOTH),
    "critic's loss x2": ("critic", lambda m: scaled(m, 2.0, ValueObjective), CRITIC),
    "critic's value clip left out": ("critic", unclipped_values, CRITIC),
    "values of the state after the token": ("critic", late_values, {*CRITIC, "plain model: critic: values"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: str, prepared: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration, plant, lines = FAULTS[fault]
    check = prepared(configuration)
    plant(monkeypatch)
    found = check.failures()
    assert lines <= found, found
    if fault in ("positions above 300", "sliding window one short"):
        assert all(line.startswith(LONG) for line in found)


@pytest.mark.parametrize("configuration", ["by row", "one update", "two policies"])
def test_a_correction_that_raises_ends_the_check(
    configuration: str, prepared: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(found: Any) -> Any:
        raise RuntimeError("no correction")

    check = prepared(configuration)
    corrected(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="no correction"):
        check.failures()


def test_rope_scaling_left_out_is_found(prepared: Callable[[str], Prepared], process: ProcessInfo) -> None:
    sound = prepared("by token")
    plain = "{rope_parameters: {rope_type: default, rope_theta: 10000.0}}"
    path = sound.check.config.actor_rollout_ref.model.path
    override = f"actor_rollout_ref.model.override_config={plain}"
    other = SelfCheck(config=compose([*CONFIGS["by token"], f"actor_rollout_ref.model.path={path}", override]))
    engine = other.policy(process, sound.work, packed=True)
    found = {f.name for f in sound.lines(engine, sound.work.policy[1]) if not f.passed}
    assert LONG + "gradient" in found


# ---- cuts


def all_failures(check: SelfCheck, process: ProcessInfo, work: Work) -> set[str]:
    own = copy.deepcopy(work)  # whose gradients it lets go of
    return {finding.name for finding in check.alone(process, own)[0] if not finding.passed}


def mean_of_means(call: Any, outputs: Any, experience: Experience, denominators: Denominators) -> Any:
    """Divides by what the micro-batch holds."""
    return call(outputs, experience, denominators_of(experience, denominators.max_response_length))


def whitened_inside(call: Any, outputs: Any, experience: Experience, denominators: Denominators) -> Any:
    """Normalises advantages over the micro-batch."""
    advantages, mask = experience.advantages_BR, experience.response_mask_BR
    white = (advantages - masked_mean(advantages, mask)) / (masked_var(advantages, mask).sqrt() + 1e-6)
    return call(outputs, experience.replace(advantages_BR=white), denominators)


def one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that sees all of a packed micro-batch; the engine's own check at its start is switched off."""
    pack = packing.pack

    def other(*args: Any, **kwargs: Any) -> Any:
        inputs = pack(*args, **kwargs)
        segments = packing.Segments([inputs.input_ids.shape[1]], inputs.input_ids.device)
        return dataclasses.replace(inputs, segments=segments)

    monkeypatch.setattr("verl_like.engine.packing_check.check_packing", lambda *args: None)
    monkeypatch.setattr(packing, "pack", other)


@pytest.mark.parametrize(
    "plant",
    [
        lambda m: objective(m, mean_of_means),
        lambda m: objective(m, whitened_inside),
        one_segment,
        parts_counted,
        last_part_forgotten,
    ],
    ids=[
        "mean of means",
        "statistic of the micro-batch",
        "leaked segment",
        "divided by their number",
        "last forgotten",
    ],
)
def test_what_depends_on_the_cut_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    prepared: Callable[[str], Prepared],
    process: ProcessInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = prepared("by token")
    plant(monkeypatch)
    found = all_failures(sound.check, process, sound.work)
    assert {"micro-batches of a few rows", "micro-batches of one row"} <= found


def test_a_mean_of_means_over_ranks_is_found(
    prepared: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank divides by its own rows: one rank is right, two are not."""

    def append(self: Any, per_share: Any, rows: Experience, rules: Any) -> None:
        shares = self.balance.shares(rows, self.group.world_size)
        for minibatches, part in zip(per_share, roles.split_rows(rows, shares), strict=True):
            minibatches.append((part, denominators_of(part, rules.max_response_length)))

    sound = prepared("by token")
    main = sound.work.policy[0]
    first = sound.check.measure(sound.engine, main, main.shares[1][0])
    monkeypatch.setattr(roles.RoleHandle, "_append_minibatch", append)
    monkeypatch.setattr(check.multiprocessing, "get_context", lambda method: forks())  # test_selfcheck.py spawns them
    shares = driver.shares_of(sound.check.settings(), main.material, main.old, ranks=2)
    case = dataclasses.replace(main, shares=main.shares | {2: shares})
    findings = sound.check.in_processes(2, dataclasses.replace(sound.work, policy=[case]), first)
    failed = [finding.name for finding in findings if not finding.passed]
    assert failed == ["2 processes: rows shared out", "2 processes: gradients reduced once"]
    assert len(findings) == 3  # where the first rank has all rows, it counts all of them


@pytest.mark.parametrize(
    "settings",
    [
        [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.entropy_coeff=0.1", *FULL_KL],
        pytest.param(
            [f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.loss_agg_mode=token-sum"], marks=pytest.mark.slow
        ),
        ["actor_rollout_ref.model.lora_rank=4", *FULL_KL],
        ["actor_rollout_ref.model.use_remove_padding=False", f"{ACTOR}.sample_weight.length=True"],
        [f"{ACTOR}.ratio_skip_threshold=1.02", f"{ACTOR}.sft_loss_coef=0.1"],
    ],
    ids=["gspo", "kl_cov", "lora", "padded", "skip"],
)
def test_a_sound_trainer_passes_however_it_is_cut(
    process: ProcessInfo, tiny_model: Path, tmp_path: Path, settings: list[str]
) -> None:
    config = compose([*ROWS_ALONE, f"actor_rollout_ref.model.path={tiny_model}", *settings])
    check = SelfCheck(config=with_noise(config, tmp_path), num_rows=6)
    findings, _ = check.alone(process, check.prepare())
    assert all(finding.passed for finding in findings), table(findings)
    assert len(findings) == 10  # three lines of two mini-batches against the plain model, four cuts
    assert max(finding.difference for finding in findings) > 0  # not a comparison of a thing with itself


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3_moe", "padded rows, full logits"),
        ("lfm2", "padded rows, full logits"),
        ("stablelm", "padded rows, full logits"),
    ],
)
def test_experts_and_layers_with_state_pass(
    process: ProcessInfo, tiny_model: Path, tmp_path: Path, name: str, way: str
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    folder = zoo.folder(tmp_path, name, vocab_size=len(tokenizer), initializer_range=0.05)
    tokenizer.save_pretrained(folder)
    settings = [f"actor_rollout_ref.model.path={folder}"]
    check = SelfCheck(config=compose([*ROWS_ALONE, *settings]), num_rows=6)
    findings, _ = check.alone(process, check.prepare())
    assert way in {finding.name for finding in findings}
    assert all(finding.passed for finding in findings), table(findings)


def test_a_difference_is_named_and_fails() -> None:
    text = table([Finding(name="a", difference=1e-7), Finding(name="b", difference=0.5)])
    assert "b" in text.splitlines()[1] and "DIFFERENT" in text.splitlines()[1] and text.endswith("FAILED")
    assert not Finding(name="c", difference=float("nan")).passed
