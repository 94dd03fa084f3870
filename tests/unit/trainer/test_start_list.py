"""A start tells all that is wrong with its facts in one list: model, data, tools, rewards, folders, machine."""

from __future__ import annotations

import json
import re
import shutil
import time
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
    assert alone[0].count("`") % 2 == 0, "a library's text is cut where a sentence ends"
    more = told(tmp_path, tiny_model, joined(unknown, both, NO_REWARD, NO_LOGS))
    assert len(more) == 3 and alone[0] in more, more


TOOLS = {f"{bad.TURNS}.enable": "true", f"{bad.TURNS}.tool_config_path": "/no_tool.yaml"}
BROKEN = {"data.train_files": "{folder}/broken.jsonl", "data.val_files": "{folder}/empty.jsonl"}
SAMPLER = {"data.sampler.class_path": "/no_sampler.py", "data.sampler.class_name": "S"}
NO_MODEL = {"algorithm.adv_estimator": "gae", "critic.model.path": "{folder}/odd", f"{bad.MODEL}.path": "{folder}/odd"}
CLASS = {"data.custom_cls.path": "/no_class.py", "data.custom_cls.name": "D"}
TOGETHER: list[tuple[dict[str, str], list[str]]] = [
    (joined(BROKEN, SAMPLER, {f"{bad.ROLLOUT}.stop_token_ids": "[99999]", f"{bad.VAL}.stop_token_ids": "[99998]"}),
     ["broken.jsonl, line 1", "empty.jsonl is empty", "no_sampler.py", "[99999]", "val_kwargs.stop_token_ids=[99998]"]),
    (joined(TOOLS, CLASS, {f"{bad.TURNS}.interaction_config_path": "/no_user.yaml"},
            {f"{bad.TURNS}.environment_path": "/no_world.py:W"}),
     ["no_tool.yaml", "no_user.yaml", "no_world.py", "no_class.py"]),
    (joined(BROKEN, {"data.tokenizer": "/nowhere", "custom_reward_function.num_workers": "100000"}, NO_REWARD),
     ["broken.jsonl", "empty.jsonl", "data.tokenizer=/nowhere", "100,000 processes", "/nowhere.py: there is no"]),
    (joined(NO_MODEL, BROKEN), [f"{bad.MODEL}.path={{folder}}/odd: its config.json", "broken.jsonl", "empty.jsonl"]),
    ({"data.train_batch_size": "1000", "data.domain_weights": "{zork: 1}"}, ["only 8 tr", "domain_weights.zork"]),
    ({f"{bad.ACTOR}.ulysses_sequence_parallel_size": "3", f"{bad.ACTOR}.use_kl_loss": "true"},
     ["must divide the number of processes", f"{bad.ACTOR}.ulysses_sequence_parallel_size=3 does not divide"]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "wanted"), TOGETHER)
def test_mistakes_that_do_not_need_each_other_do_not_hide_each_other(
    settings: dict[str, str], wanted: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")  # the tokenizer cannot be loaded either, for the same reason
    found = told(tmp_path, tiny_model, settings)
    assert len(found) == len(wanted), found
    for words in wanted:
        assert sum(words.format(folder=tmp_path) in text for text in found) == 1, (words, found)


def test_a_critic_whose_rotation_changes_in_long_rows_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """RoPE of type longrope: values of short rows would follow what is beside them."""
    path = zoo.folder(tmp_path, "phi3", **zoo.telling("phi3"))
    settings = {"algorithm.adv_estimator": "gae", "critic.model.path": path, "data.max_prompt_length": "64"}
    found = told(tmp_path, tiny_model, settings)
    assert any("critic.model.path" in text and "has 64 positions" in text for text in found), found


def test_a_grader_that_never_returns_is_a_problem_beside_others(tmp_path: Path, tiny_model: Path) -> None:
    """And its time is waited for once."""
    arguments = "data_source, solution_str, ground_truth, extra_info=None"
    (tmp_path / "never.py").write_text(f"import time\ndef compute_score({arguments}):\n    time.sleep(100)\n")
    never = {"custom_reward_function.path": "{folder}/never.py", "custom_reward_function.timeout": "1"}
    began = time.monotonic()
    found = told(tmp_path, tiny_model, joined(never, NO_LOGS))
    assert len(found) == 2 and "1 of 1 calls failed" in "".join(found) and time.monotonic() - began < 30, found
    assert any("never.py" in text and "timeout=1 s" in text and "or raise it" in text for text in found)


def test_a_folder_without_weights_is_told_loudly_and_one_that_lacks_some_is_refused(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_model, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    bare = {
        f"{bad.MODEL}.path": "{folder}/copy",
        "algorithm.adv_estimator": "gae",
        "critic.model.path": "{folder}/copy",
    }
    with caplog.at_level("WARNING", "verl_like"):
        assert told(tmp_path, tiny_model, bare) == ["accepted"]
    (warning,) = [text for text in caplog.messages if "HOLDS NO WEIGHTS" in text]
    assert (
        warning.startswith(f"{bad.MODEL}.path={folder} HOLDS NO WEIGHTS: THEY WILL BE RANDOM") and "download" in warning
    )
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (found,) = told(tmp_path, tiny_model, bare)
    assert found.startswith(f"{bad.MODEL}.path={folder}: its weights cannot be read") and "00001-of-00002" in found


def test_a_chat_template_that_is_no_template_is_a_fault_of_the_model(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").write_text("{% for %}")
    (found,) = told(tmp_path, tiny_model, {f"{bad.MODEL}.path": "{folder}/copy"})
    assert found.startswith(f"{bad.MODEL}.path={tmp_path}/copy: its chat template is no Jinja: line 1: ")


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
