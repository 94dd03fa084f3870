"""What can be known to be wrong before anything starts is told before anything starts, with key, value and fix."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import random
import re
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.e2e.support import main_ppo
from tests.unit.trainer import bad_configurations as bad
from verl_like.config.errors import ConfigError
from verl_like.observe.logs import told_in_a_line
from verl_like.plugins.sglang import compat
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.rollout.sampling import require_tokens_left
from verl_like.trainer import build
from verl_like.trainer.compose import compose, compose_with_warnings
from verl_like.trainer.resume import find_resume
from verl_like.trainer.start_checks import early_problems

SEED = 2026


def refusal(case: bad.Bad, folder: Path, model: Path) -> str:
    """The text that ends `verl-like plan` for this configuration. Any other error than ConfigError is raised."""
    try:
        config = compose([f"{key}={value}" for key, value in case.settings(folder, model).items()])
        with ExitStack() as stack, build.input_errors():
            build.prepare(config, stack, early_problems(config))
            find_resume(config)
    except ConfigError as error:
        return str(error)
    return "accepted"


def faults(case: bad.Bad, text: str) -> list[str]:
    """What the text lacks: the key (a section's name may be left out), the value, or more than both."""
    value = yaml.safe_load(case.value)
    shown = {case.value, case.value.strip("'"), str(value), repr(value), case.value.replace("e30", "e+30")}
    shown |= {case.value.rpartition(":")[0]}  # the file of a reference
    shown |= {str(int(value)), f"{value:,}"} if isinstance(value, float | int) and abs(value) < 1e40 else set()
    shown |= (
        {str(name) for name in value} | {str(item) for item in value.values()} if isinstance(value, dict) else set()
    )
    shown |= set(map(str, value)) if isinstance(value, list) else set()
    short = [".".join(case.key.split(".")[-2:]), f"{case.key.rpartition('.')[2]}={case.value}"]
    found = [] if any(name in text for name in (case.key, *short)) else ["key"]
    found += [] if any(each and each in text for each in shown) else ["value"]
    return found + ([] if len(text) > len(case.key) + len(case.value) + 12 else ["fix"])


def check_drawn(cases: list[bad.Bad], folder: Path, model: Path) -> list[str]:
    wrong = []
    for case in cases:
        text = refusal(case, folder, model)
        case = dataclasses.replace(case, value=case.settings(folder, model)[case.key])
        if found := ["accepted"] if text == "accepted" else faults(case, text):
            wrong.append(f"{case.key}={case.value}: {found}: {text}")
    return wrong


def test_two_hundred_bad_configurations(tmp_path: Path, tiny_model: Path) -> None:
    wrong = check_drawn(bad.drawn(200, SEED), tmp_path, tiny_model)
    assert not wrong, "\n".join(wrong)


def test_each_place_that_is_none_is_told_in_one_line(tmp_path: Path, tiny_model: Path) -> None:
    for case in bad.PLACES:
        text = refusal(case, tmp_path, tiny_model)
        shown = dataclasses.replace(case, value=case.settings(tmp_path, tiny_model)[case.key])
        assert not faults(shown, text) and "\n" not in text and text != "accepted", f"{case}: {text}"


@pytest.mark.slow
def test_all_contradictions_and_two_thousand_odd_values(tmp_path: Path, tiny_model: Path) -> None:
    chance = random.Random(SEED)
    wrong = check_drawn([*bad.CONTRADICTIONS, *chance.sample(bad.odd_values(), 2000)], tmp_path, tiny_model)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_on_the_real_command_line(launcher: str, tmp_path: Path, tiny_model: Path) -> None:
    """A sample of those: exit status 1, a message in place of a traceback, and no worker was started."""
    for case in random.Random(SEED).sample(bad.CONTRADICTIONS, 8):
        settings = {"trainer.launcher": launcher, **case.around, case.key: case.value}
        if launcher == "ray" and case.key.startswith("trainer.n"):
            continue  # what Ray may do and local may not
        case = dataclasses.replace(case, around={k: v for k, v in settings.items() if k != case.key})
        result = main_ppo([f"{key}={value}" for key, value in case.settings(tmp_path, tiny_model).items()])
        assert result.returncode == 1 and "error: " in result.stdout, result.stdout
        assert "Traceback" not in result.stdout and "worker(s)" not in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trainer.seed@there=3", "only groups go to another place"),
        ("trainer..seed=3", "'trainer..seed' is no key"),
        ("trainer .seed=3", "'trainer .seed' is no key"),
        ("trainer.log_dir=${oc.env:NO_SUCH}", "trainer.log_dir: the environment has no variable NO_SUCH; set it, or "),
        ("trainer.log_dir=${oc.evn:HOME}", "trainer.log_dir: Unsupported .*; ${oc.env:NAME} is a variable"),
    ],
)
def test_settings_that_cannot_be_read(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told).replace(r"\.\*", ".*")):
        compose([setting])


def test_the_rest_of_them_is_sound(tmp_path: Path, tiny_model: Path) -> None:
    assert refusal(bad.Bad("trainer.seed", "3"), tmp_path, tiny_model) == "accepted"


# --- the kinds of users' code ----------------------------------------------------------------------------------------

MINE = """
def reward(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


async def program(data, base_url, api_key):
    return 1.0


class World:
    def reset(self, **row):
        return None

    def get_reward(self):
        return 0.0


class Plain:
    pass


NUMBER = 7
"""
KINDS = {  # what a key takes, and the settings that name a thing of the file
    "program": lambda file, name: {f"{bad.ROLLOUT}.gateway.path": f"{file}:{name}"},
    "World": lambda file, name: {
        f"{bad.TURNS}.enable": "true",
        f"{bad.TURNS}.environment_path": f"{file}:{name}",
        "custom_reward_function.path": "null",
    },
    "reward": lambda file, name: {"custom_reward_function.path": file, "custom_reward_function.name": name},
}


@pytest.mark.parametrize("right", KINDS)
def test_code_of_another_kind(right: str, tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A reward function is no program behind the gateway, no environment, and the other way round."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    for name in ("reward", "program", "World", "Plain", "NUMBER"):
        around = {f"{bad.ROLLOUT}.agent.num_workers": "2", **KINDS[right](str(file), name)}
        key = next(key for key, value in around.items() if value.endswith(name))
        text = refusal(bad.Bad(key, around.pop(key), around), tmp_path, tiny_model)
        assert (text == "accepted") == (name == right), (name, text)
        assert name == right or (name in text and key.rpartition(".")[0] in text and "/verl_like/" not in text), text
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed(
    engine: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(compat, "installed", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    text = refusal(bad.Bad(f"{bad.ROLLOUT}.name", engine), tmp_path, tiny_model)
    assert f"rollout.name={engine}: " in text and "installed" in text and "pip install" in text


# --- addresses, arguments, errors that nobody foresaw ----------------------------------------------------------------


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_ray(answer: bytes) -> None:
    """What listens at ray_init.address, and says nothing or speaks another language, is told in a few seconds."""
    from verl_like.cluster.launch import check_joining

    with socket.create_server(("", 0)) as server:  # Ray asks for the loopback's port at the machine's own address
        server.settimeout(30)
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=lambda: accepted.append(server.accept()[0]) or accepted[0].sendall(answer))
        thread.start()
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"ray_init\.address=127\.0\.0\.1:\d+: no Ray answers .*ray start --head"):
            check_joining(f"127.0.0.1:{server.getsockname()[1]}", None, None)
        assert time.monotonic() - began < 10
        thread.join()
        accepted[0].close()


def test_an_empty_argument_is_skipped() -> None:
    config, warnings = compose_with_warnings(["", "trainer.seed=3"])
    assert config.trainer.seed == 3 and [line for line in warnings if "empty argument is skipped" in line] == warnings
    with pytest.raises(ConfigError, match="a backslash with a space"):
        compose([" "])


@pytest.mark.parametrize("has_log", [True, False])
def test_an_unforeseen_error_ends_in_a_line(has_log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    handler = logging.FileHandler(tmp_path / "run.log")
    monkeypatch.setattr(logging.getLogger("verl_like"), "handlers", [handler] if has_log else [])
    monkeypatch.setattr(logging.getLogger("verl_like"), "level", logging.DEBUG)
    with pytest.raises(SystemExit) as ended, told_in_a_line("the start"):
        raise KeyError("first line\nsecond line")
    text = str(ended.value)
    handler.close()
    assert text.startswith("error: the start failed: KeyError: ") and "\n" not in text
    (file,) = [tmp_path / "run.log"] if has_log else tmp_path.glob("verl_like_*.log")
    assert text.endswith(str(file)) and "Traceback" in file.read_text()
    with pytest.raises(KeyError), told_in_a_line("the start", over=lambda: True):
        raise KeyError("of a step")


def test_nothing_left_to_sample() -> None:
    params = SamplingParams(max_tokens=4, bad_words=((0,), (1,), (2, 3)), stop_token_ids=(2,))
    require_tokens_left(params, 3, "")
    require_tokens_left(dataclasses.replace(params, min_tokens=2), 4, "")
    with pytest.raises(ValueError, match=r"bad_words: its 2 single tokens, and before min_tokens=2 .* all 3 tokens"):
        require_tokens_left(dataclasses.replace(params, min_tokens=2), 3, "")
    with pytest.raises(ValueError, match=r"rule out all 2 tokens"):
        require_tokens_left(params, 2, "")
