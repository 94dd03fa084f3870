from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import Registry
from verl_like.config import KLControlType
from verl_like.user_code import UserCodeError

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_lookup_and_names() -> None:
    menu: Registry[int] = Registry("some.key")
    menu.register("two", "deux")(2)
    menu.register("one")(1)
    assert (menu.lookup("deux"), menu.lookup("one")) == (2, 1)
    assert menu.names() == ["deux", "one", "two"]


def test_functions_of_verls_form_are_refused_before_a_step_calls_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(token_level_rewards, response_mask, config=None, **kwargs): ...")
    told = r"takes the arguments that verl gives; here it is called with \(inputs, algorithm\)"
    with pytest.raises(UserCodeError, match=rf"algorithm.adv_estimator={file}:mine {told}"):
        ADVANTAGES.lookup(f"{file}:mine")
    with pytest.raises(UserCodeError, match="loss_mode=mine takes the arguments that verl gives"):

        @POLICY_LOSSES.register("mine")  # type: ignore[arg-type]
        def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None): ...


def test_unknown_name_says_key_names_and_a_guess() -> None:
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grop' is not known. Did you mean 'grpo'\?.*gae"):
        ADVANTAGES.lookup("grop")
    with pytest.raises(ValueError, match="'full' is not known"):
        KL_ESTIMATORS.lookup("full")


def test_a_name_is_taken_once() -> None:
    menu: Registry[int] = Registry("some.key")
    menu.register("one")(1)
    with pytest.raises(ValueError, match="registered twice"):
        menu.register("one")(2)
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator: the name 'grpo' is registered twice"):
        ADVANTAGES.register("grpo")(lambda inputs, algorithm: inputs)  # it has a row


MENUS = [ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS]


@pytest.mark.parametrize(
    ("menu", "name"), [pytest.param(m, n, id=f"{m.config_key}={n}") for m in MENUS for n in m.names()]
)
def test_every_registered_name_is_documented(menu: Registry, name: str) -> None:
    """A table row or a heading of docs/algorithms.md names it, not just running text."""
    lines = DOCS.read_text().splitlines()
    assert any(line.startswith(("|", "#")) and f"`{name}`" in line for line in lines), f"{name} has no row in {DOCS}"


def test_every_controller_type_is_documented() -> None:
    text = DOCS.read_text()
    assert all(f"`{kind}`" in text for kind in KLControlType)
