"""A run whose checkpoints go to remote storage and come back; the same on a real S3 server, with an upload killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import ROOT, metrics_of, overrides, write_task
from tests.unit.engine.tiny import free_port
from verl_like.data.storage import localize
from verl_like.remote_storage import RemoteFolder, local_folder
from verl_like.trainer.compose import compose
from verl_like.trainer.run import fit


def new_task(folder: Path, num_rows: int) -> dict[str, str]:
    folder.mkdir()
    return write_task(folder, num_rows)


def steps_of(out: Path) -> list[float]:
    return [record["training/global_step"] for record in metrics_of(out)]


def check_resume(tmp_path: Path, model: str, url: str) -> None:
    """Two steps; the machine is lost; a third step on another. Then one that resumes from the URL of a step."""
    task, local = new_task(tmp_path / "task", 32), tmp_path / "out"
    keys = {"trainer.default_hdfs_dir": url, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1}

    def run(total: int, **more: object) -> None:
        settings = {**keys, "trainer.total_training_steps": total, **more}
        fit(compose(overrides(task, Path(model), local, **{"actor_rollout_ref.model.path": model, **settings})))

    run(2)
    assert RemoteFolder(url, "k").steps() == [1, 2]
    shutil.rmtree(local)
    run(3, **{"trainer.del_local_ckpt_after_load": True})
    assert steps_of(local) == [3] and [path.name for path in local.glob("global_step_*")] == ["global_step_3"]
    shutil.rmtree(local)
    from_path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": f"{url}/global_step_1"}
    run(2, **from_path)
    assert steps_of(local) == [2] and (local / "fetched" / "global_step_1" / "actor").is_dir()


def test_a_run_goes_on_from_remote_storage(tmp_path: Path, tiny_model: Path) -> None:
    check_resume(tmp_path, str(tiny_model), f"memory://{uuid.uuid4().hex}/run")


def test_the_best_step_is_kept_and_the_run_ends_early(tmp_path: Path, tiny_model: Path) -> None:
    """The score rises, and the smallest is asked for: the first validation stays the best."""
    task, out = new_task(tmp_path / "task", 32), tmp_path / "out"
    settings = {
        "trainer.test_freq": 1,
        "trainer.best_metric": "val-core/sevens/acc/mean@1",
        "trainer.best_mode": "min",
        "trainer.early_stop_patience": 2,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.total_training_steps": 12,
    }
    fit(compose(overrides(task, tiny_model, out, **settings)))
    values = {r["training/global_step"]: r["val-core/sevens/acc/mean@1"] for r in metrics_of(out)}
    best, last = min(values, key=lambda step: (values[step], step)), max(values)
    assert last == best + 2 < 12
    assert {path.name for path in out.glob("global_step_*")} == {f"global_step_{int(n)}" for n in (best, last)}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server process of its own."""
    pytest.importorskip("moto")
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    variables = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (variables | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


@pytest.mark.engines
def test_checkpoints_models_and_data_on_s3(
    tmp_path: Path, tiny_model: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_like.remote_storage.CACHE", tmp_path / "cache")
    RemoteFolder(f"{s3}/models", "k").upload(tiny_model)
    check_resume(tmp_path, f"{s3}/models/{tiny_model.name}", f"{s3}/run")
    fetched = Path(local_folder(f"{s3}/models/{tiny_model.name}"))
    assert fetched.is_relative_to(tmp_path / "cache") and (fetched / "config.json").is_file()
    task = new_task(tmp_path / "more", 8)
    RemoteFolder(f"{s3}/data", "k").upload(Path(task["data.train_files"]).parent)
    name = f"{s3}/data/more/{Path(task['data.train_files']).name}"
    file = localize(name, cache_dir=str(tmp_path / "data"), use_shm=False, key="data.train_files")
    assert file.read_bytes() == Path(task["data.train_files"]).read_bytes()


@pytest.mark.engines
def test_a_killed_upload_to_s3_is_no_checkpoint(tmp_path: Path, s3: str) -> None:
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.bin").write_bytes(os.urandom(1 << 20))
    code = "import sys; from pathlib import Path; from verl_like.remote_storage import RemoteFolder as R; "
    code += "R(sys.argv[1], 'k').upload(Path(sys.argv[2]))"
    sender = subprocess.Popen([sys.executable, "-c", code, f"{s3}/run", str(folder)], cwd=ROOT)
    remote = RemoteFolder(f"{s3}/run", "k")
    while not remote._fs.exists("bucket/run/global_step_7/05.bin"):
        assert sender.poll() is None
        time.sleep(0.02)
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    assert remote.steps() == [] and not remote._fs.exists("bucket/run/global_step_7/39.bin")
    remote.upload(folder)
    back = remote.download("global_step_7", tmp_path / "back")
    assert remote.steps() == [7] and all(
        (back / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir()
    )
