"""Time to an accuracy: GRPO, distillation and supervised training from one start, on the quickstart's sums.

    verl-like bench learn --seeds 1 2 3 --json learn.json

Each seed has data and a warm start of its own, as `verl-like quickstart` prepares them. GRPO trains to its end, and
that model is the teacher (--teacher FOLDER: that of this seed's quickstart; GRPO then ends at the target). The target
is a share of its greedy accuracy on sums that nobody was trained on. Distillation on policy, supervised training on the
right answers, and a control begin with the same warm start and end at the target. The control's teacher judges every
response as the answer to another row's question.

All run in this process, with the quickstart's keys; steps are timed alone, by the clock and in seconds of CPU of all
threads. Starting, saving and testing are left out.
"""

from __future__ import annotations

import argparse
import re
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.batch import Evaluated, Rollouts
from verl_like.checkpoint.layout import step_dir
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.verbs.quickstart import script
from verl_like.trainer.compose import compose
from verl_like.trainer.library import build

_BAR = 0.5  # of GRPO's seconds, at most
_QUIET = ["trainer.logger=[]", "trainer.report_freq=-1", "trainer.rollout_data_dir=null", "trainer.save_freq=-1"]
_QUIET += ["trainer.validation_data_dir=null", "trainer.val_before_train=False", "trainer.test_freq=-1"]
_LOCAL = ["trainer.launcher=local", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "data.val_files=null"]
_SFT = ["trainer.objective=sft", "data.messages_key=null", "sft.response_key=reward_model", "sft.max_length=16"]
_SFT += ["sft.response_dict_keys=[ground_truth]", "actor_rollout_ref.rollout.name=recorded"]
_LOSS = "distillation.distillation_loss"
_TAUGHT = ["distillation.enabled=True", f"{_LOSS}.use_task_rewards=False", f"{_LOSS}.loss_mode=forward_kl_topk"]
_TAUGHT += [f"{_LOSS}.topk=8"]


Point = dict[str, float]  # step, what it has cost up to there, and the accuracy


def shuffle(teachers: Any) -> None:
    """Show teachers the prompts of other rows, the next one's each."""
    evaluate = teachers.evaluate

    def of_others(rollouts: Rollouts) -> Evaluated:
        prompts = [torch.tensor(ids, dtype=torch.int32) for ids in rollouts.prompt_lists()]
        prompts = [*prompts[1:], prompts[0]]
        lengths_B = torch.tensor([len(ids) for ids in prompts])
        return evaluate(rollouts.replace(prompt_ids_T=torch.cat(prompts), prompt_length_B=lengths_B))

    teachers.evaluate = of_others


def main(arguments: argparse.Namespace) -> Report:
    """Run all methods for each seed, and compare. Returns the report, which is printed."""
    work = {name: vars(arguments)[name] for name in ("seeds", "steps", "every", "share", "overrides")}
    check_comparable("learn", work, arguments.compare)
    found = {seed: _of_seed(seed, arguments) for seed in arguments.seeds}
    rows, shares, failed = list[Row](), list[float](), True
    for seed, (target, curves) in found.items():
        reached = {name: next((p for p in curve if p["accuracy"] >= target), None) for name, curve in curves.items()}
        for name, curve in curves.items():
            figures = (reached[name] or curve[-1]) | {"target": target}
            rows.append(Row(name=f"{name}, seed {seed}", seconds=figures.pop("seconds"), figures=figures))
        taught, own = reached["distillation"], reached["GRPO"]
        shares.append(taught["CPU, s"] / own["CPU, s"] if taught and own else float("inf"))
        failed &= reached["shuffled teacher"] is None
    told = ", ".join(f"{share:.2f}" for share in shares)
    notes = [
        "A row is where a method first reaches the target, or its last step where it does not.",
        f"Distillation took {told} of GRPO's seconds of CPU to the target (bar: {_BAR} at most), and the shuffled "
        f"teacher {'fails, as it should' if failed else 'REACHES it'}: "
        f"{'held' if failed and max(shares) <= _BAR else 'MISSED'}.",
    ]
    report = Report(bench="learn", work=work, rows=rows, figures={"shares": shares, "control": failed}, notes=notes)
    return finish(report, arguments.json, arguments.compare)


def _of_seed(seed: int, arguments: argparse.Namespace) -> tuple[float, dict[str, list[Point]]]:
    """Run the methods from one start. Returns the target, and the curve of each."""
    recipe, folder = script().parent, (arguments.out / f"seed_{seed}").resolve()
    command = [sys.executable, recipe / "prepare.py", "--output-dir", folder, "--seed", seed]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    given = {"OUT": str(folder), "SEED": str(seed), "ROLLOUT": "hf", "REWARD": str(recipe / "reward.py")}
    text = string.Template((recipe / "run.sh").read_text()).safe_substitute(given).replace('"', "")
    words = {word.partition("=")[0]: word for word in re.findall(r"^    ([\w.]+=\S+)", text, re.MULTILINE)}

    def run(name: str, *more: str, until: float = 2.0, steps: int = arguments.steps, shuffled: bool = False) -> Any:
        own = [*_LOCAL, *_QUIET, f"trainer.total_training_steps={arguments.steps}", *more, *arguments.overrides]
        place = f"trainer.default_local_dir={folder / name.replace(' ', '_')}"
        keys = words | {word.partition("=")[0]: word for word in [*own, place]}
        return _curve([*keys.values()], folder / "data/val.parquet", arguments.every, until, steps, shuffled)

    if arguments.teacher is None:
        curve, teacher = run("GRPO")
        target = arguments.share * curve[-1]["accuracy"]
    else:
        teacher = arguments.teacher.resolve()
        target = arguments.share * accuracy(teacher, folder / "data/val.parquet")
        curve, _ = run("GRPO", until=target)
    taught = [*_TAUGHT, f"distillation.teacher_model.model_path={teacher}", "actor_rollout_ref.rollout.n=1"]
    curves = {"GRPO": curve, "distillation": run("distillation", *taught, until=target)[0]}
    last = 2 * int(curves["distillation"][-1]["step"])
    curves["shuffled teacher"] = run("shuffled teacher", *taught, until=target, steps=last, shuffled=True)[0]
    curves["SFT"] = run("SFT", *_SFT, "actor_rollout_ref.rollout.n=1", until=target)[0]
    return target, curves


def _curve(
    words: Sequence[str], tests: Path, every: int, until: float, steps: int, shuffled: bool
) -> tuple[list[Point], Path]:
    """Train up to an accuracy, or for some steps. Returns a point for each test, and the folder of the last model."""
    config, points, model = compose(words), list[Point](), Path()
    with build(config) as trainer:
        if shuffled:
            shuffle(trainer.teachers)
        trainer.start()
        seconds = cpu_s = tokens = 0.0
        while not (trainer.done() or trainer.state.step >= steps or (points and points[-1]["accuracy"] >= until)):
            began = time.perf_counter(), time.process_time()
            metrics = trainer.step()
            seconds, cpu_s = seconds + time.perf_counter() - began[0], cpu_s + time.process_time() - began[1]
            tokens += metrics.get("perf/total_num_tokens", 0.0)
            if (step := trainer.state.step) % every == 0 or trainer.done():
                trainer.checkpoints.save_unless_saved(trainer)
                trainer.checkpoints.complete(trainer, wait=True)
                model = step_dir(config.trainer.default_local_dir, step) / "actor" / "huggingface"
                cost = {"step": step, "seconds": seconds, "CPU, s": cpu_s, "tokens": tokens}
                points.append(cost | {"accuracy": accuracy(model, tests)})
                print(f"{config.trainer.default_local_dir} {points[-1]}", file=sys.stderr, flush=True)
    return points, model


@torch.no_grad()
def accuracy(folder: Path, rows: Path) -> float:
    """Compute the share of rows that a model answers greedily as reward_model.ground_truth says, and ends there."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    table = pq.read_table(rows).to_pylist()
    prompts = tokenizer([row["prompt"][0]["content"] for row in table], return_tensors="pt")  # all of one length
    wanted = [row["reward_model"]["ground_truth"] + tokenizer.eos_token for row in table]
    made = model.generate(**prompts, max_new_tokens=len(tokenizer(wanted[0])["input_ids"]), do_sample=False)
    answers = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :])
    return sum(answer == right for answer, right in zip(answers, wanted, strict=True)) / len(table)
