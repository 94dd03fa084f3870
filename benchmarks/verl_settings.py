"""Which settings verl's own example scripts use, by size of model and by task: the tables of docs/hyper_parameters.md.

python -m benchmarks.verl_settings COMMANDS.jsonl

Each line of the file is one command of a script: {"version": git tag, "script": path, "number": of the command in it,
"argv": [key=value, ...]}. Counted are scripts of examples/ and recipe/ (those of tests/ are chosen for speed), each in
its newest version, without vision models. A setting that a script leaves to its default is not counted.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

VERSIONS = ["v0.2.0.post2", "v0.3.0.post1", "v0.4.1", "v0.5.0", "v0.6.1", "v0.7.0", "main"]  # oldest first
VISION = re.compile(r"vl[-_]|minicpm|deepeyes", re.IGNORECASE)
SIZES = ((1.0, "0.5B"), (4.0, "1.5B to 4B"), (9.0, "7B, 8B"), (16.0, "12B, 14B"), (40.0, "20B to 32B"), (80.0, "72B"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OPTIMISER = {
    "lr": f"{ACTOR}.optim.lr",
    "critic's lr": "critic.optim.lr",
    "prompts a step": "data.train_batch_size",
    "prompts an update": f"{ACTOR}.ppo_mini_batch_size",
    "responses": f"{ROLLOUT}.n",
    "KL in the loss": f"{ACTOR}.use_kl_loss",
}
MACHINES = {
    "GPUs a machine": "trainer.n_gpus_per_node",
    "machines": "trainer.nnodes",
    "rollout tensor parallel": f"{ROLLOUT}.tensor_model_parallel_size",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
    "optimizer offload": f"{ACTOR}.fsdp_config.optimizer_offload",
}
LENGTHS = {
    "prompt": "data.max_prompt_length",
    "response": "data.max_response_length",
    "responses": f"{ROLLOUT}.n",
    "kl_loss_coef": f"{ACTOR}.kl_loss_coef",
    "clip_ratio_high": f"{ACTOR}.clip_ratio_high",
    "temperature": f"{ROLLOUT}.temperature",
}
Settings = dict[str, str]


def newest(lines: Iterable[str]) -> list[Settings]:
    """The settings of each script's newest version, with the script's name as `script`."""
    found: dict[tuple[str, int], dict] = {}
    for line in lines:
        row = json.loads(line)
        key = row["script"], row["number"]
        if row["script"].startswith("tests/"):
            continue
        if key not in found or VERSIONS.index(row["version"]) > VERSIONS.index(found[key]["version"]):
            found[key] = row
    settings = []
    for row in found.values():
        values = dict(word.lstrip("+").split("=", 1) for word in row["argv"] if "=" in word)
        if not VISION.search(values.get("actor_rollout_ref.model.path", "") + row["script"]):
            settings.append(values | {"script": row["script"]})
    return settings


def size(settings: Settings) -> str | None:
    """By the number of parameters in the model's name, or in the script's where the model is a variable."""
    for name in (settings.get("actor_rollout_ref.model.path", "").split("/")[-1], settings["script"]):
        name = "12b" if "Mistral-Nemo" in name else name
        if match := re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", name.lower()):
            adapters = ", LoRA" if int(settings.get("actor_rollout_ref.model.lora_rank", "0")) else ""
            return next(label for most, label in SIZES if float(match[1]) <= most) + adapters
    return None


def task(settings: Settings) -> str | None:
    """What the training files are about."""
    files = settings.get("data.train_files", "").lower()
    if "multiturn" in settings["script"] or "tool" in settings["script"] + files:
        return "tools, several turns"
    if "dapo" in files or "fapo" in files:
        return "competition mathematics (DAPO-17k and the like)"
    return ("GSM8K and MATH" if "math/" in files else "GSM8K") if "gsm8k" in files else None


def table(found: list[Settings], by: Callable[[Settings], str | None], columns: dict[str, str], first: str) -> str:
    """Rows: what `by` says. Cells: values, most frequent first, with how many scripts have each; the first three."""
    groups: dict[str, list[Settings]] = {}
    for settings in found:
        if (group := by(settings)) is not None:
            groups.setdefault(group, []).append(settings)
    lines = [f"| {first} | scripts | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for group in sorted(groups, key=lambda name: (name.endswith("LoRA"), _order(name))):
        cells = []
        for key in columns.values():
            counted = Counter(re.sub(r"(\.\d)0$", r"\1", s[key].lower()) for s in groups[group] if s.get(key))
            cells.append(", ".join(f"{value} ({count})" for value, count in counted.most_common(3)) or "-")
        lines.append(f"| {group} | {len(groups[group])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _order(name: str) -> tuple[float, str]:
    match = re.match(r"[\d.]+", name)
    return (float(match[0]) if match else 0.0, name)


def tables(lines: Iterable[str]) -> dict[str, str]:
    """Name -> table in Markdown."""
    found = newest(lines)
    return {
        "sizes": table(found, size, OPTIMISER, "model"),
        "machines": table(found, size, MACHINES, "model"),
        "tasks": table(found, task, LENGTHS, "task"),
    }


if __name__ == "__main__":
    print(*tables(Path(sys.argv[1]).read_text().splitlines()).values(), sep="\n\n")
