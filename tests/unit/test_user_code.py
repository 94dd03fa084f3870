"""The loader of users' code: what it finds, what it refuses, and where its references may stand."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from verl_like.config import ActorConfig, PolicyLossConfig
from verl_like.config.errors import problems_of, raise_if_any
from verl_like.config.trainer import TrainerConfig
from verl_like.observe.trackers import build_trackers, check_trackers
from verl_like.rewards.graders import choose
from verl_like.trainer.compose import compose, compose_with_warnings
from verl_like.trainer.own_code import check_own_code
from verl_like.user_code import (
    UserCodeError,
    check_call,
    import_modules,
    is_reference,
    load,
    load_module,
    load_pair,
    own_lines,
    registered_names,
)


@pytest.fixture(autouse=True)
def clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and folders that a test adds are forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(vars(sys.modules[name]).get("__file__")):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("text", ["a.py:f", "/x y/a.py:F", "pkg://a.b:f", "a.b:f", "../a.py:f"])
def test_references(text: str) -> None:
    assert is_reference(text)


@pytest.mark.parametrize("text", ["grpo", "a.py", "a.py:", ":f", "http://host:80", "a.py:f.g", "a b:f", "k1+", ""])
def test_what_is_no_reference(text: str) -> None:
    assert not is_reference(text)


def test_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "value = 5\n", "neighbour_of_mine.py")
    file = write(tmp_path, "import neighbour_of_mine\ncounts = []\ndef f(): return neighbour_of_mine.value\n")
    function = load(f"{file}:f", "some.key")
    assert function() == 5
    assert load(f"{file}:f", "some.key") is function
    assert load_module(file, "k").counts is load_module(f"{tmp_path}/../{tmp_path.name}/mine.py", "k").counts
    assert load("pkg://json:dumps", "some.key") is load("json:dumps", "some.key")
    assert load_pair(file, "f", path_key="p", name_key="n") is load_pair(f"{file}:f", None, path_key="p", name_key="n")


def test_two_files_of_one_name_and_names_that_are_taken(tmp_path: Path) -> None:
    """json.py must not stand in for the standard library's, nor a second mine.py for the first."""
    (tmp_path / "other").mkdir()
    first = write(tmp_path, "class Row: pass\nx = 1\n")
    second = write(tmp_path / "other", "x = 2\n")
    assert (load(f"{first}:x", "k"), load(f"{second}:x", "k")) == (1, 2)
    assert load(f"{write(tmp_path, 'x = 3', 'json.py')}:x", "k") == 3
    assert "dumps" in vars(sys.modules["json"])
    row = load(f"{first}:Row", "k")()
    assert type(pickle.loads(pickle.dumps(row))) is type(row)  # by a module that other processes can import


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def good(): ...\n", "god", r"k=.*mine.py has no such name 'god' \(it has: good\)\. Did you mean 'good'\?"),
        (
            "x = 1\ny = x / 0\n",
            "y",
            r"(?s)k=.*could not be imported:\n.*mine\.py\", line 2.*y = x / 0.*ZeroDivisionError",
        ),
        ("def f(:\n", "f", r"(?s)could not be imported.*mine\.py\", line 1.*SyntaxError"),
        ("import no_such_module_at_all\n", "f", r"(?s)line 1.*ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "f", r"(?s)could not be imported.*SystemExit"),
    ],
)
def test_what_is_wrong_is_said_with_the_users_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        load(f"{write(tmp_path, text)}:{name}", "k")


def test_a_missing_file_names_the_machine() -> None:
    with pytest.raises(UserCodeError, match=r"k=/no/where\.py: there is no such file .* same path on every machine"):
        load("/no/where.py:f", "k")


def test_a_call_is_tried_on_the_signature() -> None:
    check_call(lambda batch, actor: None, "k=v", "batch", "actor")
    check_call(lambda batch, *, bonus: None, "k=v", "batch", keywords={"bonus": 1})
    with pytest.raises(UserCodeError, match=r"k=v: .*\(batch\) cannot be called as .*\(batch, actor\): too many"):
        check_call(lambda batch: None, "k=v", "batch", "actor")
    with pytest.raises(UserCodeError, match="k=v is a int, which cannot be called"):
        check_call(3, "k=v")


def test_menus_take_references(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "from verl_like.algorithms.policy_losses import PolicyLoss\n"
        "def advantage(inputs, algorithm): return 'mine'\n"
        "def loss(batch, actor): ...\n"
        "fixed = PolicyLoss(function=loss, aggregation='seq-mean-token-mean')\n"
        "def half(difference): return difference / 2\n"
        "def wrong(): ...\n",
    )
    assert ADVANTAGES.lookup(f"{file}:advantage")(None, None) == "mine"
    assert KL_ESTIMATORS.lookup(f"{file}:half")(torch.tensor(3.0)) == 1.5
    loss = POLICY_LOSSES.lookup(f"{file}:loss")
    assert isinstance(loss, PolicyLoss) and loss.aggregation is None and loss.pulls_without_advantage
    assert POLICY_LOSSES.lookup(f"{file}:fixed").aggregation == "seq-mean-token-mean"
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{file}:fixed"))
    assert PolicyObjective(actor).aggregation == "seq-mean-token-mean"
    for menu in (ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS):
        with pytest.raises(UserCodeError, match=r"mine\.py:wrong: wrong\(\) cannot be called as wrong\("):
            menu.lookup(f"{file}:wrong")
        assert not any(":" in name for name in menu.names())


def test_external_modules_register_names_that_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for menu in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(menu, "_entries", dict(menu._entries))
    plugin = "from verl_like.algorithms.{0} import register_{1}\n@register_{1}('{2}')\ndef f(a, b): ...\n"
    write(tmp_path, plugin.format("advantages", "advantage", "of_a_variable"), "plugin_of_a_variable.py")
    library = write(tmp_path, plugin.format("policy_losses", "policy_loss", "of_a_library"), "plugin_of_a_library.py")
    names = {"adv": "algorithm.adv_estimator=of_a_variable"}
    names["loss"] = "actor_rollout_ref.actor.policy_loss.loss_mode=of_a_library"
    with pytest.raises(ValueError, match="2 problems"):
        compose(names.values())
    monkeypatch.chdir(tmp_path)  # a module beside the command line
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "json, plugin_of_a_variable")
    both = [*names.values(), f"actor_rollout_ref.model.external_lib='{library},json'"]
    config = compose(both)  # C19: two modules, separated by a comma
    assert "of_a_library" in registered_names("actor_rollout_ref.actor.policy_loss.loss_mode")
    assert config.algorithm.adv_estimator == "of_a_variable"
    with pytest.raises(ValueError, match="Did you mean 'of_a_variable'"):
        compose(["algorithm.adv_estimator=of_a_varable"])
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "no_such_plugin")
    with pytest.raises(
        ValueError, match=r"(?s)VERL_USE_EXTERNAL_MODULES=no_such_plugin could not be imported.*No module"
    ):
        compose()


def test_several_modules_of_one_key() -> None:
    import_modules(" json , csv,", "k")
    import_modules(None, "k")
    with pytest.raises(UserCodeError, match="k=no_such_one"):
        import_modules("json,no_such_one", "k")


def test_the_configuration_takes_references_and_says_nothing_of_what_they_read() -> None:
    own = [
        "algorithm.adv_estimator=mine.py:f",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine.py:f",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.9",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "actor_rollout_ref.actor.tau_pos=2.0",
        "trainer.logger=[console,mine.py:T]",
        "reward_model.rule=mine.py:f",
    ]
    assert compose_with_warnings(own)[1] == []
    for key in ("trainer.logger=[mine]", "trainer.trainer_class=mine", "reward_model.worker_class=mine.py"):
        with pytest.raises(ValueError, match=r"file\.py:name"):
            compose([key])


def test_code_is_checked_before_anything_starts(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "class NoTrainer: ...\nclass NoLog: ...\nclass NoScores: ...\n"
        "class Scores:\n    def __init__(self, spec): ...\n    def scores(self, batch): ...\n",
    )
    enable = ["reward_model.enable=true", "reward_model.model.path=x"]
    for settings, message in [
        ([f"trainer.trainer_class={file}:NoTrainer"], "must be a class derived from verl_like.trainer.ppo.PPOTrainer"),
        ([f"trainer.logger=[{file}:NoLog]"], r"must be a class with log\(step, metrics\)"),
        ([*enable, f"reward_model.worker_class={file}:NoScores"], r"must be a class with scores\(batch\)"),
        ([*enable, f"reward_model.worker_class={file}:Scores"], r"cannot be called as Scores\(spec, process\)"),
        ([f"algorithm.adv_estimator={file}:missing"], "no such name 'missing'"),
        (["algorithm.kl_penalty=/no.py:f", "algorithm.use_kl_in_reward=true"], "there is no such file"),
    ]:
        with pytest.raises(ValueError, match=message):
            raise_if_any(check_own_code(compose(settings)))


def test_a_tracker_of_ones_own(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "class T:\n"
        "    def __init__(self, config, folder, resumed_at): self.path = folder / str(config['x']) \n"
        "    def log(self, step, metrics): self.path.write_text(f'{step} {metrics}')\n",
    )
    trainer = TrainerConfig(logger=[f"{file}:T"])
    assert check_trackers(trainer) == [f"{file}:T"]
    trackers = build_trackers(trainer, {"x": "seen"}, tmp_path, resumed_at=None)
    trackers.log(3, {"a": 1.0})
    trackers.log_samples(3, [{"input": "", "output": "", "gts": "", "score": 1.0}])
    trackers.finish()
    assert (tmp_path / "seen").read_text() == "3 {'a': 1.0}" and trackers.names == []


def test_graders_may_be_references() -> None:
    choice = choose("mine.py:f", {"a*": "pkg://m:g"}, {"bonus": 2})
    assert choice.grader_of_row("abc") == "pkg://m:g" and choice.grader_of_row("b") == "mine.py:f"
    assert choice.options == {"mine.py:f": {"bonus": 2}}
    with pytest.raises(ValueError, match=r"or your own: file\.py:name"):
        choose("no_grader")


def test_frames_of_this_package_do_not_stand_before_a_users() -> None:
    def mine() -> None:
        raise KeyError("boo")

    try:
        list(problems_of(mine))
    except KeyError as error:
        assert error.__traceback__ is not None
        text = own_lines(error.with_traceback(error.__traceback__.tb_next))
    assert "in mine" in text and "errors.py" not in text
