"""Dry run: everything that can be known before workers exist, checked and told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from verl_like.config import PPOConfig, RolloutConfig
from verl_like.config.errors import input_errors
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.data.prompt_truth import own_text
from verl_like.remote_storage import is_remote
from verl_like.trainer.build import prepare
from verl_like.trainer.facts import Facts
from verl_like.trainer.folders import with_free_folder
from verl_like.trainer.resume import find_resume, of_verl, processes_text
from verl_like.trainer.reward_check import grade_sample, table
from verl_like.trainer.start_checks import early_problems

logger = logging.getLogger(__name__)


def dry_run(config: PPOConfig) -> list[tuple[str, str]]:
    """Describe the run that this configuration would be, as (name, text). Writes no file.

    The graders run as in the run itself, in their killable processes, and grade a sample of reference answers. Raises
    ConfigError for what is wrong with the run.
    """
    with ExitStack() as stack, input_errors():
        if not (told := early_problems(config)):
            config = with_free_folder(config)
        ready = prepare(config, stack, told)
        remote = str(config.trainer.resume_mode) == "resume_path" and is_remote(config.trainer.resume_from_path)
        later = "which verl wrote" if of_verl(config.trainer) else "which a run fetches first" if remote else ""
        resume = None if later else find_resume(config)
        rows = list(_rows(config, ready))
        if ready.plan.samples:
            rows.append(("rewards", _graded(config, ready)))
    begin = "a fresh start" if resume is None else f"resumes from {resume}"
    if later:
        begin = f"takes up {config.trainer.resume_from_path}, {later}"
    if resume is not None and (other := processes_text(resume, ready.plan.pools[0].world_size)):
        begin += f"; {other}"
    return [*rows, ("beginning", f"{begin}; output in {config.trainer.default_local_dir}")]


def _rows(config: PPOConfig, ready: Facts) -> Iterator[tuple[str, str]]:
    policy, costs = config.actor_rollout_ref, ready.costs
    yield "processes", f"{ready.plan.world_size} on {ready.device}, started by {config.trainer.launcher}"
    name = (ready.hf_config.architectures or [ready.hf_config.model_type])[0]
    yield "model", f"{policy.model.path}: {name}, {_count(costs.actor.all_weights)} weights"
    if costs.critic is not None:
        yield "critic", f"{config.critic.model.path}: {_count(costs.critic.all_weights)} weights"
    if ready.plan.samples:
        yield "rollout", f"{policy.rollout.name}, up to {ready.max_model_len:,} tokens a sequence"
        yield "end tokens", end_tokens_text(policy.rollout, ready)
    yield "training data", _data(ready, ready.train)
    if ready.val is not None:
        yield "validation", _data(ready, ready.val)
    yield "batches", "\n".join(line.strip() for line in ready.plan.table().splitlines()[1:])
    yield "memory", ready.memory.text()


def end_tokens_text(rollout: RolloutConfig, inputs: Facts) -> str:
    """List the tokens and texts that end a response: the model's end tokens, unless ignored, and the run's own."""
    ids = dict.fromkeys([*(() if rollout.ignore_eos else inputs.eos_ids), *rollout.stop_token_ids])
    told = (f"{i} {inputs.tokenizer.decode([i], skip_special_tokens=False)!r}" for i in ids)
    return ", ".join([*told, *map(repr, rollout.stop)]) or "none (rollout.ignore_eos=True)"


def _data(inputs: Facts, dataset: Dataset) -> str:
    sources = ", ".join(f"{source} {count:,}" for source, count in Counter(dataset.domains()).most_common(8))
    text = f"{len(dataset):,} rows ({sources})"
    if isinstance(dataset, PromptDataset):
        text += f" of {', '.join(str(file.path) for file in dataset.files)}"
    ids, _ = dataset[0]
    what = "prompt" if inputs.plan.samples else "row"
    text += f"\nthe first {what} has {len(ids):,} tokens: {inputs.tokenizer.decode(ids)[-200:]!r}"
    adds = own_text(dataset.encoder) if isinstance(dataset, PromptDataset) else ""
    return f"{text}\nthe chat template adds where there is no system message: {adds!r}" if adds else text


def _graded(config: PPOConfig, ready: Facts) -> str:
    """Grade a sample of the rows: their reference answers against a wrong one."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not ready.rewards.rule_grades:
        return "given by the reward model alone"
    if config.env.train.tags or (turns.enable and turns.environment_path is not None):
        return "given by the environment"
    return table(grade_sample(ready.train, ready.rewards, ready.tokenizer))


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return str(number)
