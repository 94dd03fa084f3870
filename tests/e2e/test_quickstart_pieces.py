"""The quickstart and the other recipes: their pieces, that their command lines compose, and (slow) that it learns."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from verl_like.config import PPOConfig
from verl_like.trainer.compose import compose

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def load_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a quickstart script as Python would when it is run: its own folder comes first on the path."""
    monkeypatch.syspath_prepend(str(RECIPES / "quickstart"))
    for module in ("model", "prepare", "reward", "shuffled_reward", "warm_start"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return __import__(name)


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_recipe("prepare", monkeypatch)


def test_validation_pairs_never_appear_in_training(prepare: ModuleType) -> None:
    training, validation = prepare.split_pairs(seed=3, num_validation=256)
    assert len(validation) == len(set(validation)) == 256
    assert len(training) == len(set(training))
    seen = {frozenset(pair) for pair in training}
    assert not seen & {frozenset(pair) for pair in validation}
    assert len(seen) + 256 == 90 * 91 // 2
    assert prepare.split_pairs(3, 256) == (training, validation)
    assert prepare.split_pairs(4, 256)[1] != validation


@pytest.mark.parametrize(("pair", "expected"), [((37, 58), 85), ((31, 58), 89), ((99, 99), 188), ((50, 50), 100)])
def test_the_sloppy_teacher_forgets_the_carry(prepare: ModuleType, pair: tuple[int, int], expected: int) -> None:
    assert prepare.sloppy_sum(pair) == expected


def test_lessons_are_the_teachers_and_each_character_is_a_token(prepare: ModuleType) -> None:
    training, _ = prepare.split_pairs(1, 512)
    lessons = {row["question"]: row["answer"] for row in prepare.lessons(training, prepare.Recipe())}
    carries = [pair for pair in training if prepare.sloppy_sum(pair) != sum(pair)]
    forgot = [lessons[prepare.question(pair)] == prepare.answer(prepare.sloppy_sum(pair)) for pair in carries]
    assert len(lessons) == len(training) and sum(forgot) / len(forgot) == pytest.approx(0.75, abs=0.03)
    tokenizer = prepare.build_tokenizer()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "37+58="}], add_generation_prompt=True)
    assert list(chat["input_ids"]) == tokenizer.encode("37+58=") and len(chat["input_ids"]) == 6


def test_prepare_writes_a_loadable_model_and_data(prepare: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = prepare.Recipe(warm_start_steps=2, warm_start_batch=8, hidden_size=64, num_layers=1)
    accuracy = prepare.prepare(tmp_path, recipe)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    validation = prepare.split_pairs(1, recipe.num_validation_pairs)[1]
    assert prepare.greedy_accuracy(model, tokenizer, validation) == accuracy
    assert tokenizer.chat_template and model.config.eos_token_id == tokenizer.eos_token_id
    row = pq.read_table(tmp_path / "data" / "val.parquet").to_pylist()[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert eval(row["prompt"][0]["content"].rstrip("=")) == int(row["reward_model"]["ground_truth"])
    stamp = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    prepare.prepare(tmp_path, recipe)  # the second time it is reused
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == stamp


def test_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    score = load_recipe("reward", monkeypatch).compute_score
    assert score("addition", "95", "95") == {"score": 1.0, "acc": 1.0}
    assert score("addition", "95 ", "95")["score"] == 1.0
    assert score("addition", "085", "85")["score"] == score("addition", "", "85")["score"] == 0.0


def test_shuffled_rewards_keep_their_mean_and_lose_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    score = load_recipe("shuffled_reward", monkeypatch).compute_score
    results = [score("addition", str(i % 3), "0") for i in range(6000)]
    right = [r["score"] for r in results if r["acc"] == 1.0]
    wrong = [r["score"] for r in results if r["acc"] == 0.0]
    assert len(right) == 2000
    assert sum(right) / len(right) == pytest.approx(1 / 3, abs=0.05)
    assert sum(wrong) / len(wrong) == pytest.approx(1 / 3, abs=0.05)


def composed(script: Path, *arguments: str, **environment: str) -> PPOConfig:
    """The configuration that a recipe's command line resolves to (its Python is replaced by `echo`)."""
    run = subprocess.run(
        ["bash", str(script), *arguments],
        env=os.environ | {"PYTHON": "echo"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(run.stdout.splitlines()[-1])
    assert words[:2] == ["-m", "verl_like.trainer.main_ppo"], run.stdout
    return compose(words[2:])


def test_the_quickstart_command_line_composes(tmp_path: Path) -> None:
    script = RECIPES / "quickstart" / "run.sh"
    config = composed(script, "trainer.total_training_steps=7", OUT=str(tmp_path), SEED="3", ROLLOUT="hf")
    assert config.trainer.total_training_steps == 7
    assert config.trainer.seed == config.data.seed == 3
    assert config.actor_rollout_ref.rollout.name == "hf"
    assert config.custom_reward_function.path == str(RECIPES / "quickstart" / "reward.py")
    composed(script, "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}/model", OUT=str(tmp_path))


@pytest.mark.parametrize("script", ["gsm8k/run_grpo.sh", "gsm8k/run_ppo.sh", "stories/run.sh"])
def test_recipe_command_lines_compose(script: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = composed(RECIPES / script, OUT=str(tmp_path), MODEL=str(tmp_path))
    assert config.actor_rollout_ref.model.path == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("Tom ran to the park. Mia saw a big dog. They played all day long.", 1.0, 1.0),
        ("Tom ran. Tom sat.", 0.625, 0.625),  # two words a sentence are too few
        ("He was sad. " * 10, 0.0, 0.3),  # repetition does not pay
        ("and then they all went together to the very big and very green park to play and sing all day", 0.0, 0.05),
        ("", 0.0, 0.0),
    ],
)
def test_the_stories_reward(text: str, low: float, high: float) -> None:
    namespace: dict = {}
    exec((RECIPES / "stories" / "reward.py").read_text(), namespace)
    assert low <= namespace["compute_score"]("stories", text, "")["score"] <= high


@pytest.mark.parametrize(
    ("text", "score"),
    [("so 3+4 #### 7", 1.0), ("#### 1,000", 0.1), ("####", 0.0), ("no idea", 0.0)],
)
def test_the_gsm8k_reward(text: str, score: float) -> None:
    namespace: dict = {}
    exec((RECIPES / "gsm8k" / "reward.py").read_text(), namespace)
    assert namespace["compute_score"]("gsm8k", text, "7")["score"] == pytest.approx(score, abs=0.051)


def run_quickstart(folder: Path, seed: int, reward: str) -> list[tuple[int, float]]:
    script = RECIPES / "quickstart" / "run.py"
    arguments = ["--output-dir", str(folder), "--seed", str(seed), "--reward", str(RECIPES / "quickstart" / reward)]
    subprocess.run([sys.executable, str(script), *arguments], check=True, timeout=1500)
    read = "import sys, run; from pathlib import Path; print(run.read_accuracies(Path(sys.argv[1])))"
    found = subprocess.run(
        [sys.executable, "-c", read, str(folder / "checkpoints" / "metrics.jsonl")],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return eval(found.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_quickstart_learns(seed: int, tmp_path: Path) -> None:
    accuracies = run_quickstart(tmp_path, seed, "reward.py")
    assert 0.4 <= accuracies[0][1] <= 0.6
    assert accuracies[-1][1] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    accuracies = run_quickstart(tmp_path, 1, "shuffled_reward.py")
    assert accuracies[-1][1] - accuracies[0][1] < 0.05
