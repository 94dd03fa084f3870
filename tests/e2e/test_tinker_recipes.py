"""Recipes of tinker-cookbook, their files unedited, against a server: alone, together, and beside our own trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import metrics_of, overrides, with_answers
from test_tinker_client import server
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worlds.packages import DATASETS, fetch
from verl_like.plugins.tinker_server.adapters import Adapter, AdapterSpec, Places
from verl_like.rollout.rollout_engine import request_seed
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train
from verl_like.trainer.sft_trainer import OBJECTIVE

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def chatty(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer knows the ends of turns."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("chatty")
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tok_minimind")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **ends)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


NAME = "Qwen/Qwen3-8B"  # of the model to recipes
RECIPES = {
    "preference.dpo.train": ["renderer_name=qwen3", "batch_size=4", "max_steps=2"],
    "distillation.on_policy_distillation": [
        *("teacher_model=Qwen/Qwen3-8B", "renderer_name=qwen3", "groups_per_batch=2", "group_size=2"),
        *("max_tokens=8", "max_steps=1", "eval_every=0", "lora_rank=8"),
    ],
    "sl_loop": ["batch_size=8", "max_steps=4", "learning_rate=1e-2", "lora_rank=8", "save_every=1"],
    "rl_loop": ["batch_size=2", "max_steps=2", "group_size=4", "max_tokens=12", "loss_fn=importance_sampling"],
    "rl_basic": ["max_tokens=8", "max_steps=1", "renderer_name=qwen3"],
    "multiplayer_rl.guess_number.train": [
        *("renderer_name=qwen3", "batch_size=1", "group_size=2", "max_tokens=6", "max_steps=1", "eval_every=0"),
    ],
}


@pytest.fixture(scope="module")
def hub(fetched: Path, shared_data: Path, chatty: Path) -> dict[str, str]:
    """Environment of recipes: what they fetch from a hub, tinker_start.py answers."""
    if not (fetched / "datasets").is_dir():
        fetch(fetched, [*DATASETS, "pylatexenc"])
    found = {"TINKER_PACKAGES": str(fetched), "MODEL_DIR": str(chatty), "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **found, "GSM8K_FILE": str(shared_data / "gsm8k" / "train.jsonl"), "PYTHONPATH": ""}


def begun(recipe: str, url: str, hub: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[str]:
    """A recipe's process; its files are unedited."""
    rows = "2" if recipe == "rl_basic" else "32"  # its batch of 128 groups has the rows that there are
    command = [sys.executable, str(Path(__file__).with_name("tinker_start.py")), f"tinker_cookbook.recipes.{recipe}"]
    command += [f"model_name={NAME}", f"log_path={folder / recipe}", *(words or RECIPES[recipe])]
    env = {"NUM_ROWS": rows} | hub | {"TINKER_BASE_URL": url}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def told_by(recipe: str, process: subprocess.Popen[str], folder: Path) -> list[dict[str, float]]:
    """Metrics of each step of a recipe that has ended well."""
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    assert (folder / recipe / "checkpoints.jsonl").read_text().count("tinker://") >= 1
    return [json.loads(line) for line in (folder / recipe / "metrics.jsonl").read_text().splitlines()]


def check_learned(told: dict[str, list[dict[str, float]]]) -> None:
    """Check what the recipes say about their steps."""
    nll = [step["train_mean_nll"] for step in told["sl_loop"]]
    assert len(nll) == 4 and nll[3] < nll[0] - 0.3
    assert told["preference.dpo.train"][0]["loss:sum"] > 0
    assert told["distillation.on_policy_distillation"][0]["teacher_kl"] == pytest.approx(0, abs=1e-4), "its own base"
    assert len(told["rl_loop"]) == 2 and all(step["grad_norm:mean"] > 0 for step in told["rl_loop"])
    assert told["rl_basic"][0]["env/all/total_episodes"] == 32
    assert told["multiplayer_rl.guess_number.train"][0]["env/all/turns_per_episode"] > 1


@pytest.mark.timeout(1800)
def test_recipes_of_the_cookbook_run_together(chatty: Path, hub: dict[str, str], tmp_path: Path) -> None:
    """All six at once on one server, in passes and batches that they share: each learns as it does alone."""
    names = list(RECIPES)
    with server(chatty, tmp_path / "state", serve__model_name=NAME, serve__isolation="shared") as (url, _):
        running = {name: begun(name, url, hub, tmp_path) for name in names}
        try:
            told = {name: told_by(name, process, tmp_path) for name, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
    check_learned(told)


TEMPLATE = (  # as the recipes write a conversation; a last answer has a thought
    "{% for m in messages %}{{ '\n' if not loop.first }}<|im_start|>{{ m.role }}\n"
    "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last }}{{ m.content }}<|im_end|>{% endfor %}"
    "{{ '\n<|im_start|>assistant\n' if add_generation_prompt }}"
)


def with_template(chatty: Path, folder: Path, seed: int = 5) -> tuple[Path, Path]:
    """Make (base whose tokenizer has TEMPLATE, adapter with which a server with this trainer.seed begins)."""
    base = shutil.copytree(chatty, folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    places = Places(AutoModelForCausalLM.from_pretrained(base), head=False)
    spec = AdapterSpec(rank=8, seed=request_seed(seed, "adapter", 0), train_unembed=False)
    Adapter.new(spec, 32.0, places, torch.device("cpu")).save(folder / "first", str(base), optimizer=False)
    return base, folder / "first"


@pytest.mark.timeout(900)
def test_sl_loop_has_the_curve_of_our_own_trainer(
    chatty: Path, hub: dict[str, str], shared_data: Path, tmp_path: Path
) -> None:
    """The same first adapter and rows. The recipe's rate falls by a thousandth a step, ours stays: that is left."""
    steps, lines = 6, (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()
    base, first = with_template(chatty, tmp_path)
    words = ["batch_size=8", f"max_steps={steps}", "learning_rate=1e-2", "lora_rank=8", "save_every=0"]
    with server(base, tmp_path / "state", serve__model_name=NAME, trainer__seed=5) as (url, _):
        more = {"NUM_ROWS": str(len(lines)), "TRAIN_UNEMBED": "0"}
        told = told_by("sl_loop", begun("sl_loop", url, hub | more, tmp_path, *words), tmp_path)
    rows = []
    for place in np.random.default_rng(0).permutation(len(lines))[: 8 * steps]:  # as the recipe shuffles
        row = json.loads(lines[place])
        said = ("user", row["question"][:100]), ("assistant", row["answer"][:80])
        rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
    own = {"model.lora_adapter_path": first, "model.lora_rank": 8, "model.lora_alpha": 32}
    own |= {"optim.eps": 1e-8, "optim.weight_decay": 0.0, "trainer.total_training_steps": steps}
    own |= {"actor_rollout_ref.actor.grad_clip": 1e9, "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}
    train(compose([OBJECTIVE, *with_answers(tmp_path, base, "own", rows, **own)]))
    losses = [record["actor/loss"] for record in metrics_of(tmp_path / "own")]
    nll = [step["train_mean_nll"] for step in told]
    print([(f"{mine:.5f}", f"{theirs - mine:.1e}") for mine, theirs in zip(losses, nll, strict=True)])
    assert nll == pytest.approx(losses, abs=5e-4) and nll[-1] < nll[0] - 0.2
    assert nll[0] == pytest.approx(losses[0], abs=1e-5)


SIZE = {"rows": 4, "samples": 8, "tokens": 12, "rate": 3e-3}  # of a step of rl_loop, and of ours


def rl_loop(steps: int, base: Path, hub: dict[str, str], folder: Path, seed: int = 5) -> list[dict[str, float]]:
    """The recipe's metrics, and in `folder` its samples and the server's state."""
    words = [f"batch_size={SIZE['rows']}", f"group_size={SIZE['samples']}", f"max_tokens={SIZE['tokens']}"]
    words += [f"learning_rate={SIZE['rate']}", f"max_steps={steps}", "lora_rank=8", "save_every=1"]
    more = {"NUM_ROWS": str(SIZE["rows"] * steps), "TRAIN_UNEMBED": "0", "SAMPLES_FILE": str(folder / "samples")}
    with server(base, folder / "state", serve__model_name=NAME, trainer__seed=seed) as (url, _):
        process = begun("rl_loop", url, hub | more, folder, *words, "loss_fn=importance_sampling")
        return told_by("rl_loop", process, folder)


def grpo(steps: int, base: Path, first: Path, hub: dict[str, str], folder: Path, seed: int = 5) -> list[dict[str, Any]]:
    """Metrics of our own trainer with the prompts, numbers and advantages of rl_loop."""
    rows, suffix = [], " Provide a numerical answer without units, written inside \\boxed{}."
    shot = "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    shot = ("How many r's are in strawberry?" + suffix, shot + "We have r's at positions 3, 8, and 9. \\boxed{3}")
    with open(hub["GSM8K_FILE"], encoding="utf-8") as file:
        for index in range(SIZE["rows"] * steps):
            said = (*shot, json.loads(next(file))["question"] + suffix)
            roles = zip(("user", "assistant", "user"), said, strict=True)
            prompt = [{"role": role, "content": text} for role, text in roles]
            rows.append({"data_source": "e", "prompt": prompt, "extra_info": {"index": index}})
            rows[-1]["reward_model"] = {"style": "rule", "ground_truth": "e"}
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, *_, **__):\n"
        f"    return float(sum(map(solution_str.count, {hub.get('REWARDED', 'e')!r})) >= 3)\n"
    )
    task = {"data.train_files": folder / "rows.jsonl", "data.val_files": folder / "rows.jsonl"}
    task |= {"custom_reward_function.path": folder / "reward.py", "data.train_batch_size": SIZE["rows"]}
    task |= {"data.max_prompt_length": 1000, "data.max_response_length": SIZE["tokens"], "data.shuffle": False}
    task |= {"algorithm.norm_adv_by_std_in_grpo": False, "trainer.total_training_steps": steps, "trainer.seed": seed}
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    task |= {f"{model}.lora_adapter_path": first, f"{model}.lora_rank": 8, f"{model}.lora_alpha": 32}
    task |= {f"{actor}.ppo_mini_batch_size": SIZE["rows"], f"{actor}.ppo_max_token_len_per_gpu": 4096}
    task |= {f"{actor}.loss_agg_mode": "seq-mean-token-sum", f"{actor}.grad_clip": 1e9}
    task |= {f"{actor}.optim.lr": SIZE["rate"], f"{actor}.optim.betas": "[0.9,0.95]", f"{actor}.optim.weight_decay": 0}
    task |= {f"{actor}.optim.eps": 1e-8 / (SIZE["rows"] * SIZE["samples"])}  # its loss is a sum over rows, ours a mean
    task |= {"actor_rollout_ref.rollout.n": SIZE["samples"], "trainer.save_freq": 1}
    train(compose([*overrides({}, base, folder / "own"), *(f"{key}={value}" for key, value in task.items())]))
    return [record for record in metrics_of(folder / "own") if "actor/grad_norm" in record]


class Recorded:
    """Draw, in our sampler's place, the tokens that the recipe's samples have, with the log-probs that ours gives them.

    apart: the largest difference of these from the recipe's.
    """

    def __init__(self, samples: Path) -> None:
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        self._left: dict[tuple[int, ...], list[Any]] = {tuple(line["prompt"]): line["answers"] for line in lines}
        self._given: dict[tuple[Any, ...], Any] = {}
        self.apart = 0.0

    def __call__(self, rows: list[Any], _: Any, logits_bV: Tensor) -> tuple[Tensor, Tensor]:
        drawn = []
        for row in rows:
            key = (prompt := tuple(row.request.prompt_ids), row.request.request_id)
            if key not in self._given:
                self._given[key] = self._left[prompt].pop(0)
            drawn.append([column[len(row.sampled)] for column in self._given[key]])
        token_b, expected_b = (torch.tensor(each) for each in zip(*drawn, strict=True))
        log_prob_b = logits_bV.log_softmax(-1).gather(1, token_b[:, None])[:, 0]
        self.apart = max(self.apart, float((log_prob_b - expected_b).abs().max()))
        return token_b, log_prob_b


@pytest.mark.timeout(900)
def test_rl_loop_has_the_curve_of_our_own_trainer(
    chatty: Path, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipe's tokens our GRPO has its log-probs, its rewards, and its adapter after every step."""
    steps, (base, first) = 4, with_template(chatty, tmp_path)
    told = rl_loop(steps, base, hub, tmp_path)
    recorded = Recorded(tmp_path / "samples")
    monkeypatch.setattr("verl_like.rollout.hf_batch.draw_tokens", recorded)
    own = grpo(steps, base, first, hub, tmp_path)
    assert [step["critic/score/mean"] for step in own] == pytest.approx([step["reward/total"] for step in told])
    rows = SIZE["rows"] * SIZE["samples"]
    norms = [step["actor/grad_norm"] * rows for step in own]
    assert norms == pytest.approx([step["grad_norm:mean"] for step in told], rel=1e-3)
    apart = dict.fromkeys(range(1, steps + 1), 1.0)
    for file in (tmp_path / "state" / "saved").glob("*/*/adapter_model.safetensors"):  # of every step, and the first
        theirs = load_file(file)
        for step in apart:
            mine = load_file(tmp_path / "own" / f"global_step_{step}" / "actor" / "adapter/adapter_model.safetensors")
            assert mine.keys() == theirs.keys()
            difference = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
            apart[step] = min(apart[step], difference)
    print(recorded.apart, apart, [(mine, step["grad_norm:mean"]) for mine, step in zip(norms, told, strict=True)])
    assert 0 < recorded.apart < 1e-5
    assert max(apart.values()) < 1e-5


def sharper(chat_model: Path, folder: Path) -> Path:
    """Copy a random model whose answers a few steps change: it takes long prompts, and its head, which gets no
    adapter, tells tokens apart."""
    tokenizer, model = AutoTokenizer.from_pretrained(chat_model), AutoModelForCausalLM.from_pretrained(chat_model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.config.max_position_embeddings = 2048
    for each in (tokenizer, model):
        each.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rl_loop_learns_as_our_own_trainer_does(
    chat_model: Path, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seeds, each side with samples of its own: answers with three digits, at first few of them. The bands of
    the last rewards overlap."""
    steps, model = 14, sharper(chat_model, tmp_path / "model")
    monkeypatch.setitem(SIZE, "rate", 1e-2)
    monkeypatch.setitem(SIZE, "tokens", 16)
    more = hub | {"MODEL_DIR": str(model), "REWARDED": "0123456789"}
    theirs, ours = list[list[float]](), list[list[float]]()
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        base, first = with_template(model, folder, seed)
        theirs.append([step["reward/total"] for step in rl_loop(steps, base, more, folder, seed)])
        ours.append([step["critic/score/mean"] for step in grpo(steps, base, first, more, folder, seed)])
        print(seed, *(" ".join(f"{reward:.2f}" for reward in each[-1]) for each in (theirs, ours)), sep="\n")
    first, last = (np.array([[np.mean(c[part]) for c in each] for each in (theirs, ours)]) for part in PARTS)
    assert (last > first + 0.3).all(), "all six learn"
    assert last.min(1).max() <= last.max(1).min(), "the bands overlap"


PARTS = (slice(0, 3), slice(-3, None))  # steps at the begin and at the end


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("isolation", ["exact", "shared"])
def test_recipes_of_the_cookbook_run_unedited(
    chatty: Path, hub: dict[str, str], tmp_path: Path, isolation: str
) -> None:
    """Supervised, reinforcement, preferences (a custom loss), several turns, distillation (a teacher's log-probs)."""
    with server(chatty, tmp_path / "state", serve__model_name=NAME, serve__isolation=isolation) as (url, _):
        told = {name: told_by(name, begun(name, url, hub, tmp_path), tmp_path) for name in RECIPES}
    check_learned(told)
