"""The register of rules: what is registered is checked, explained and documented; the engine writes keys and values."""

from __future__ import annotations

import pytest

from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.rule import RULES, Findings, all_rules, idle, idle_lines, impossible, risky, rule
from verl_like.config.rules import check
from verl_like.kit.docs.configuration import page
from verl_like.kit.explaining import explain

SEED, EPOCHS, LOG = "trainer.seed", "trainer.total_epochs", "trainer.log_dir"


@pytest.fixture(autouse=True)
def copy_of_the_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_like.config.rule.RULES", [*RULES])


def test_a_rule_is_checked_explained_and_documented() -> None:
    @rule(SEED, "total_epochs", reads=("data.seed",))
    def seed_and_epochs(config: PPOConfig) -> Findings:
        """A seed is another number than that of the epochs."""
        if config.trainer.seed == config.trainer.total_epochs:
            return "too alike; set another seed"

    config = PPOConfig()
    assert check(config) == []
    config.trainer.seed = 30
    with pytest.raises(ConfigError, match=r"^trainer\.seed=30 with trainer\.total_epochs=30: too alike; set another"):
        check(config)
    says = "A seed is another number than that of the epochs."
    for key in (SEED, EPOCHS, "data.seed"):
        assert ("rule", says) in explain(key)
    assert ("rule", says) not in explain(LOG)
    assert f"| {says} | what breaks it is refused | `{SEED}`, `{EPOCHS}`, `data.seed` |" in page()


def test_a_rule_may_warn_give_several_reasons_and_name_keys_at_run_time() -> None:
    before = risky(PPOConfig())

    @rule(SEED, "log_dir", kind="risky", reads=("trainer.logger_kwargs",))
    def several(config: PPOConfig) -> Findings:
        """Three reasons."""
        yield "of the rule's keys"
        yield (SEED, "total_epochs", "data.seed"), "of three"
        yield ("trainer.logger_kwargs.wandb.entity",), "in an open dictionary"

    config = PPOConfig()
    config.trainer.log_dir, config.trainer.logger_kwargs = " ", {"wandb": {"entity": "me"}}
    assert [line for line in risky(config) if line not in before] == [
        "trainer.seed=1 with trainer.log_dir=' ': of the rule's keys",
        "trainer.seed=1 with trainer.total_epochs=30 and data.seed=None: of three",
        "trainer.logger_kwargs.wandb.entity=me: in an open dictionary",
    ]
    assert risky(config, "test_rule") == [line for line in risky(config) if line not in before]
    assert impossible(config, "test_rule") == []


def test_the_first_reason_why_a_key_is_idle_is_said() -> None:
    idle(SEED, "log_dir", when=lambda c: c.trainer.total_epochs > 1, why="there are several epochs")
    idle("trainer.", when="data.seed is null: the sampler has none")
    lines = idle_lines(PPOConfig(), frozenset((SEED, EPOCHS, "data.prompt_key")))
    assert lines == [
        "trainer.seed has no effect in this run: there are several epochs",
        "trainer.total_epochs has no effect in this run: data.seed is null: the sampler has none",
    ]
    assert ("no effect if", "there are several epochs") in explain(LOG)
    assert "| there are several epochs | no effect, and a warning | `trainer.seed`, `trainer.log_dir` |" in page()


STATES = [("set", False), ("not set", True), ("null", True), ("empty", True), ("x", False), ("not x", True)]


@pytest.mark.parametrize("state, holds", STATES)
def test_states_are_those_of_a_value(state: str, holds: bool) -> None:
    idle(SEED, when=f"trainer.log_dir is {state}: why")
    assert bool(idle_lines(PPOConfig(), frozenset((SEED,)))) is holds


def test_every_rule_says_what_holds() -> None:
    said = [each for each in all_rules() if each.keys]
    assert len(said) > 200
    assert [each for each in said if not each.says] == []
