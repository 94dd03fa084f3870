"""Models and tokenizers that are not where the configuration says: the key, its value and the fix, at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from verl_like.config.errors import raise_if_any
from verl_like.models.loading import load_hf_config, load_tokenizer
from verl_like.models.location import check_location, missing_places
from verl_like.trainer.compose import compose

A = "actor_rollout_ref.model.path"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "no_such_type"}')
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{A}="], rf"{A}= is empty \(a shell variable that is not set\?\)"),
        ([f"{A}=''"], rf"{A}='': it is empty \(an unset shell variable\?\)"),
        ([f"{A}=/m", "algorithm.adv_estimator=gae", "critic.model.path="], r"^critic\.model\.path= is empty"),
    ],
)
def test_what_names_nothing_is_refused_with_the_configuration(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(settings)


def test_a_critic_that_is_not_there_does_not_matter_without_one() -> None:
    compose([f"{A}=/m", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "critic.model.path=hdfs://x"])


def test_folders(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_location(A, str(model), "config.json")
    monkeypatch.setenv("HOME", str(model.parent))
    check_location(A, "~/model", "config.json")
    for path, message in [
        (f"{model.parent}/modle", rf"{A}=.*/modle: there is no such folder .*did you mean .*/model\?"),
        ("~/no/where", rf"{A}=~/no/where: there is no such folder .*only {model.parent} exists"),
        ("../x/y/z", "there is no such folder"),
        (str(model.parent), "no config.json"),
        (f"{model}/config.json", "is a file; name the model's folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_location(A, path, "config.json")
    check_location("data.tokenizer", str(model.parent), "tokenizer_config.json")
    run = model.parent / "run"
    for step in ("global_step_5", "global_step_10"):
        (run / step / "actor" / "huggingface").mkdir(parents=True)
        (run / step / "actor" / "huggingface" / "config.json").touch()
    newest = run / "global_step_10" / "actor" / "huggingface"
    for folder in (run, run / "global_step_10", newest.parent):
        with pytest.raises(ValueError, match=rf"no config.json, .* as {newest}: name that"):
            check_location(A, str(folder), "config.json")


def test_every_role_names_its_own_key(model: Path) -> None:
    settings = [f"{A}={model}", "critic.model.path=/no/critic", "algorithm.adv_estimator=gae"]
    with pytest.raises(ValueError, match=r"^critic\.model\.path=/no/critic: there is no such folder"):
        raise_if_any(missing_places(compose(settings)).values())
    settings = [f"{A}={model}", "reward_model.enable=true", f"reward_model.model.path={model}"]
    with pytest.raises(ValueError, match=r"^reward_model\.model\.input_tokenizer=/no/t"):
        raise_if_any(missing_places(compose([*settings, "reward_model.model.input_tokenizer=/no/t"])).values())


def test_a_hub_name_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test has a network: the client's one request is replaced."""
    asked: list[tuple[str, float]] = []

    def answer(url: str, timeout: float) -> None:
        asked.append((url, timeout))
        raise ConnectionError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    monkeypatch.chdir(tmp_path)
    looked = (
        rf"{A}=some/model: there is no folder {tmp_path}/some/model \(a relative path counts from the current folder"
    )
    with pytest.raises(ValueError, match=rf"{looked}\); only {tmp_path} exists; .*no route.*hf download"):
        check_location(A, "some/model", "config.json")
    assert len(asked) == 1 and asked[0][1] <= 10 and "some/model/resolve/main/config.json" in asked[0][0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=rf"{A}=some/model: .*nor is it in the hub's cache .*HF_HUB_OFFLINE is set"):
        check_location(A, "some/model", "config.json")
    assert len(asked) == 1
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    check_location(A, "some/model", "config.json")


def test_a_tokenizer_on_the_hub_needs_only_one_of_its_usual_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, there = [], ["tokenizer.json"]

    def answer(url: str, timeout: float) -> None:
        asked.append(url.rpartition("/")[2])
        if asked[-1] not in there:
            raise EntryNotFoundError("404")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    check_location("data.tokenizer", "some/model", "tokenizer_config.json", "tokenizer.json")
    assert asked == ["tokenizer_config.json", "tokenizer.json"]
    there.clear()
    with pytest.raises(ValueError, match=r"has no tokenizer_config\.json or tokenizer\.json"):
        check_location("data.tokenizer", "some/model", "tokenizer_config.json", "tokenizer.json")


def test_no_arguments_at_all_name_the_default_before_anything_starts(tmp_path: Path) -> None:
    """A fresh interpreter: `python -m verl_like.trainer.main_ppo`, and what it had imported at its end."""
    script = (
        "import sys; from verl_like.trainer.main_ppo import main; sys.argv[1:] = []\n"
        "try: main()\nfinally: print('ray' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
                         cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 1 and run.stdout == "False\n", run.stderr
    for key in (A, "data.train_files", "data.val_files"):
        assert f"{key} is not set (its default is an example, which is not on this machine): name " in run.stderr
    assert not any(word in run.stderr for word in ("Traceback", "deepseek", "gsm8k")) and not [*tmp_path.iterdir()]


def test_a_folder_without_a_tokenizer(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, bare = make_tiny_model(), tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"^{A}={bare}.*tokenizer.*data\.tokenizer"):
        load_tokenizer(str(bare))
    with pytest.raises(ValueError, match=r"^data\.tokenizer=.*/bare"):
        load_tokenizer(str(bare), key="data.tokenizer")


def test_a_config_that_transformers_refuses(model: Path) -> None:
    config = compose([f"{A}={model}"]).actor_rollout_ref.model
    with pytest.raises(ValueError, match=rf"^{A}={model}: its config\.json cannot be used: .*no_such_type"):
        load_hf_config(config, A)
