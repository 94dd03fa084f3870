"""The packages themselves, each with files on this machine: pip install 'verl_like[mlflow,wandb]'."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from verl_like.config import TrainerConfig
from verl_like.observe.trackers import build_trackers

pytestmark = pytest.mark.engines
CONFIG = {"data": {"train_files": ["a.parquet"], "hf_token": "hf_secret"}, "trainer": {"seed": 1, "logger_kwargs": {}}}
SAMPLE = {"input": "1+1=", "output": "02", "gts": "2", "score": 1.0}


def log_run(name: str, folder: Path, **options: Any) -> None:
    """Two steps and a table; then a resumed run that does the second step again, and a third."""
    given = {name: options} if options else {}
    trainer = TrainerConfig(logger=[name], logger_kwargs=given, project_name="sums", experiment_name="first")
    for resumed_at, steps in ((None, (1, 2)), (1, (2, 3))):
        trackers = build_trackers(trainer, CONFIG, folder, resumed_at=resumed_at)
        for step in steps:
            trackers.log(step, {"critic/score/mean": step / 4, "val-core/x/reward/mean@1": 0.5, "bad": math.nan})
            trackers.log_samples(step, [SAMPLE, SAMPLE])
        assert name in trackers.names
        trackers.finish()


@pytest.fixture(autouse=True)
def no_failures(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tracker that fails is an error in the log and nothing else."""
    monkeypatch.setattr(logging.getLogger("verl_like"), "propagate", True)
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_mlflow_with_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    log_run("mlflow", tmp_path / "out", tracking_uri=address, tags={"team": "a"})
    client = mlflow.MlflowClient(tracking_uri=address)
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "a")
    scores = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "critic/score/mean")]
    assert sorted(set(scores)) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["val-core/x/reward/mean_at_1"] == 0.5
    assert run.data.params["data.hf_token"] == "(hidden)" and run.data.params["trainer.seed"] == "1"
    check_tables(client, run)


def check_tables(client: Any, run: Any) -> None:
    """As artifacts, and as what MLflow itself takes for tables."""
    path = client.download_artifacts(run.info.run_id, "val/generations/000002.json")
    row = [2, "1+1=", "02", "2", "1.0"]
    table = {"columns": ["step", "input", "output", "gts", "score"], "data": [row, row]}
    assert json.loads(Path(path).read_text()) == table
    listed = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert listed == [{"path": f"val/generations/{step:06d}.json", "type": "table"} for step in (1, 2, 3)]
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(client.tracking_uri)  # load_table asks it, whatever the client is of
    shown = client.load_table(run.info.experiment_id, "val/generations/000003.json", run_ids=[run.info.run_id])
    assert shown["input"].tolist() == ["1+1=", "1+1="] and shown["step"].tolist() == [3, 3]


def test_mlflow_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlflow server` on this machine: a run over HTTP, artifacts through the server."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("mlflow.server")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        f"{tmp_path}/files",
    ]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/health", server)
        log_run("mlflow", tmp_path / "out", tracking_uri=address)
        client = mlflow.MlflowClient(tracking_uri=address)
        (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
        assert run.data.metrics["critic/score/mean"] == 0.75 and run.info.artifact_uri.startswith("mlflow-artifacts:")
        check_tables(client, run)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(address: str, server: subprocess.Popen[bytes], patience_s: float = 90) -> None:
    deadline = time.monotonic() + patience_s
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"no answer at {address}; the server ended with {server.poll()}")


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    log_run("trackio", tmp_path / "out", auto_log_cpu=False)
    assert storage.get_runs("sums") == ["first"]
    records = storage.get_logs("sums", "first")
    scores = [(record["step"], record["critic/score/mean"]) for record in records if "critic/score/mean" in record]
    assert scores == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    table = next(record["val/generations"] for record in records if "val/generations" in record)
    assert table["_value"][0] == {"step": 1, "input": "1+1=", "output": "02", "gts": "2", "score": "1.0"}
    assert storage.get_run_config("sums", "first")["data"]["hf_token"] == "(hidden)"


def test_swanlab_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    log_run("swanlab", tmp_path / "out")
    runs = list((tmp_path / "out" / "swanlog").glob("run-*"))
    assert runs and all(run.name.endswith((tmp_path / "out" / "swanlab_run_id").read_text().strip()) for run in runs)
    text = "".join(path.read_text() for run in runs for path in run.glob("files/config.yaml"))
    assert "(hidden)" in text and "hf_secret" not in text
    tables = [path.read_text() for run in runs for path in run.glob("media/echarts/*.json")]
    assert len(tables) >= 3 and "1+1=" in tables[0]


def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run("wandb", tmp_path / "out", tags=["a"])
    runs = list((tmp_path / "out" / "wandb").glob("offline-run-*"))
    number = (tmp_path / "out" / "wandb_run_id").read_text().strip()
    assert len(runs) == 2 and all(run.name.endswith(number) for run in runs)
    written = b"".join(path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file())
    assert b"critic/score/mean" in written and b"(hidden)" in written and b"hf_secret" not in written
    tables = [json.loads(path.read_text()) for run in runs for path in run.rglob("*.table.json")]
    row = ["1+1=", "02", "2", "1.0"]
    assert sorted(table["data"] for table in tables) == [[[step, *row]] * 2 for step in (1, 2, 2, 3)]


def test_a_service_that_ends_in_mid_run_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)
    options = {"mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    trainer = TrainerConfig(logger=["mlflow"], logger_kwargs=options)
    trackers = build_trackers(trainer, {}, tmp_path, resumed_at=None)
    trackers.log(1, {"x": 1.0})
    client = mlflow.MlflowClient(tracking_uri=options["mlflow"]["tracking_uri"])
    client.delete_run((tmp_path / "mlflow_run_id").read_text().strip())
    for step in (2, 3, 4, 5):
        trackers.log(step, {"x": 1.0})
    assert trackers.names == ["jsonl"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert [record.levelno >= logging.ERROR for record in caplog.records].count(True) == 3
    assert "mlflow failed and is off now" in caplog.text and "deleted" in caplog.text
    caplog.clear()
