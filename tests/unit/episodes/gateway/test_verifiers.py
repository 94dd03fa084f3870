"""Environments of the real package verifiers, unmodified, behind the gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.conftest import load_script
from tests.unit.episodes.gateway.test_gateway import Policy, served, written
from verl_like.plugins.agents.gateway.session import Session

RECIPE = Path(__file__).parents[4] / "recipes" / "verifiers"
# What pip is asked for, without what it needs: the rest is there, or comes with the list
PACKAGES = [
    *("verifiers==0.1.14", "aiofiles==25.1.0", "aiolimiter==1.3.0", "connectrpc==0.11.1", "datasets==4.6.1"),
    *("multiprocess==0.70.18", "prime-sandboxes==0.5.1", "protobuf-py==0.1.1", "protobuf-py-ext==0.1.1"),
    *("openai-agents==0.24.0", "griffelib==2.4.1", "pyqwest==0.12.0", "tenacity==9.2.1", "xxhash==4.1.0"),
]
GUESS = """
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    @vf.stop
    async def found(self, state):
        return state.get("found", False)

    async def env_response(self, messages, state, **more):
        if not messages[-1].content.isdigit():
            raise vf.ToolError("not a number")
        said = int(messages[-1].content)
        state["found"] = said == int(state["answer"])
        return [{"role": "user", "content": "right" if state["found"] else "higher"}]


def load_environment(count):
    async def right(state):
        return float(state.get("found", False))

    async def turns(state):
        return float(len(state["trajectory"]))

    rows = [{"question": f"Guess number {i}.", "answer": str(i)} for i in range(count)]
    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.0])
    return Guess(dataset=Dataset.from_list(rows), system_prompt="You guess.", max_turns=4, rubric=rubric)
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's program, with an environment of somebody's."""
    folder = tmp_path / "packages"
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "10"]
    run = subprocess.run([*line, "--target", str(folder), *PACKAGES], capture_output=True, text=True, timeout=240)
    if run.returncode != 0:
        pytest.skip(f"pip cannot fetch {PACKAGES[0]}: {run.stderr.strip()[-200:]}")
    (folder / "guess_number.py").write_text(GUESS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder), str(RECIPE)])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return load_script(RECIPE / "play.py", "verifiers_play")


@pytest.mark.engines
@pytest.mark.timeout(400)
def test_an_environment_of_verifiers_is_an_episode(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = load_script(RECIPE / "prepare.py", "verifiers_prepare")
    for words, told in (
        (["no-such"], "Ensure the package"),
        (["guess-number", "--arguments", "{count: 3}"], "no JSON"),
    ):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *words, "--out", str(tmp_path / "rows")])
        with pytest.raises(SystemExit):
            prepare.main()
        assert told in capsys.readouterr().err.splitlines()[-1]
    (file,) = prepare.write("guess-number", '{"count": 3}', tmp_path / "rows")
    row = pq.read_table(file).to_pylist()[2]
    assert [said["role"] for said in row["prompt"]] == ["system", "user"] and len(pq.read_table(file)) == 3
    policy = Policy(lambda context: str(context.count("higher")))
    found: list[Any] = []

    async def talk(url: str, key: str, session: Session) -> None:
        found.append(await play.run(row, f"{url}/v1", key))

    _, turns = served(policy, talk, total=2000, response=100)
    (told,) = found  # its way: it looks for the end after the policy has seen that it is right
    assert (told["reward"], told["right"], told["turns"]) == (1.0, 1.0, 4.0)
    assert written(turns) == ["0<|im_end|>1<|im_end|>2<|im_end|>2<|im_end|>"] and "Guess number 2." in policy.asked[0]


@pytest.mark.engines
@pytest.mark.timeout(400)
def test_an_environment_that_fails_gives_no_reward(play: Any) -> None:
    """verifiers itself would go on with a reward of 0."""
    example = {"prompt": [{"role": "user", "content": "?"}], "answer": "1", "example_id": 0}
    row = {
        "extra_info": {
            "verifiers": {"name": "guess-number", "arguments": '{"count": 2}', "example": json.dumps(example)}
        }
    }

    async def talk(url: str, key: str, session: Session) -> None:
        with pytest.raises(RuntimeError, match=r"guess-number: .*not a number"):
            await play.run(row, f"{url}/v1", key)

    served(Policy(lambda context: "not a number"), talk, total=2000, response=100)
