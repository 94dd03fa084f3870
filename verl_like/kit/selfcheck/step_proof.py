"""Proof of a whole step: the one that driver, workers and mesh make, line by line beside the plain one."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.kl import FULL_KL_KIND
from verl_like.batch import PromptRow, Rollouts, Scores, pad_rows
from verl_like.config import OptimConfig, PPOConfig
from verl_like.config.errors import RunStopped
from verl_like.config.roles import REF, REWARD, needs_critic, roles_of
from verl_like.engine.optim import Schedule
from verl_like.kit.forecast.machine import available_memory
from verl_like.kit.selfcheck.driver import old_log_probs_of
from verl_like.kit.selfcheck.material import mismatch, most_sampled
from verl_like.kit.selfcheck.pictures import text_alone, with_pictures
from verl_like.kit.selfcheck.plain import PlainModel, pieces
from verl_like.kit.selfcheck.plain_adapters import unchecked_adapters, with_noise
from verl_like.kit.selfcheck.plain_step import PlainOptimizer, PlainRecord, PlainRole, PlainStep
from verl_like.kit.selfcheck.real_step import RealStep, real_steps, small
from verl_like.kit.selfcheck.report import Finding, table
from verl_like.kit.selfcheck.work import comparable, longest_row, unchecked_routers, with_first_layers
from verl_like.models.families import sees, state_of
from verl_like.models.loading import load_hf_config, load_tokenizer

_BYTES = 64  # of a weight: the plain step's float64 with moments and copies, the run's float32 and what is gathered
logger = logging.getLogger(__name__)

_NO_GRADIENT = 1e-8  # norm
_SHOWN = 1000  # steps of a schedule, where the run's length is not known or more
_STEPS = 2  # in the second the policy is no longer its reference
_ADAPTED = 5e-2  # of Adam's steps where adapters are added in, which mix what is gradient and what is rounding
_OWN_FLOAT32 = 10  # times the limits: layers with state compute in float32 by themselves, in the plain model too
_NEAR, _SCALED, _CHANGED = 2e-4, 2e-4, 5e-3  # of log-probs and values; of what is whitened or summed; of Adam's steps


def prove_step(config: PPOConfig, *, ranks: int) -> tuple[list[Finding], list[str]]:
    """Compare two steps line by line in their own order; return the lines, and what to say about them.

    LoRA begins with adapters of noise. The first line that differs names the place. Memory: about _BYTES a weight.
    """
    hf_config = load_hf_config(config.actor_rollout_ref.model)
    rates = [*schedules(config)]
    config, notes = with_first_layers(config, _BYTES, available_memory())
    notes += ["not checked: algorithm.use_pf_ppo, which is off in the proof"] if config.algorithm.use_pf_ppo else []
    replay = config.actor_rollout_ref.actor.router_replay.mode
    notes += [f"not checked: router_replay.mode={replay}, which is off in the proof"] if replay != "disabled" else []
    notes += [*unchecked_routers(config), *unchecked_adapters(config.actor_rollout_ref.model)]
    with tempfile.TemporaryDirectory() as folder:
        config = comparable(with_noise(config, Path(folder) / "adapters"))
        found, notes = _proved(small(config, ranks_of_proof(config, ranks), folder), notes)
    if state_of(hf_config):
        found = [dataclasses.replace(each, limit=_OWN_FLOAT32 * each.limit) for each in found]
    return [*rates, *found], notes


def prove_at_start(config: PPOConfig, ranks: int, file: Path) -> None:
    """Make the proof at the start of a run (trainer.prove_step) and write its table.

    Raises RunStopped, naming the first line that differs.
    """
    findings, notes = prove_step(config, ranks=ranks)
    text = "\n".join([*notes, table(findings)])
    file.write_text(text + "\n", encoding="utf-8")
    logger.info("%s\n%s", file, text)
    wrong = [each for each in findings if not each.passed]
    if wrong:
        raise RunStopped(
            f"trainer.prove_step=True: {wrong[0].name} differs from a plain step by {wrong[0].difference:.1e} (limit "
            f"{wrong[0].limit:.0e}), the first of {len(wrong)} such lines: see {file} and docs/selfcheck.md"
        )


def _proved(config: PPOConfig, notes: list[str]) -> tuple[list[Finding], list[str]]:
    vocabulary = len(load_tokenizer(config.data.tokenizer or config.actor_rollout_ref.model.path))
    plain, found = plain_step(config, vocabulary), list[Finding]()
    with ExitStack() as resting:
        for role in plain.trained.values():
            resting.enter_context(role.model.resting(str(config.trainer.log_dir)))
        steps = real_steps(config, plain.rollouts, plain.scores, count=_STEPS)
    for number, real in enumerate(steps):
        record, prefix = plain.run(), f"step {number + 1}: "
        mask_BR = plain.rollouts.response_mask_BR
        found += [dataclasses.replace(each, name=prefix + each.name) for each in compared(record, real, mask_BR)]
        for name, role in plain.trained.items():
            role.take(real.weights[name])
        if still := [name for name in record.minibatches if _without_gradient(record, name)]:
            notes = [
                *notes,
                f"not checked: {still[0]}'s updates from step {number + 1} on: a mini-batch has no gradient",
            ]
            break
    return found, [*notes, *dict.fromkeys(plain.notes)]


def ranks_of_proof(config: PPOConfig, ranks: int) -> int:
    """Count the ranks of a proof: at least so many, and as the mesh of every role needs.

    Raises ValueError, naming the keys, where no number is.
    """
    roles = [role for name, role in roles_of(config).items() if name != REWARD]  # the proof has rewards of its own
    together = math.lcm(*(role.mesh(1).together for role in roles))
    first = math.ceil(ranks / together) * together
    copies = math.lcm(*(role.fsdp.fsdp_size for role in roles if role.fsdp.fsdp_size > 0), together)
    last = math.ceil(first / copies) * copies  # what does not divide here never does
    for number in range(first, last + 1, together):
        problems = list[str]()
        for role in roles:
            role.data_parallel(problems, number, f"{number} in the proof of a step")
        if not problems:
            return number
    more = f"no number of ranks from {first} on has such a mesh: prove the step on fewer (--ranks), or set other sizes"
    raise ValueError("\n".join([*problems, more]))


def plain_step(config: PPOConfig, vocab_size: int) -> PlainStep:
    """The plain step of a configuration of `real_step.small`, before anything is computed."""
    policy, critic, total = config.actor_rollout_ref, config.critic, config.trainer.total_training_steps or 1
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def model(of: Any, **options: Any) -> PlainModel:
        shared = {"vocab_size": vocab_size, "seed": config.trainer.seed, "device": device, "dtype": torch.float64}
        return PlainModel(of, temperature=policy.rollout.temperature, **shared, **options)

    roles = roles_of(config)
    algorithm = config.algorithm
    in_loss = policy.actor.use_kl_loss and policy.actor.kl_loss_type == FULL_KL_KIND
    full_kl = in_loss or (algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL_KIND)
    reference = None
    frozen = policy.actor.freeze_vision_tower
    actor = model(policy.model, reference_scale=1.0 if full_kl else None, frozen_tower=frozen)
    if REF in roles:
        reference = model(dataclasses.replace(roles[REF].model, lora_rank=0, lora_adapter_path=None))
    rollouts, scores, left_out = frozen_rollouts(config, vocab_size)
    step = PlainStep(
        config=config,
        rollouts=rollouts,
        scores=scores,
        actor=PlainRole(actor, policy.actor.optim, policy.actor.grad_clip, total),
        critic=PlainRole(model(critic.model, critic=True), critic.optim, critic.grad_clip, total)
        if needs_critic(critic, config.algorithm)
        else None,
        reference=reference,
        notes=left_out,
    )
    step.evaluate()
    log_probs_BR = step.columns["old_log_probs"]
    noise_BR = mismatch(log_probs_BR.shape, torch.Generator().manual_seed(1))
    sampled_BR = ((log_probs_BR + noise_BR) * rollouts.response_mask_BR).float()
    if old_log_probs_of(config) != "sampler" and len(sampled_BR) > 4:
        sampled_BR[4, 0] = float("nan")  # a log-prob that the sampler did not tell
    step.rollouts = rollouts.replace(rollout_log_probs_BR=sampled_BR)
    return step


def frozen_rollouts(config: PPOConfig, vocab_size: int) -> tuple[Rollouts, Scores, list[str]]:
    """Rows of every prompt of a batch, of the lengths that data.* allows, with what a step has to treat in its own way.

    Text that was not sampled, cut-off responses, responses that begin alike, a row without a reward, ties, images where
    the model sees, and one row as long as the run's. With them what has no row.
    """
    hf_config = load_hf_config(config.actor_rollout_ref.model)
    n, prompts = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    generator, most = torch.Generator().manual_seed(7), config.data
    longest = min(most.max_prompt_length + most.max_response_length, longest_row(hf_config)[0])
    long_response = max(1, min(most.max_response_length, longest - 2))

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(min(low, high), high + 1, (prompts * n,), generator=generator).tolist()

    def tokens(size: int) -> list[int]:
        drawn = torch.randint(vocab_size, (size,), generator=generator).tolist()
        return text_alone(hf_config, drawn, vocab_size) if sees(hf_config) else drawn

    of_prompt = [tokens(size) for size in lengths(2, min(11, most.max_prompt_length))[:prompts]]
    of_prompt[0] = tokens(max(1, min(most.max_prompt_length, longest - long_response)))
    media, left_out = None, ""
    if sees(hf_config):
        folder, model = Path(str(config.trainer.log_dir)), config.actor_rollout_ref.model
        of_prompt, media, left_out = with_pictures(model, hf_config, of_prompt, most.max_prompt_length, folder)
    of_long, of_short = most_sampled(vocab_size)
    responses = lengths(3, min(of_short, most.max_response_length))
    responses[0] = long_response
    rows = range(prompts * n)
    texts = _as_trees([tokens(size) for size in responses], n)
    response_ids_BR = pad_rows(texts, side="right", dtype=torch.int32)
    length_B = torch.tensor(responses)
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < length_B[:, None]
    mask_BR[::3, 1:3] = False
    mask_BR[0, 1 : max(1, long_response - of_long)] = False
    sampled_B = (length_B - 1).clamp(min=1)  # every third row ends in a token that was not
    mask_BR[1::3] &= torch.arange(mask_BR.shape[1])[None, :] < sampled_B[1::3, None]
    number = torch.rand(len(rows), generator=generator)  # as scores: a 0 would hide where it lies
    score_B, valid_B = _drawn_scores(config, number)
    starts_BR = mask_BR & ~mask_BR.roll(1, dims=1).index_fill(1, torch.tensor([0]), False)
    step_BR = (starts_BR.cumsum(dim=1) - 1).masked_fill(~mask_BR, -1).int()  # a turn is a run of sampled tokens
    episode_B = torch.arange(len(rows))
    if (
        n > 3 and not config.algorithm.estimator.turns
    ):  # the third and fourth row are one episode, whose history was rewritten
        episode_B[3], score_B[3] = 2, score_B[2]
    keys = {*config.algorithm.gdpo_reward_keys, config.algorithm.filter_groups.metric} - {"score", None}
    chosen, column = config.reward_model.overlong_buffer.only_key, config.algorithm.agent_reward_norm.grouping
    hard = config.actor_rollout_ref.actor.sample_weight.difficulty_key

    def given(row: int, episode: int) -> PromptRow:
        info = {column: episode // 2 % 2, hard: number[episode].item()}
        return PromptRow(index=row // n, data_source=f"selfcheck {row // n % 2}", messages=[], extra_info=info)

    def returned(episode: int) -> dict[str, float]:
        return {str(key): number[episode].item() for key in keys} | {str(chosen): float(episode % 3 > 0)}

    rollouts = Rollouts(
        prompt_ids_BP=pad_rows([of_prompt[row // n] for row in rows], side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(of_prompt[row // n]) for row in rows]),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=mask_BR,
        media=None if media is None else [media[row // n] for row in rows],
        group_B=torch.arange(len(rows)) // n,
        episode_B=episode_B,
        step_BR=step_BR if config.algorithm.estimator.turns else None,
        anchor_BR=step_BR.long() if config.algorithm.estimator.turns else None,
        weight_version_BR=torch.zeros_like(response_ids_BR),
        finish_reasons=["length" if row % 6 == 1 or row == 3 else "stop" for row in rows],
        rows=[given(row, episode) for row, episode in zip(rows, episode_B.tolist(), strict=True)],
    )
    scores = Scores(
        score_B=score_B,
        valid_B=valid_B,
        extras=[returned(episode) for episode in episode_B.tolist()],
        failures=[None] * len(rows),
        baseline_B=torch.rand(prompts, generator=generator).repeat_interleave(n),
    )
    return rollouts, scores, [left_out] if left_out else []


def _drawn_scores(config: PPOConfig, number_B: Tensor) -> tuple[Tensor, Tensor]:
    """Make scores of drawn numbers, and which of them are valid: with signal and without, and groups that failed."""
    n = config.actor_rollout_ref.rollout.n
    score_B, valid_B = number_B.clone(), torch.ones(len(number_B), dtype=torch.bool)
    score_B[2::4] *= 1 if config.algorithm.adv_estimator == "maxrl" else -1  # that takes none below 0
    score_B[: min(n, 2)] = torch.tensor([1.0, 0.0])[: min(n, 2)]  # a group with a signal, whatever was drawn
    score_B[n : 2 * n] = score_B[n] if n > 1 else score_B[n : 2 * n]  # and one without
    valid_B[-1] = len(number_B) < 4
    if _ends_short(config):  # the last group failed as a whole, and one row of another
        valid_B[-n:] = valid_B[2 * n - 1] = False
        score_B[2 * n : 2 * n + 2] = torch.tensor([1.0, 0.0])
    return score_B, valid_B


def _as_trees(texts: list[list[int]], n: int) -> list[list[int]]:
    """Let the responses to a prompt begin alike: the second as the first, and all others as the second, a token longer.

    So three and more go on from one token, each in its own way.
    """
    for row in range(len(texts)):
        if row % n:
            common = min(1 + min(row % n, 2), len(texts[row - 1]), len(texts[row]))
            texts[row][:common] = texts[row - 1][:common]
    return texts


def _ends_short(config: PPOConfig) -> bool:
    """True where a failed group leaves the last mini-batch incomplete, and not by chance without any signal."""
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n
    shuffled = actor.shuffle or (needs_critic(critic, config.algorithm) and critic.shuffle)
    return n > 1 and not shuffled and actor.ppo_mini_batch_size < config.data.train_batch_size


def compared(plain: PlainRecord, real: RealStep, mask_BR: Tensor) -> Iterator[Finding]:
    """Lines of one step in its own order. mask_BR: tokens that the policy sampled."""
    known, made = real.evaluated, real.experience
    for name, found_BR in (
        ("old_log_probs", known.old_log_probs_BR),
        ("entropy", known.entropy_BR),
        ("ref_log_probs", known.ref_log_probs_BR),
        ("full_kl", known.full_kl_BR),
        ("sum_pi_squared", known.sum_pi_squared_BR),
        ("values", known.values_BR),
    ):
        if found_BR is not None and name in plain.columns:
            expected_BR = plain.used_log_probs_BR if name == "old_log_probs" else plain.columns[name]
            size = max(1.0, float(expected_BR.abs().max())) if name == "entropy" else 1.0  # a sum over the vocabulary
            yield Finding(name=_words(name), difference=_gap(found_BR, expected_BR, mask_BR) / size, limit=_NEAR)
    if plain.kl is not None:
        yield Finding(name="mean KL of responses", difference=abs(real.mean_kl - plain.kl[0]), limit=_NEAR)
    same = len(made) == len(plain.kept)
    yield Finding(name="rows that are trained on", difference=0.0 if same else math.inf)
    columns = {"rewards": made.rewards_BR, "advantages": made.advantages_BR, "returns": made.returns_BR}
    for name, found_BR in columns.items():
        if same and found_BR is not None:
            expected_BR = plain.columns[name][plain.kept, : found_BR.shape[1]]
            scale = max(1.0, float(expected_BR.abs().max()))
            inside_BR = mask_BR[plain.kept, : found_BR.shape[1]] if name == "rewards" else made.response_mask_BR
            yield Finding(name=name, difference=_gap(found_BR, expected_BR, inside_BR) / scale, limit=_SCALED)
    for role in plain.minibatches:
        if _without_gradient(plain, role):
            continue
        yield from _update(role, plain, real)
    if plain.kl is not None:
        gap = abs(real.kl_coef - plain.kl[1]) / max(plain.kl[1], 1e-12)
        yield Finding(name="KL coefficient of the next step", difference=gap, limit=_SCALED)


def _without_gradient(plain: PlainRecord, role: str) -> bool:
    """True where a mini-batch's gradient is 0 but for rounding, of which Adam would make whole steps."""
    return any(each.norm < _NO_GRADIENT for each in plain.minibatches[role])


def _update(role: str, plain: PlainRecord, real: RealStep) -> Iterator[Finding]:
    """Lines of one role's update: each optimizer step, then the change of every weight."""
    steps, expected = real.minibatches[role], plain.minibatches[role]
    same = len(steps) == len(expected)
    yield Finding(name=f"{role}: optimizer steps", difference=0.0 if same else math.inf)
    for number, (found, one) in enumerate(zip(steps, expected, strict=False)):
        counted = real.denominators[role][number] == {one.denominators}
        name = f"{role}: mini-batch {number + 1}: denominators"
        yield Finding(name=name, difference=0.0 if counted else math.inf)
        values = one.terms | {"grad_norm": one.norm, "lr": one.rate}
        for metric, value in values.items():
            scale = max(one.scale, abs(value)) if metric in one.terms else abs(value)
            gap = abs(found[metric].value - value) / max(scale, 1e-12)
            name = f"{role}: mini-batch {number + 1}: {_words(metric)}"
            yield Finding(name=name, difference=gap, limit=_SCALED)
    before, after, weights = plain.before[role], plain.after[role], real.weights[role]
    absent = sorted((before.keys() - weights.keys()) | (weights.keys() - plain.names[role]))
    worst, where = (math.inf, absent[0]) if absent else (0.0, "")
    for weight in before.keys() & weights.keys():
        gap = _change(before[weight], after[weight], weights[weight], plain.seen[role].get(weight))
        worst, where = max((worst, where), (gap, weight))
    limit = _CHANGED if plain.seen[role] else _ADAPTED
    yield Finding(name=f"{role}: change of every weight (most: {where})", difference=worst, limit=limit)


def _change(before: Tensor, after: Tensor, found: Tensor, size: Tensor | None) -> float:
    """Difference of two changes of a weight, by the plain one's size; `size`: where its gradient was no rounding."""
    seen = torch.ones_like(before, dtype=torch.bool) if size is None else size
    if found.shape != before.shape:
        return math.inf
    gap = whole = 0.0
    for was, is_now, theirs, counted in pieces(before, after, found.to(before), seen):
        expected = (is_now - was)[counted].double()
        gap += float(((theirs - was)[counted].double() - expected).square().sum())
        whole += float(expected.square().sum())
    return math.sqrt(gap) / max(math.sqrt(whole), 1e-12)


def schedules(config: PPOConfig) -> Iterator[Finding]:
    """Compare the learning rate of every training step: of what a role is built with, and of its keys."""
    total = config.trainer.total_training_steps or _SHOWN
    sections: dict[str, OptimConfig] = {"actor": config.actor_rollout_ref.actor.optim, "critic": config.critic.optim}
    for name, role in roles_of(config).items():
        if role.optim is None:
            continue
        schedule, optim = Schedule(role.optim, total), sections[name]
        plain = PlainOptimizer(optim=optim, clip=1.0, total_steps=total, weights={})
        worst = 0.0
        for step in range(min(total, _SHOWN)):
            schedule.steps_done = plain.steps_done = step
            worst = max(worst, abs(schedule.rate() - plain.rate()) / max(optim.lr, 1e-12))
        yield Finding(name=f"{name}: learning rate of every step", difference=worst, limit=1e-9)


def _gap(found: Tensor, expected: Tensor, mask: Tensor) -> float:
    """Largest difference inside the mask; infinite for a number that is not finite."""
    gap = (found.double() - expected.double())[mask]
    return math.inf if not gap.isfinite().all() else float(gap.abs().max()) if len(gap) else 0.0


def _words(name: str) -> str:
    return {
        "grad_norm": "gradient norm",
        "lr": "learning rate",
        "pg_loss": "policy loss",
        "kl_loss": "KL loss",
        "vf_loss": "value loss",
    }.get(name, name.replace("_", " ").replace("log probs", "log-probs"))
