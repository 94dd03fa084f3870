"""verl's command lines of supervised training compose here, and its names are on the page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.conftest import ROOT
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.names import SFT, table
from verl_like.config.schema import find_key, to_dict
from verl_like.trainer.command_line import run_main
from verl_like.trainer.compose import compose
from verl_like.trainer.sft_trainer import OBJECTIVE, main, of_script, of_torchrun


def composed(*words: str) -> PPOConfig:
    return compose([OBJECTIVE, *words])


def test_all_command_lines_of_verl_compose(shared_data: Path) -> None:
    commands = [json.loads(line) for line in (shared_data / "verl_commands_2026.jsonl").read_text().splitlines()]
    seen: list[PPOConfig] = []
    for command in (command for command in commands if command["kind"] == "sft"):
        run_main(seen.append, [OBJECTIVE, *of_script(command["argv"])])
        assert importlib.import_module(command["module"].replace("verl.", "verl_like.", 1)).main is main
        plan = BatchPlan.build(seen[-1], 8, num_train_prompts=10_000)
        assert (list(plan.roles), plan.roles["actor"].updates_per_step) == (["actor"], 1)
    assert len(seen) == 7
    by_name = {config.trainer.experiment_name: config for config in seen}
    engine = by_name["pokemon-qwen3-2b-fsdp-fsdp2-sp2-fsdp-1202a1"]
    actor, optim = engine.actor_rollout_ref.actor, engine.actor_rollout_ref.actor.optim
    assert (actor.ulysses_sequence_parallel_size, actor.ppo_max_token_len_per_gpu, actor.grad_clip) == (2, 65536, 1.0)
    assert (optim.lr, optim.betas, optim.min_lr_ratio, str(optim.warmup_style)) == (2e-5, [0.9, 0.95], 0.1, "cosine")
    assert (engine.sft.max_length, engine.trainer.max_actor_ckpt_to_keep) == (2048, 5)
    old = by_name["gsm8k-sft-qwen-2.5-0.5b-instruct-sp2-liger"]
    assert old.actor_rollout_ref.model.use_liger and old.sft.response_key == "extra_info"
    assert (old.data.messages_key, old.sft.prompt_dict_keys) == (None, ["question"])


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["data.multiturn.enable=False"], "sft.response_key", "answer"),
        (["data.response_key=a", "data.multiturn.enable=True"], "sft.response_key", None),
        (["trainer.test_freq=after_each_epoch"], "trainer.test_each_epoch", True),
        (["trainer.save_freq=after_each_epoch"], "trainer.save_freq", None),  # after the last step too
        (["checkpoint.save_contents=[model]", "checkpoint.load_contents=${checkpoint.save_contents}"],
         "actor_rollout_ref.actor.checkpoint.load_contents", ["model"]),
        (["engine.tensor_parallel_size=2"], "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size", 2),
        (["data.val_files=null"], "data.val_files", []),
    ],
)  # fmt: skip
def test_names_of_both_generations(words: list[str], key: str, value: object) -> None:
    tree: object = to_dict(composed(*words))
    for name in key.split("."):
        assert isinstance(tree, dict)
        tree = tree[name]
    assert tree == value


def test_other_engines_are_refused_and_a_saved_configuration_composes_again() -> None:
    with pytest.raises(ConfigError, match="engine=megatron: not available; choose one of fsdp"):
        composed("engine=megatron")
    config = composed("data.response_key=answer", "optim.lr=3e-4")
    assert compose(to_dict(config)) == config


def test_the_page_has_every_name() -> None:
    page = (ROOT / "docs" / "sft.md").read_text().partition("## Other spellings")[2]
    names = [name.partition("=")[0].replace("**", "*") for row in table(SFT) for name in row.texts()]
    assert [
        name for name in names if f"`{name}" not in page and name.partition(".")[0] not in ("model", "engine")
    ] == []
    assert [key for row in table(SFT) for key in row.all_keys() if "\\" not in key and find_key(key) is None] == []


def test_torchrun_starts_one_run_of_a_machine() -> None:
    rank = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    assert of_torchrun(["a=1"], {}) == ["a=1"]
    assert of_torchrun(["a=1"], rank) == ["a=1", "trainer.n_gpus_per_node=4"]
    assert of_torchrun(["trainer.n_gpus_per_node=2"], rank) == ["trainer.n_gpus_per_node=2"]
    assert of_torchrun([], rank | {"LOCAL_RANK": "3"}) is None
    one = rank | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert of_torchrun([], one) == ["trainer.n_gpus_per_node=1", "trainer.launcher=local"]
    with pytest.raises(ValueError, match=r"trainer\.nnodes=2 trainer\.n_gpus_per_node=4"):
        of_torchrun([], rank | {"WORLD_SIZE": "8"})


def test_torchruns_summary_holds_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints that behind all that the run has said, so the clear message is the last."""
    file, size = tmp_path / "error.json", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    for name, value in {**size, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["sft_trainer"])
    with pytest.raises(SystemExit):
        main()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    told = ChildFailedError("sft_trainer", {0: failure}).format_msg()
    assert "traceback : error: torchrun with 2 machines" in told
