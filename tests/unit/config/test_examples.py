"""The command lines of recipes/examples compose and plan, or are refused for the one key that is not built yet."""

import re
from pathlib import Path

import pytest

from verl_like.config.batch_plan import BatchPlan
from verl_like.trainer.compose import compose

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "examples"
REFUSED = {}
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def overrides(script: Path) -> list[str]:
    """The arguments of the command, as the shell passes them."""
    command = script.read_text().split("verl_like.trainer.main_ppo", 1)[1]
    words = re.findall(r"^ {4}(\S+) \\$", command, re.MULTILINE)
    return [word.replace("$HOME", "/data").replace("'", "") for word in words]


def test_there_are_about_twenty():
    assert len(SCRIPTS) >= 20
    assert set(REFUSED) <= {script.stem for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example(script):
    words = overrides(script)
    assert len(words) > 8
    if script.stem in REFUSED:
        with pytest.raises(ValueError) as caught:
            compose(words)
        (problem,) = caught.value.problems  # pyright: ignore
        assert problem.startswith(REFUSED[script.stem] + "=") and "not available yet" in problem
        return
    config = compose(words)
    assert config.trainer.experiment_name == script.stem
    per_node = config.trainer.n_gpus_per_node
    BatchPlan.build(config, config.trainer.nnodes * (1 if per_node == "auto" else int(per_node)), 7473)
