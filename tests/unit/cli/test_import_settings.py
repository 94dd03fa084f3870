"""`verl-like import`: the report, the command that it prints, and its exit status."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from verl_like.cli.main import main
from verl_like.kit.verbs import import_settings
from verl_like.trainer.compose import compose

FILE = """
pretrain: my model
response_length: 64
adv_estimator: reinforce
actor_train: {training_args: {lr_scheduler_type: cosine}}
"""


def command_of(text: str) -> list[str]:
    words = shlex.split(text[text.index("verl-like train") :].replace("\\\n", " "))
    return words[2:]


def test_the_printed_command_composes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "roll.yaml").write_text(FILE)
    main(["import", "roll", str(tmp_path / "roll.yaml")])  # status 0: nothing was refused
    told = capsys.readouterr().out
    assert "response_length=64  ->  data.max_response_length=64" in told
    assert "top_p=0.7 (the default there)  ->  actor_rollout_ref.rollout.top_p=0.7" in told
    assert compose(command_of(told)).actor_rollout_ref.model.path == "my model"


def test_what_was_refused_is_told_with_its_reason_and_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "roll.yaml").write_text(FILE + "model_update_frequency: 2\nrollout_batch_sise: 8\n")
    with pytest.raises(SystemExit) as ended:
        main(["import", "roll", str(tmp_path / "roll.yaml"), "--out", str(tmp_path / "run.sh")])
    assert ended.value.code == 3
    told = capsys.readouterr().out
    assert "model_update_frequency=2\n      weights are sent after every step" in told
    assert "rollout_batch_sise=8\n      did you mean rollout_batch_size?" in told
    script = tmp_path / "run.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert compose(command_of(script.read_text().replace(' "$@"', ""))).data.max_response_length == 64


@pytest.mark.parametrize("name", ["run.sh", "run.yaml"])
def test_texts_of_several_lines_stay_comments_in_what_is_written(
    name: str, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts of ROLL's environments."""
    file = shared_data / "roll_configs" / "qwen2.5-0.5B-agentic__agent_val_frozen_lake.yaml"
    with pytest.raises(SystemExit):  # its log_dir is refused
        main(["import", "roll", str(file), "--out", str(tmp_path / name)])
    written = (tmp_path / name).read_text()
    heading = written[: written.index("\n\n")].splitlines()
    assert all(line.startswith("#") for line in heading) and len(heading) > 100
    if name == "run.yaml":
        assert yaml.safe_load(written)["env"]["custom"]["FrozenLake"]["template"].count("\n") == 8
    else:
        assert subprocess.run(["sh", "-n", tmp_path / name], check=False).returncode == 0
        config = compose(command_of(written.replace(' "$@"', "")))
        assert config.env.custom["FrozenLake"]["template"].count("\n") == 8


def test_rolls_asynchronous_ratio_carries_what_it_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "roll.yaml").write_text(FILE + "async_generation_ratio: 1.5\n")
    main(["import", "roll", str(tmp_path / "roll.yaml")])
    config = compose(command_of(capsys.readouterr().out))
    assert config.trainer.mode == "colocate_async"
    assert (config.async_training.max_staleness, config.async_training.over_sample_rate) == (2, 1.5)
    assert config.algorithm.rollout_correction.rollout_is == "token"


def test_rolls_devices_that_only_sample_become_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = FILE.replace("{training_args", "{device_mapping: 'list(range(0,4))', training_args")
    sampling = "actor_infer: {device_mapping: 'list(range(4,6))'}\n"
    (tmp_path / "roll.yaml").write_text(f"{file}async_generation_ratio: 1\n{sampling}")
    main(["import", "roll", str(tmp_path / "roll.yaml")])
    config = compose(command_of(capsys.readouterr().out))
    assert config.trainer.mode == "separate_async" and config.trainer.n_gpus_per_node == 4
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node) == (1, 2)


def test_colossals_inferencers_that_run_ahead_become_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--dataset train.jsonl --model model -t 4 -i 2 -ptp 2 -b vllm -ibs 8 -tbs 4 -g 4 -nb 2"
    main(["import", "colossal", *arguments.split()])
    config = compose(command_of(capsys.readouterr().out))
    assert config.trainer.mode == "separate_async" and config.trainer.n_gpus_per_node == 4
    assert config.actor_rollout_ref.rollout.n_gpus_per_node == 4
    assert (config.async_training.max_staleness, config.async_training.over_sample_rate) == (2, 2)


def test_the_example_of_colossals_readme(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "Please reason step by step, and put your final answer within \\boxed{}."
    arguments = (
        "--dataset train.jsonl --model model -t 4 -i 4 -b vllm -ibs 2 -tbs 4 -tMbs 1 -tmbs 4 -imbs 1 -rt boxed -g 4"
    )
    main(["import", "colossal", *arguments.split(), "-s", prompt, "-ibs", "4", "-p", "Debug", "clip_eps_high=0.28"])
    config = compose(command_of(capsys.readouterr().out))
    assert config.data.system_prompt == prompt and config.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert config.data.train_batch_size == 16  # the last -ibs counts


def test_a_value_that_train_would_refuse_is_status_1_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "roll.yaml").write_text(FILE + "pg_clip: a\n")
    with pytest.raises(SystemExit, match=r"error: .*clip_ratio='a'.*from ROLL's pg_clip=a"):
        main(["import", "roll", str(tmp_path / "roll.yaml"), "--out", str(tmp_path / "run.sh")])
    assert not (tmp_path / "run.sh").exists() and "verl-like train" not in capsys.readouterr().out


def test_a_reader_that_stops_early_does_not_lose_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verl-like import roll FILE --out run.sh | head`."""

    def closed(*texts: str) -> None:
        raise RuntimeError("nobody reads")

    (tmp_path / "roll.yaml").write_text(FILE)
    monkeypatch.setattr(import_settings, "print", closed, raising=False)
    with pytest.raises(SystemExit, match="nobody reads"):
        main(["import", "roll", str(tmp_path / "roll.yaml"), "--out", str(tmp_path / "run.sh")])
    assert "verl-like train" in (tmp_path / "run.sh").read_text()


@pytest.mark.parametrize("below", ["folder", "file/run.sh"])
def test_an_out_that_cannot_be_written_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text(FILE)
    with pytest.raises(SystemExit, match=rf"error: --out .*{below} cannot be written: \w+"):
        main(["import", "roll", str(tmp_path / "file"), "--out", str(tmp_path / below)])


def test_a_faulty_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*none\.yaml: there is no such file"):
        main(["import", "roll", str(tmp_path / "none.yaml")])
