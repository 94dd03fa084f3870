"""Whole GRPO steps of the real trainer on a fixed shape: time of each phase against its floor.

    verl-like bench grpo --model cpu --workload cpu --ranks 2
    verl-like bench rollout --model 1.5b --workload w1 --json rollout.json
    verl-like bench grpo --model 1.5b --workload w1 --rollout rollout.json --json new.json --compare old.json

The run is an ordinary one (same loop, workers, rollout engine, weight sync and proof); only its inputs are made up: a
model with random weights, random prompts, and response lengths that are drawn and forced where the workload says so.
Below the table stand the project's own targets (bars) with what was reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_like.batch import Prompt, Rollouts
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.episodes.collector import Collector
from verl_like.episodes.episode import Ask, Episode, Turn
from verl_like.episodes.pending_scores import PendingBatch
from verl_like.kit.bench import phase
from verl_like.kit.bench.bars import bars_of
from verl_like.kit.bench.inputs import write_inputs
from verl_like.kit.bench.phase import POLICY
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, BenchError, Workload
from verl_like.kit.speed.report import SpeedReport
from verl_like.models.cost import BACKWARD
from verl_like.observe.logs import setup_driver_logging
from verl_like.observe.run_folder import read_metrics
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams
from verl_like.trainer.build import prepared, started
from verl_like.trainer.compose import compose
from verl_like.trainer.facts import resolve_world
from verl_like.trainer.folders import log_dir
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.workers import Launcher


class ForcedLengths:
    """An EpisodeRunner whose responses have exactly the lengths that `lengths(step)` gives: no end token ends them.

    Rows of a step are in the order prompts x n; a step draws `prompts` prompts, each once.
    """

    def __init__(
        self, sampling: SamplingParams, lengths: Callable[[int], Sequence[int]], *, prompts: int, n: int
    ) -> None:
        self.sampling = dataclasses.replace(sampling, stop_token_ids=(), stop=())
        self.lengths, self.prompts, self.n = lengths, prompts, n

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        return Episode(turns=(Turn.of(prompt.ids, await self.response(prompt, sample, ask)),))

    async def response(self, prompt: Prompt, sample: int, ask: Ask) -> Completion:
        """Sample as many tokens as this row of the step must have."""
        step, row = self.place(prompt, sample)
        return await ask(prompt.ids, dataclasses.replace(self.sampling, max_tokens=self.lengths(step)[row]))

    def place(self, prompt: Prompt, sample: int) -> tuple[int, int]:
        """The step, from 1, and the row in it."""
        return prompt.group // self.prompts + 1, prompt.group % self.prompts * self.n + sample


class Replayed(ForcedLengths):
    """Samples as many tokens as the recording holds, then gives the recorded ones: same work, same numbers.

    recording[step - 1]: one list of response tokens per row.
    """

    def __init__(
        self, sampling: SamplingParams, recording: Sequence[Sequence[Sequence[int]]], *, prompts: int, n: int
    ) -> None:
        super().__init__(sampling, lambda step: [len(ids) for ids in recording[step - 1]], prompts=prompts, n=n)
        self.recording = recording

    async def response(self, prompt: Prompt, sample: int, ask: Ask) -> Completion:
        """Recorded tokens, with the log-probs of those that were sampled."""
        done, (step, row) = await super().response(prompt, sample, ask), self.place(prompt, sample)
        drawn = done.sampled
        recorded = Sampled.of(self.recording[step - 1][row], drawn.log_probs.tolist(), drawn.weight_versions.tolist())
        return dataclasses.replace(done, sampled=recorded)


class ReplayCollector(Collector):
    """Batches of recorded tokens: they have no log-probs of the engine."""

    def next_batch(self, step: int) -> tuple[Rollouts, PendingBatch]:
        rollouts, pending = super().next_batch(step)
        return rollouts.replace(rollout_log_probs_T=None), pending


PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


def main(arguments: argparse.Namespace) -> Report:
    """Make the inputs, run the steps, print the table; returns what --json writes."""
    workload = WORKLOADS[arguments.workload]
    num_steps = arguments.warmup + arguments.steps
    folder = arguments.out / f"{arguments.model}_{arguments.workload}"
    try:
        config = compose(overrides(folder, workload, arguments, num_steps))
    except ConfigError as error:
        raise BenchError(str(error)) from error
    num_ranks = resolve_world(config)[1]
    work = work_of(arguments, workload, num_ranks)
    check_comparable("grpo", work, arguments.compare)
    alone = generation_alone(arguments.rollout, work)
    try:
        recording = json.loads(arguments.replay.read_text()) if arguments.replay else None
    except (OSError, ValueError) as error:
        raise BenchError(f"--replay {arguments.replay}: {error}") from error
    write_inputs(folder, MODELS[arguments.model], workload, num_steps=num_steps)
    peak, num_parameters = run(config, workload, recording)
    steps = list(read_metrics(log_dir(config) / "metrics.jsonl").values())
    report = summary(steps[arguments.warmup :], peak, num_parameters, work, alone)
    return finish(report, arguments.json, arguments.compare)


def work_of(arguments: argparse.Namespace, workload: Workload, num_ranks: int) -> dict[str, Any]:
    """Describe the work of the run: reports are comparable where it is equal."""
    return {
        "model": asdict(MODELS[arguments.model]),
        "workload": asdict(workload),
        "ranks": num_ranks,
        "replay": arguments.replay is not None,
        "log_prob_pass": arguments.log_prob_pass,
        "overrides": sorted(arguments.overrides),
    }


def generation_alone(path: Path | None, work: Mapping[str, Any]) -> float | None:
    """Seconds of the generation that `bench rollout` measured. Raises BenchError for another model, workload or rank
    count."""
    if path is None:
        return None
    report = Report.load(path)
    mine = json.loads(json.dumps({"bench": "rollout"} | {key: work[key] for key in ("model", "workload", "ranks")}))
    theirs = {"bench": report.bench} | report.work
    different = [f"{key} is {theirs.get(key)!r}, not {mine[key]!r}" for key in mine if theirs.get(key) != mine[key]]
    if different:
        raise BenchError(f"--rollout {path} is not `bench rollout` of this work: {'; '.join(different)}")
    return report.rows[0].seconds


def overrides(folder: Path, workload: Workload, arguments: argparse.Namespace, num_steps: int) -> list[str]:
    """The command line of the run; what the user adds comes last and wins."""
    values: dict[str, Any] = {
        "data.tokenizer": folder / "tokenizer",
        "data.shuffle": False,
        "custom_reward_function.path": folder / "reward.py",
        f"{POLICY}.actor.old_log_probs": "recompute" if arguments.log_prob_pass else "auto",
        "trainer.default_local_dir": folder / "run",
        "trainer.resume_mode": "disable",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": num_steps,
    }
    own = [f"{key}={value}" for key, value in values.items()]
    common = phase.overrides(folder, workload, arguments.ranks) + phase.model_keys(arguments.model)
    return common + own + arguments.overrides


def run(
    config: PPOConfig, workload: Workload, recording: Sequence[Sequence[Sequence[int]]] | None
) -> tuple[dict[str, float], int]:
    """All steps; returns the device peak as the run measured it, and the number of weights."""
    folder = log_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    setup_driver_logging(folder)
    with prepared(config) as ready, Launcher(config) as launcher, started(ready, launcher) as trainer:
        assert isinstance(trainer, PPOTrainer)
        choose_source(trainer, workload, recording)
        trainer.fit()
        assert isinstance(trainer.report.speed, SpeedReport)
        shape = trainer.report.speed.shape
        return asdict(shape.peak), shape.actor.all_weights


def choose_source(trainer: PPOTrainer, workload: Workload, recording: Sequence[Sequence[Sequence[int]]] | None) -> None:
    """Exchange what the trainer's responses are by a recording or by forced lengths, where asked."""
    source = trainer.source
    how, sizes = source.how, {"prompts": trainer.config.data.train_batch_size, "n": source.how.n}
    if recording is not None:
        how = dataclasses.replace(how, runner=Replayed(how.sampling, recording, **sizes))
        trainer.source = ReplayCollector(source.loader, source.rewards, source.replicas, how, source.config)
        source.close()
    elif workload.mean_response is not None:
        source.how = dataclasses.replace(how, runner=ForcedLengths(how.sampling, workload.draw_lengths, **sizes))


def summary(
    steps: Sequence[Mapping[str, Any]],
    peak: dict[str, Any],
    num_parameters: int,
    work: dict[str, Any],
    generation: float | None,
) -> Report:
    """Medians over the measured steps, with the floors that the field quotes. generation: seconds of it alone."""
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    tokens, step = median["perf/total_num_tokens"], median["timing_s/step"]
    rows = [phase_row(name, median) for name in PHASES if f"timing_s/{name}" in median]
    work_left = 8.0 * num_parameters * tokens / (0.4 * peak["flops"])
    own_generation = median["timing_s/gen"]
    figures = {
        "tokens": tokens,
        "tokens_per_second": tokens / step,
        "response_length_mean": median["response_length/mean"],
        "mfu_update": median["perf/mfu/actor"],
        "update_to_gemm_floor": median["timing_s/update_actor"]
        / (2.0 * (1 + BACKWARD) * num_parameters * tokens / peak["flops"]),
        "generation_alone_seconds": generation,
        "step_to_target": step / ((own_generation if generation is None else generation) + work_left),
        "sync_seconds": median["timing_s/update_weights"],
        "groups_without_signal": median.get("critic/group_zero_std_fraction"),
        "step_seconds_each": [step["timing_s/step"] for step in steps],
        "losses": [step["actor/pg_loss"] for step in steps],
        "grad_norms": [step["actor/grad_norm"] for step in steps],
        "micro_batches": median.get("perf/micro_batches"),
        "micro_batch_fill": median.get("perf/micro_batch_fill"),
        "peak": peak,
        "parameters": num_parameters,
        "steps": len(steps),
    }
    rows.append(Row(name="step", seconds=step, figures={"tokens/s": tokens / step}))
    report = Report(bench="grpo", work=work, rows=rows, figures=figures, notes=notes_of(figures))
    report.notes.extend(bars_of(report))
    return report


def phase_row(name: str, median: Mapping[str, float]) -> Row:
    """A phase's seconds, and the floor behind the trainer's own ratio."""
    seconds, ratio = median[f"timing_s/{name}"], median.get(f"perf/floor_ratio/{name}")
    return Row(name=name, seconds=seconds, floor_seconds=seconds / ratio if ratio else None)


def notes_of(figures: Mapping[str, Any]) -> list[str]:
    """Write the figures that the table does not show as sentences."""
    peak, alone = figures["peak"], figures["generation_alone_seconds"]
    generation = "of the step itself" if alone is None else f"{alone:.2f} s, measured alone"
    return [
        f"Medians of {figures['steps']} steps; {figures['tokens']:,.0f} trained tokens a step (every floor counts all "
        f"of them), responses of {figures['response_length_mean']:.1f} on average.",
        f"Update: {figures['update_to_gemm_floor']:.2f} x the time of 6 x parameters x tokens at the peak, "
        f"MFU {figures['mfu_update']:.3f} (prompts that rows share counted once).",
        f"Step: {figures['step_to_target']:.2f} x (generation + 8 x parameters x tokens at 40% of the peak); "
        f"generation: {generation}.",
        f"Peak ({peak['source']}): {peak['flops'] / 1e9:,.0f} GFLOP/s, {peak['bandwidth'] / 1e9:,.1f} GB/s; "
        f"{figures['parameters']:,} parameters.",
    ]
