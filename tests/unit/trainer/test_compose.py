"""From a command line to PPOConfig: precedence, files, groups, strictness, printing and saving."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.schema import get_value, to_dict
from verl_like.trainer import compose as module
from verl_like.trainer.command_line import run_main
from verl_like.trainer.compose import compose, compose_with_warnings, save_resolved

CONFIG_DIR = Path(module.__file__).parent / "config"


def problems(*overrides: str, files=()) -> str:
    with pytest.raises(ValueError) as caught:
        compose(overrides, files)
    return str(caught.value)


def test_yaml_holds_no_default_of_its_own():
    """Composed without overrides, the files change nothing but keys that follow another."""
    composed, plain = to_dict(compose()), to_dict(PPOConfig())
    composed["trainer"]["default_local_dir"] = plain["trainer"]["default_local_dir"]
    assert composed == plain


def test_every_shipped_yaml_composes():
    groups = sorted(path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.glob("*/*.yaml"))
    assert {path.parent.name for path in groups} == set(module.GROUPS)
    for path in groups:
        extra = ["actor_rollout_ref.rollout.n=2"] if path.stem == "grpo" else []
        compose([f"{path.parent.name}={path.stem}", *extra])


def test_overrides_reach_their_dataclass_with_types():
    config = compose(
        [
            "data.train_files=/a/b.parquet",
            "data.val_files=['/c d.parquet','/e.parquet']",
            "actor_rollout_ref.actor.optim.lr=3e-6",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "+actor_rollout_ref.model.override_config.attention_dropout=0.1",
            "trainer.n_gpus_per_node=8",
            "trainer.logger=[console,wandb]",
            "trainer.experiment_name=run_1",
            "actor_rollout_ref.actor.optim={weight_decay: 0.5}",
        ]
    )
    assert config.data.train_files == ["/a/b.parquet"]
    assert config.data.val_files == ["/c d.parquet", "/e.parquet"]
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr, actor.clip_ratio_high, actor.optim.weight_decay) == (3e-6, 0.28, 0.5)
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.1}
    assert config.trainer.n_gpus_per_node == 8
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/run_1"


def test_a_wrong_value_that_others_follow_is_told_once_and_theirs_where_they_have_their_own():
    key = "actor_rollout_ref.actor.loss_agg_mode"
    for settings, wanted in (
        ([f"{key}=mean"], [key]),
        ([f"{key}=mean", "critic.loss_agg_mode=sum"], [key, "critic.loss_agg_mode"]),
    ):
        with pytest.raises(ConfigError) as caught:
            compose(settings)
        assert [text.partition("=")[0] for text in caught.value.problems] == wanted


def test_followers_follow_and_can_be_set_apart():
    config = compose(
        [
            "data.max_prompt_length=100",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000",
            "actor_rollout_ref.model.path=/m",
            "critic.ppo_epochs=3",
        ]
    )
    assert config.actor_rollout_ref.rollout.prompt_length == 100
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 5000
    assert (config.critic.ppo_mini_batch_size, config.critic.model.path) == (8, "/m")
    assert (config.critic.ppo_epochs, config.actor_rollout_ref.actor.ppo_epochs) == (3, 1)


def test_a_bare_tilde_and_an_interpolation_on_the_command_line():
    config = compose(["data.train_files=~/x.parquet", "critic.model.path=${actor_rollout_ref.model.path}/value"])
    assert config.data.train_files == ["~/x.parquet"]
    assert config.critic.model.path == "~/models/deepseek-llm-7b-chat/value"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_keys_are_refused_with_a_suggestion(prefix):
    text = problems(f"{prefix}actor_rollout_ref.actor.optim.lrr=1")
    assert "unknown key actor_rollout_ref.actor.optim.lrr; did you mean actor_rollout_ref.actor.optim.lr?" in text


def test_unknown_keys_inside_a_dictionary_and_a_file_are_refused(tmp_path):
    assert "unknown key trainer.total_epoch;" in problems("trainer={total_epoch: 1}")
    file = tmp_path / "mine.yaml"
    file.write_text("trainer:\n  total_epoch: 1\n")
    assert "unknown key trainer.total_epoch;" in problems(files=[file])


def test_all_faults_are_listed_at_once():
    text = problems("data.train_batch_sizes=1", "~data.seed", "data.train_batch_size=1,2", "critic=3", "a b=")
    assert text.startswith("5 problems")
    text = problems("data.max_prompt_length=abc", "actor_rollout_ref.actor.strategy=ddp")
    assert "data.max_prompt_length='abc'" in text and "expected one of [fsdp2, megatron]" in text
    text = problems("actor_rollout_ref.actor.clip_ratio=-1", "critic.grad_clip=0")
    assert "actor_rollout_ref.actor.clip_ratio=-1.0: must be at least 0" in text
    assert "critic.grad_clip=0.0: must be above 0" in text


def test_a_broken_interpolation_is_named():
    assert "actor_rollout_ref.model.pat" in problems("critic.model.path=${actor_rollout_ref.model.pat}")


def test_groups():
    config = compose(["algorithm=grpo", "rollout@actor_rollout_ref.rollout=hf", "actor_rollout_ref.rollout.n=4"])
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.name) == ("grpo", "hf")
    assert compose(["trainer=debug"]).trainer.launcher == "local"
    assert problems("rollout=trt") == "rollout=trt: choose one of hf, rollout"
    assert problems("preset=dapoo").endswith("topr; did you mean dapo?")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("trainer.project_name=/data/a=b", "trainer.project_name", "/data/a=b"),
        ("trainer.project_name=Küche 中", "trainer.project_name", "Küche 中"),
        ("trainer.project_name=a#b;c", "trainer.project_name", "a#b;c"),
        ("data.train_files=~/ö.parquet", "data.train_files", ["~/ö.parquet"]),
    ],
)
def test_plain_values_may_hold_what_hydras_grammar_has_not(text: str, key: str, value: object) -> None:
    assert get_value(compose([text]), key) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data.train_files=[a,ä]",
            "cannot read 'data.train_files=[a,ä]': write key=value, and quote what stands in it",
        ),
        ("trainer.project_name=a(b)", "in two pairs of quotes: 'trainer.project_name=\"a(b)\"'"),
        ("data.max_prompt_length=$((2*3))", "$(...) is left to the shell in double quotes"),
        ("data.train_files =a", "without spaces around the ="),
        ("=5", "cannot read '=5': write key=value"),
        ("~critic", "~critic: keys cannot be deleted; leave it out, or set what you want"),
        ("~data.seed", "~data.seed: keys cannot be deleted; set data.seed=null"),
        ("data.seed=1\r", "data.seed=1: the script has the line ends of Windows"),
        ("\r", "the script has the line ends of Windows"),
        ("actor_rollout_ref.rollout.n=null", "actor_rollout_ref.rollout.n=null: it must have a value"),
        ("trainer.default_local_dir=", "trainer.default_local_dir= is empty (a shell variable that is not set?)"),
        (
            "data.tokenizer=${HOME}/a",
            "data.tokenizer: Interpolation key 'HOME' not found; a variable of the environment",
        ),
        ("actor_rollout_ref.actor.optim.lr=inf", "lr=inf: must be a finite number, at least 0"),
        ("actor_rollout_ref.actor.clip_ratio_c=nan", "clip_ratio_c=nan: must be a finite number, above 1"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_fix(text: str, message: str) -> None:
    assert message in problems(text)


def test_an_unset_variable_is_null_where_a_text_may_be_missing() -> None:
    config, warnings = compose_with_warnings(["trainer.rollout_data_dir="])
    assert config.trainer.rollout_data_dir is None
    assert warnings == ["trainer.rollout_data_dir= is empty (a shell variable that is not set?): it counts as null"]


@pytest.mark.parametrize("name", ["ppo_torchtitan_trainer", "ppo_veomni_trainer.yaml"])
def test_verls_other_trainers_are_refused_by_name(name: str) -> None:
    with pytest.raises(SystemExit, match=f"--config-name={name}: training by (torchtitan|veomni) is not available"):
        run_main(lambda config: None, ["--config-path=config", f"--config-name={name}"])


def test_a_users_yaml_stands_between_defaults_and_the_command_line(tmp_path):
    (tmp_path / "base.yaml").write_text("data:\n  train_batch_size: 512\n  max_prompt_length: 64\n")
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath: [file://x]\n"
        "defaults:\n  - ppo_trainer\n  - base\n  - rollout@actor_rollout_ref.rollout: hf\n  - _self_\n"
        "data:\n  max_prompt_length: 128\n  train_files: /t.parquet\n"
        "critic:\n  fsdp:\n    param_offload: true\n"
        "trainer:\n  experiment_name: x\n  logger: tracking\n"
    )
    config, warnings = compose_with_warnings(["data.max_response_length=32"], [tmp_path / "mine.yaml"])
    assert (config.data.train_batch_size, config.data.max_prompt_length) == (512, 128)
    assert config.data.max_response_length == config.actor_rollout_ref.rollout.response_length == 32
    assert config.data.train_files == ["/t.parquet"] and config.trainer.logger == ["wandb"]
    assert config.actor_rollout_ref.rollout.name == "hf"
    assert config.critic.model.fsdp_config.param_offload is True
    assert any(line.startswith("critic.fsdp.param_offload is another spelling") for line in warnings)


def test_hydra_overrides_say_that_they_do_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, warnings = compose_with_warnings(["hydra.run.dir=x", "hydra/job_logging=disabled"])
    assert len(warnings) == 2 and "has no effect" in warnings[0]
    assert list(tmp_path.iterdir()) == []


def test_run_main_runs_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[PPOConfig] = []
    run_main(seen.append, ["data.train_batch_size=8"])
    assert seen[0].data.train_batch_size == 8
    assert list(tmp_path.iterdir()) == []


def test_faults_end_the_program_with_text_not_a_traceback():
    with pytest.raises(SystemExit) as caught:
        run_main(lambda config: pytest.fail("must not run"), ["data.train_batch_sise=8"])
    assert "error: unknown key data.train_batch_sise" in str(caught.value.code)
    with pytest.raises(SystemExit):
        run_main(lambda config: pytest.fail("must not run"), ["--multirun", "data.seed=1"])


def test_cfg_job_prints_and_does_not_run(capsys):
    run_main(lambda config: pytest.fail("must not run"), ["--cfg", "job", "data.train_batch_size=8"])
    shown = OmegaConf.create(capsys.readouterr().out)
    assert OmegaConf.to_container(shown)["data"]["train_batch_size"] == 8  # pyright: ignore
    assert OmegaConf.to_container(shown)["critic"]["ppo_epochs"] == "${actor_rollout_ref.actor.ppo_epochs}"  # pyright: ignore
    run_main(lambda config: pytest.fail("must not run"), ["--cfg", "job", "--resolve"])
    assert "${" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.enable=false"], "critic.enable=False with algorithm.adv_estimator=gae"),
        (["actor_rollout_ref.actor.clip_ratio=-1"], "actor_rollout_ref.actor.clip_ratio=-1.0: must be at least 0"),
        (["trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "must divide the"),
    ],
)
def test_cfg_job_ends_with_what_is_wrong(overrides, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run_main(lambda config: pytest.fail("must not run"), ["--cfg", "job", *overrides])
    assert message in str(caught.value.code)
    assert "train_batch_size: 1024" in capsys.readouterr().out


def test_cfg_job_warns(caplog):
    run_main(lambda config: pytest.fail("must not run"), ["--cfg", "job", "actor_rollout_ref.actor.kl_loss_coef=0.1"])
    assert "kl_loss_coef has no effect in this run" in caplog.text


def test_verls_idiom_names_the_entry_config(tmp_path, monkeypatch):
    seen: list[PPOConfig] = []
    idiom = ["--config-path=config", "--config-name=ppo_trainer"]
    run_main(seen.append, [*idiom, "data.seed=3"])
    run_main(seen.append, ["--config-path", "./config", "--config-name", "ppo_trainer.yaml", "data.seed=3"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ppo_trainer.yaml").write_text("data: {seed: 4}")
    run_main(seen.append, idiom)  # a file of the user's own wins
    assert [config.data.seed for config in seen] == [3, 3, 4]
    with pytest.raises(SystemExit, match="there is no file"):
        run_main(seen.append, ["--config-path=elsewhere", "--config-name=ppo_trainer"])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.train_batch_size=1e3", "train_batch_size", 1000),
        ("data.val_batch_size=1e2", "val_batch_size", 100),
        ("data.return_raw_chat=", "return_raw_chat", False),
        ("data.shuffle=", "shuffle", False),
    ],
)
def test_values_that_shells_and_habits_write(override, key, value):
    found = getattr(compose([override]).data, key)
    assert found == value and type(found) is type(value)


def test_values_that_cannot_be_meant_are_explained():
    assert "data.train_batch_size= is empty (a shell variable that is not set?)" in problems("data.train_batch_size=")
    assert "data.train_batch_size=1000.5" in problems("data.train_batch_size=1000.5")
    assert "in a shell script a backslash with a space after it ends the command" in problems("data.seed=1", " ")
    assert "profile_steps=[0]: steps are counted from 1" in problems("trainer.profile_steps=[0]")


def test_lenient_values_of_verls_scripts():
    config = compose(
        ["trainer.test_freq=False", "custom_reward_function.name=null", "actor_rollout_ref.model.lora_alpha=0",
         "actor_rollout_ref.model.lora_rank=0", "trainer.n_gpus_per_node='8'"]
    )  # fmt: skip
    assert (config.trainer.test_freq, config.trainer.n_gpus_per_node) == (-1, 8)
    assert config.custom_reward_function.name == "compute_score"
    assert "lora_alpha=0.0: must be above 0" in problems(
        "actor_rollout_ref.model.lora_alpha=0", "actor_rollout_ref.model.lora_rank=8"
    )


def test_a_key_with_two_values_is_named(tmp_path):
    (tmp_path / "own.yaml").write_text("data: {seed: 1}")
    given = ["data.seed=2", "data.seed=3", "data.shuffle=true", "data.shuffle=true"]
    config, warnings = compose_with_warnings(given, [tmp_path / "own.yaml"])
    assert config.data.seed == 3
    assert warnings == ["data.seed is given 2 times (2, 3): the last one counts"]


def test_what_a_later_value_replaces_is_not_looked_at(tmp_path):
    """A script's own values, before those of its caller ("$@"); null after a value is the default again."""
    (tmp_path / "own.yaml").write_text("trainer: {device: npu}\nreward_model: {reward_manager: dapo}")
    replaced = ["trainer.nnodes=", "actor_rollout_ref.rollout.name=trtllm", "critic.optim.warmup_style=cosine"]
    given = ["trainer.device=cpu", "trainer.nnodes=1", "actor_rollout_ref.rollout.name=hf"]
    nulls = ["critic.optim.lr_scheduler_type=null", "reward_model.reward_manager=null"]  # the first by another name
    config, warnings = compose_with_warnings([*replaced, *given, *nulls], [tmp_path / "own.yaml"])
    assert (config.trainer.device, config.trainer.nnodes, config.actor_rollout_ref.rollout.name) == ("cpu", 1, "hf")
    assert config.critic.optim.warmup_style == PPOConfig().critic.optim.warmup_style
    assert config.reward_model.reward_manager == PPOConfig().reward_model.reward_manager
    assert not any("trtllm becomes" in warning for warning in warnings)


def test_flags_of_other_projects_are_answered(capsys):
    with pytest.raises(SystemExit):
        run_main(lambda config: pytest.fail("must not run"), ["--num-generations", "8", "--lora"])
    message = capsys.readouterr().err
    assert (
        "Colossal-RL's and TRL's --num-generations is our actor_rollout_ref.rollout.n; unknown option --lora" in message
    )


def test_the_saved_config_composes_to_the_same_run(tmp_path):
    overrides = ["algorithm=grpo", "actor_rollout_ref.rollout.n=4", "data.train_files=[a,b]", "critic.ppo_epochs=2"]
    config = compose(overrides)
    save_resolved(config, tmp_path / "runs" / "config.yaml")
    assert compose_with_warnings([], [tmp_path / "runs" / "config.yaml"])[1] == compose_with_warnings(overrides)[1]
    seen: list[PPOConfig] = []
    run_main(seen.append, ["--config-path", str(tmp_path / "runs"), "--config-name", "config"])
    assert seen == [config]


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(SystemExit) as caught:
        run_main(lambda config: None, ["--config-path", str(tmp_path), "--config-name", "nope"])
    assert "there is no file" in str(caught.value.code)


def test_a_preset_sets_several_sections_and_the_user_wins(tmp_path):
    config, _ = compose_with_warnings(["algorithm=ppo", "preset=dapo", "algorithm.filter_groups.metric=acc"])
    actor = config.actor_rollout_ref.actor
    assert (config.algorithm.adv_estimator, actor.clip_ratio_high, actor.clip_ratio_c) == ("grpo", 0.28, 10.0)
    assert (config.algorithm.filter_groups.metric, config.actor_rollout_ref.rollout.n) == ("acc", 16)
    (tmp_path / "own.yaml").write_text(
        "defaults:\n  - preset: dapo\n  - _self_\nactor_rollout_ref:\n  rollout:\n    n: 4\n"
    )
    own, _ = compose_with_warnings([], [tmp_path / "own.yaml"])
    assert (own.actor_rollout_ref.rollout.n, own.reward_model.overlong_buffer.enable) == (4, True)
    with pytest.raises(ValueError, match="dapoo"):
        compose_with_warnings(["preset=dapoo"])


def test_validation_files_may_be_a_dictionary_of_names(tmp_path):
    config = compose(["data.val_files={easy: a.parquet, hard: [b.jsonl, c.csv]}"])
    assert config.data.val_files == {"easy": "a.parquet", "hard": ["b.jsonl", "c.csv"]}
    file = tmp_path / "mine.yaml"
    file.write_text("data: {val_files: {easy: a.parquet}, domain_weights: {openai/gsm8k: 2}}")
    config = compose(["data.domain_weights={math: 1}"], [file])
    assert config.data.val_files == {"easy": "a.parquet"}
    assert config.data.domain_weights == {"openai/gsm8k": 2, "math": 1}
    assert compose(["data.val_files=b.parquet"], [file]).data.val_files == ["b.parquet"]  # a list replaces it
    with pytest.raises(ValueError, match="val_files=3: give a path, a list of paths or a dictionary"):
        compose(["data.val_files=3"])


@pytest.mark.parametrize("overrides", [None, [("seed", 1)], 7, "trainer.seed=1"])
def test_overrides_of_another_kind_are_told(overrides):
    with pytest.raises(ConfigError, match="give a list of key=value texts, or a dictionary"):
        compose(overrides)


def test_one_file_is_a_list_of_one(tmp_path):
    with pytest.raises(ConfigError, match="give a list of files"):
        compose([], str(tmp_path / "a.yaml"))
