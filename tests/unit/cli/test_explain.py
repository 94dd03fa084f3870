"""`verl-like explain`."""

from __future__ import annotations

import re

import pytest

from verl_like.cli.main import main
from verl_like.config.errors import ConfigError
from verl_like.config.names import VERL, table
from verl_like.config.schema import keys
from verl_like.config.spellings import renamed
from verl_like.kit.explaining import explain, other_names

KL = "actor_rollout_ref.actor.kl_loss_coef"


def test_a_key_in_two_configurations() -> None:
    alone = dict(explain(KL))
    assert alone["meaning"] == keys()[KL].doc and alone["type"] == "float" and alone["default"] == "0.001"
    assert alone["here"] == "0.001 (not set)"
    assert (
        alone["effect here"] == "none: actor_rollout_ref.actor.use_kl_loss is false" == "none: " + alone["no effect if"]
    )
    assert "algorithms.objectives" in alone["read by"] and "use_kl_loss" in alone["beside it"]
    assert "ROLL's kl_loss_coef" in alone["other names"]
    used = dict(explain(KL, ["algorithm=grpo", "actor_rollout_ref.actor.use_kl_loss=true", f"{KL}=0.02"]))
    assert (used["here"], used["effect here"]) == ("0.02 (set)", "yes")


def test_what_follows_a_key_is_named_and_keeps_it_from_being_idle() -> None:
    key = "actor_rollout_ref.actor.ppo_epochs"
    assert "critic.ppo_epochs" in dict(explain(key))["follow it"]


def test_sections_choices_and_old_spellings() -> None:
    section = explain("algorithm.filter_groups")
    assert [name for name, _ in section] == [key for key in keys() if key.startswith("algorithm.filter_groups.")]
    assert dict(explain("trainer.launcher"))["type"] == "one of ray, local"
    old = dict(explain("critic.optim.clip_grad"))
    assert old["key"] == "critic.grad_clip (critic.optim.clip_grad is another spelling)"
    assert "critic.optim.clip_grad" in old["other names"]
    ((_, dropped),) = explain("trainer.use_v1")
    assert dropped == "accepted and left out: there is one trainer"
    deprecated = dict(explain("critic.ppo_micro_batch_size"))
    assert deprecated["deprecated"] == "use critic.ppo_micro_batch_size_per_gpu"


def test_presets_and_names_of_menus_lead_to_what_is_known_of_them() -> None:
    both = dict(explain("grpo"))
    assert list(both) == ["preset=grpo", "algorithm.adv_estimator=grpo"]
    assert (
        "std_g" in both["algorithm.adv_estimator=grpo"]
        and "source: DeepSeekMath" in both["algorithm.adv_estimator=grpo"]
    )
    ((name, text),) = explain("preset=dapo")
    assert name == "preset=dapo" and text.startswith("DAPO (arXiv 2503.14476): clip-higher")
    assert {"preset=dapo", "preset=ppo"} < {name for name, _ in explain("preset")}
    ((name, _),) = explain("actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert name.endswith("loss_mode=gspo")


def test_a_key_as_it_stands_on_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("~trainer.seed", "+trainer.seed=3", "trainer.seed."):
        main(["explain", name])
        assert capsys.readouterr().out.splitlines()[0].split() == ["key", "trainer.seed"]
    assert "(false: Dr. GRPO)" in dict(explain("algorithm"))["algorithm.norm_adv_by_std_in_grpo"]
    strategy = dict(explain("actor_rollout_ref.actor.strategy"))
    assert strategy["type"] == "one of fsdp2, megatron"
    assert strategy["effect here"].startswith("none: FSDP2 shards every model")


def test_every_other_name_of_verls_leads_there() -> None:
    found = {name: key for key in keys() for name in other_names(key) if "'s " not in name}
    assert len(found) > sum(row.renames for row in table(VERL)) and all(
        renamed(name) == key for name, key in found.items()
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("actor_rollout_ref.actor.clip_ratio_hihg", "did you mean actor_rollout_ref.actor.clip_ratio_high?"),
        ("clip_ratio_hihg", "Similar: actor_rollout_ref.actor.clip_ratio_high"),
        ("num_return_sequences_in_group", "is our actor_rollout_ref.rollout.n"),
        ("lite_pp", "did you mean preset=lite_ppo?"),
        ("clip_cov_rat", "Similar: actor_rollout_ref.actor.policy_loss.clip_cov_ratio"),
    ],
)
def test_a_key_that_there_is_not(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(name)
    assert message in str(caught.value)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "data.train_batch_size", "data.train_batch_size=32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "data.train_batch_size"]
    assert any(line.split()[:2] == ["unit", "prompts"] for line in lines)
    assert any(line.startswith("here") and line.endswith("32 (set)") for line in lines)
    with pytest.raises(SystemExit, match=r"^error: there is no key data\.train_batch_sise"):
        main(["explain", "data.train_batch_sise"])


@pytest.mark.parametrize("name", ["actor_rollout_ref.actor.clip_ration", "clip_ratio_loww", "trainer.save_frequ"])
def test_a_key_that_is_not_there_is_answered_with_each_other_one_once(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", name])
    told = str(ended.value.code)
    keys = re.findall(r"\w+(?:\.\w+)+", told.removeprefix(f"error: there is no key {name}"))
    assert keys and len(keys) == len(set(keys)) and "?." not in told and told.count("Similar:") <= 1
