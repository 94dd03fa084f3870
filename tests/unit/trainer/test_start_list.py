"""A start tells all that is wrong with its facts in one list: model, data, tools, rewards, folders, machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.support import main_ppo
from tests.unit.models import zoo
from tests.unit.trainer import bad_configurations as bad
from tests.unit.trainer.test_bad_configurations import refusal
from tests.worlds.processes import run_module
from verl_like.config.errors import ConfigError, problems_of, raise_if_any
from verl_like.services.pool import WorkerPool
from verl_like.trainer.compose import compose
from verl_like.trainer.facts import Fact, Facts
from verl_like.trainer.start_checks import problems

NO_TRAIN = {"data.train_files": "/nowhere.parquet"}
NO_REWARD = {"custom_reward_function.path": "/nowhere.py"}
NO_LOGS = {"trainer.log_dir": "{folder}/nothing/logs"}
MISTAKES: dict[str, dict[str, str]] = {  # words of what is said -> the keys
    "data.train_files: there is no file /nowhere.parquet": NO_TRAIN,
    "custom_reward_function.path=/nowhere.py: there is no such file": NO_REWARD,
    "actor_rollout_ref.model.target_modules=['nope_proj']: nope_proj is no module of this model": {
        f"{bad.MODEL}.lora_rank": "2",
        f"{bad.MODEL}.target_modules": "[nope_proj]",
    },
    f"{bad.TURNS}.tool_config_path={{folder}}/open.yaml is not YAML": {
        f"{bad.TURNS}.enable": "true",
        f"{bad.TURNS}.tool_config_path": "{folder}/open.yaml",
    },
    "trainer.log_dir='{folder}/nothing/logs': nothing can be written there": {
        "trainer.log_dir": "{folder}/nothing/logs"
    },
}


def told(folder: Path, model: Path, settings: Mapping[str, str]) -> list[str]:
    """The problems that a start with these settings tells."""
    text = refusal(bad.Bad("trainer.seed", "3", settings), folder, model)
    listed = re.split(r"\n  \d+\. ", text)
    return listed[1:] if len(listed) > 1 else listed


def joined(*parts: Mapping[str, str]) -> dict[str, str]:
    return {key: value for part in parts for key, value in part.items()}


def line(settings: Mapping[str, str], folder: Path, model: Path) -> list[str]:
    return [f"{key}={value}" for key, value in bad.Bad("trainer.seed", "3", settings).settings(folder, model).items()]


def test_five_mistakes_in_five_parts_are_one_list(tmp_path: Path, tiny_model: Path) -> None:
    """As users start it, and in a plan; and each of them alone is told in the same words."""
    all_of_them = line(joined(*MISTAKES.values()), tmp_path, tiny_model)
    run, plan = main_ppo(all_of_them), run_module("verl_like.cli", ["plan", *all_of_them])
    lists = []
    for done, text in ((run, run.stdout), (plan, plan.stderr)):
        assert done.returncode == 1 and "error: 5 problems in the configuration:\n" in text, text
        assert "Traceback" not in text and "worker(s)" not in text, text
        lists.append(re.findall(r"^  \d+\. (.*(?:\n(?!  \d+\. |\s*$).*)*)", text.partition("error: ")[2], re.M))
    assert len(lists[0]) == 5 and lists[0] == lists[1]
    for words, settings in MISTAKES.items():
        (found,) = [problem for problem in lists[0] if words.format(folder=tmp_path) in problem]
        assert told(tmp_path, tiny_model, settings) == [found]
    assert not (tmp_path / "out").exists()


def test_adapters_of_experts_that_the_engine_does_not_keep_are_told(tmp_path: Path, tiny_model: Path) -> None:
    """Left out, or merged, nothing is told of them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = Path(zoo.folder(tmp_path, "qwen3_moe", vocab_size=len(tokenizer)))
    tokenizer.save_pretrained(model)
    lora = {f"{bad.MODEL}.lora_rank": "2", f"{bad.MODEL}.lora.merge": "false"}
    lora |= {"actor_rollout_ref.rollout.name": "vllm", **NO_TRAIN}
    for more, is_told in (({}, True), ({f"{bad.MODEL}.exclude_modules": "[experts,gate]"}, False)):
        found = [line for line in told(tmp_path, model, lora | more) if "keeps no adapters of experts" in line]
        assert len(found) == is_told
        assert all("model.lora.merge=False" in line and "mlp.experts.down_proj" in line for line in found)


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        ({f"{bad.MODEL}.path": "/nowhere"}, "actor_rollout_ref.model.path=/nowhere: there is no such folder"),
        ({f"{bad.MODEL}.path": "{folder}/odd"}, "its config.json cannot be used"),
        ({"data.tokenizer": "/nowhere"}, "data.tokenizer=/nowhere: there is no such folder"),
        ({"data.prompt_key": "nowhere"}, "data.prompt_key"),
        ({"trainer.device": "cuda"}, "trainer.device=cuda, but torch sees no CUDA device here"),
    ],
)
def test_a_fact_that_cannot_be_loaded_is_told_once_and_hides_no_other(
    unknown: dict[str, str], words: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "odd").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "odd" / name).write_text((tiny_model / name).read_text())
    odd = json.loads((tiny_model / "config.json").read_text()) | {"model_type": "no_such_type"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(odd))
    both = {"data.val_files": "{train}"}  # a key that does not fit them is one fault, not two
    alone = told(tmp_path, tiny_model, joined(unknown, both))
    assert len(alone) == 1 and words in alone[0]
    more = told(tmp_path, tiny_model, joined(unknown, both, NO_REWARD, NO_LOGS))
    assert len(more) == 3 and alone[0] in more, more


def test_what_this_machine_has_no_room_for_is_not_started(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 graders are told beside other faults, once, and not one of them is started to find out more."""
    monkeypatch.setattr(WorkerPool, "__init__", lambda *arguments, **options: pytest.fail("a pool was started"))
    found = told(tmp_path, tiny_model, {"custom_reward_function.num_workers": "100000", **NO_TRAIN})
    assert len(found) == 2 and "100,000 processes" in "".join(found) and "/nowhere.parquet" in "".join(found)


def test_an_evaluation_has_the_same_list(tmp_path: Path, tiny_model: Path) -> None:
    """Without what only training asks: it has no training set, no sampler, no shards."""
    settings = joined(NO_REWARD, NO_TRAIN, {"data.val_files": "/none.parquet", "data.train_batch_size": "1000"})
    with ExitStack() as stack:
        found = list(problems(Facts(compose(line(settings, tmp_path, tiny_model)), stack, trains=False)))
    assert {text.partition(":")[0].partition("=")[0] for text in found} == {
        "data.val_files",
        "custom_reward_function.path",
    }


def test_a_fact_is_loaded_once_also_where_it_fails() -> None:
    class Some:
        def __init__(self) -> None:
            self.failed: dict[str, Exception] = {}
            self.loads: list[str] = []

        @Fact
        def sound(self) -> int:
            self.loads.append("sound")
            return 3

        @Fact
        def broken(self) -> int:
            self.loads.append("broken")
            raise ValueError("it is broken")

    some = Some()
    assert [some.sound, some.sound] == [3, 3]
    found = list(problems_of(lambda: some.broken, lambda: some.broken, lambda: some.sound))
    assert found == ["it is broken"] * 2 and some.loads == ["sound", "broken"]


def test_problems_are_collected_from_checks_that_raise_and_checks_that_yield() -> None:
    def yields() -> object:
        yield "first"
        raise ConfigError(["second", "third"])

    def fails() -> None:
        raise OSError("fourth")

    found = list(problems_of(yields, fails, lambda: ["no problem"], prefix="a."))
    assert found == ["a.first", "a.second", "a.third", "a.fourth"]
    with pytest.raises(ConfigError) as caught:
        raise_if_any(["model.path=x: none", "other", "critic.model.path=x: none", "other"])
    assert caught.value.problems == ["model.path=x: none", "other"]
    with pytest.raises(KeyError):  # nobody foresaw that: it is no problem of the user's
        list(problems_of(lambda: {}["absent"]))
