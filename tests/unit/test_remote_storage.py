"""Checkpoints and models on remote storage: memory://, file://, an upload that is cut in the middle."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem

from verl_like import remote_storage
from verl_like.remote_storage import MARKER, RemoteFolder, Uploader, local_folder, to_shared_memory

FILES = {"actor/model/a.bin": b"a" * 1000, "actor/huggingface/config.json": b"{}", "trainer_state.json": b"[1]"}


def checkpoint(root: Path, step: int) -> Path:
    folder = root / f"global_step_{step}"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=["memory", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    url = f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/there/run"
    return RemoteFolder(url, "trainer.default_hdfs_dir")


@pytest.fixture
def files(storage: RemoteFolder) -> AbstractFileSystem:
    """What the folder writes with."""
    return storage._fs


def test_what_went_there_comes_back(storage: RemoteFolder, tmp_path: Path) -> None:
    assert storage.steps() == []
    for step in (10, 2):
        storage.upload(checkpoint(tmp_path / "here", step))
    assert storage.steps() == [2, 10]
    back = storage.download("global_step_10", tmp_path / "back" / "global_step_10")
    assert {path.relative_to(back).as_posix(): path.read_bytes() for path in back.rglob("*") if path.is_file()} == FILES
    with pytest.raises(ValueError, match=r"trainer.default_hdfs_dir=.*global_step_3 cannot be read.*not uploaded to"):
        storage.download("global_step_3", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_upload_that_is_cut_is_no_checkpoint(
    storage: RemoteFolder, files: AbstractFileSystem, tmp_path: Path, monkeypatch: Any
) -> None:
    """Also where a whole one of that step was there: it is being replaced."""
    folder, put, calls = checkpoint(tmp_path, 4), files.put_file, []
    storage.upload(folder)

    def cut(local: str, there: str) -> None:
        calls.append(there)
        if len(calls) == 2:
            raise ConnectionResetError("cut")
        put(local, there)

    monkeypatch.setattr(files, "put_file", cut)
    with pytest.raises(ValueError, match="ConnectionResetError: cut"):
        storage.upload(folder)
    assert storage.steps() == []
    storage.upload(folder)
    assert storage.steps() == [4] and len(calls) == 5


def test_sizes_are_compared(storage: RemoteFolder, files: AbstractFileSystem, tmp_path: Path, monkeypatch: Any) -> None:
    folder, put = checkpoint(tmp_path, 4), files.put_file
    storage.upload(folder)
    there = f"{storage._root}/global_step_4/actor/model/a.bin"
    files.pipe_file(there, b"short")
    with pytest.raises(ValueError, match=r"actor/model/a.bin has 5 of 1000 bytes"):
        storage.download("global_step_4", tmp_path / "back")
    (tmp_path / "empty").touch()
    monkeypatch.setattr(files, "put_file", lambda local, path: put(str(tmp_path / "empty"), path))
    with pytest.raises(ValueError, match=r"has 0 bytes after the upload"):
        storage.upload(folder)


def test_uploads_run_behind_and_are_tried_again(storage: RemoteFolder, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote_storage, "_PAUSE_S", 0.0)
    uploader, real, down, tries = Uploader(storage), storage.upload, [True], []

    def upload(folder: Path, *whose: Any, **more: Any) -> None:
        tries.append(folder)
        if down[0]:
            raise ValueError("no network")
        real(folder)

    monkeypatch.setattr(storage, "upload", upload)
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    uploader.start(first)
    assert uploader._failed(0.0) == [first] and len(tries) == 3
    uploader.start(first)
    down[0] = False
    uploader.start(second)
    assert uploader.finish() == [] and storage.steps() == [1, 2]
    down[0], tries[:] = True, []
    uploader.start(first)
    assert uploader.finish() == [str(first)] and len(tries) == 3 + 1  # the storage is known to be away


def test_storage_that_was_away_gets_its_time_again(
    storage: RemoteFolder, files: AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_storage, "_PAUSE_S", 0.0)
    uploader, path, real = Uploader(storage), checkpoint(tmp_path, 1), files.exists
    monkeypatch.setattr(files, "exists", _raises)
    uploader.start(path)
    assert uploader._failed(60.0) == [path] and storage.overdue_s < 0
    uploader.start(path)
    monkeypatch.setattr(files, "exists", lambda *names: time.sleep(0.3) or real(*names))
    monkeypatch.setattr(remote_storage, "_LAST_S", 5.0)
    assert uploader.finish() == [] and storage.steps() == [1]


def _raises(*arguments: Any) -> bool:
    raise OSError("no answer")


def test_storage_that_does_not_answer_holds_nothing_up(
    storage: RemoteFolder,
    files: AbstractFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remote_storage, "_FILE_S", 0.3)
    monkeypatch.setattr(remote_storage, "_LOOK_S", 0.05)
    monkeypatch.setattr(remote_storage, "_LAST_S", 0.5)
    answers, put = threading.Event(), files.put_file
    monkeypatch.setattr(files, "put_file", lambda *paths: answers.wait(60) and put(*paths))
    uploader, paths = Uploader(storage), [checkpoint(tmp_path, step) for step in (1, 2, 3)]
    began = time.monotonic()
    for path in paths:
        uploader.start(path)
    assert uploader.pending == paths and "does not answer: global_step_1 stay" in caplog.text
    assert uploader.finish() == [*map(str, paths)] and time.monotonic() - began < 30
    late = storage.overdue_s
    with pytest.raises(ValueError, match="cannot be written"):  # a further try is no sign of life
        monkeypatch.setattr(files, "exists", _raises)
        storage.upload(paths[0])
    assert storage.overdue_s > late > 0.3
    monkeypatch.undo()
    answers.set()
    monkeypatch.setattr(remote_storage, "_LAST_S", 30.0)
    assert uploader.finish() == [] and storage.steps() == [1, 2, 3]


def test_a_model_is_fetched_once_and_again_when_it_changed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote_storage, "CACHE", tmp_path / "cache")
    source = tmp_path / "there" / "model"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    url = f"file://{source}"
    folder = Path(local_folder(url, "actor_rollout_ref.model.path"))
    assert folder.name == "model" and (folder / "config.json").read_text() == "{}" and folder.is_relative_to(tmp_path)
    fetch, calls = RemoteFolder._fetch, []
    monkeypatch.setattr(RemoteFolder, "_fetch", lambda *args: calls.append(1) or fetch(*args))
    local_folder.cache_clear()  # as another process
    assert Path(local_folder(url)) == folder and calls == []
    (source / "config.json").write_text('{"new": 1}')
    local_folder.cache_clear()
    assert json.loads((Path(local_folder(url)) / "config.json").read_text()) == {"new": 1} and calls == [1]
    assert local_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B" and local_folder("~/m") == str(Path("~/m").expanduser())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nowhere://a/b", "Protocol not known"),
        ("memory://not-there/model", "no file in it"),
        ("gcs://b/m", "gcsfs"),
        ("hdfs://h/m", "OSError"),
    ],
)
def test_what_cannot_be_reached_names_its_key(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"critic.model.path={url}.*{why}"):
        local_folder(url, "critic.model.path")


def test_a_model_in_shared_memory(tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(remote_storage, "SHM", tmp_path / "shm" / "models")
    folder = checkpoint(tmp_path, 1) / "actor"
    copy = to_shared_memory(folder, "model.use_shm")
    assert copy.is_relative_to(tmp_path / "shm") and (copy / "model/a.bin").read_bytes() == b"a" * 1000
    assert to_shared_memory(folder, "model.use_shm") == copy
    (folder / "model/a.bin").write_bytes(b"b")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2, 2, 0))
    assert to_shared_memory(folder, "model.use_shm") == folder and "has no effect" in caplog.text


def test_the_marker_names_every_file(storage: RemoteFolder, files: AbstractFileSystem, tmp_path: Path) -> None:
    storage.upload(checkpoint(tmp_path, 4), "vl1")
    told = json.loads(files.cat_file(f"{storage._root}/global_step_4/{MARKER}"))
    assert told == {"files": {name: len(content) for name, content in FILES.items()}, "run": "vl1"}


def test_files_that_are_deleted_make_no_whole_checkpoint(
    storage: RemoteFolder, files: AbstractFileSystem, tmp_path: Path, monkeypatch: Any
) -> None:
    """All of them before the upload; some during it, as where the actor's folder goes and the critic's stays."""
    with pytest.raises(ValueError, match=r"global_step_3 holds no file"):
        storage.upload(tmp_path / "global_step_3")
    folder, put = checkpoint(tmp_path, 4), files.put_file

    def put_and_delete(local: str, there: str) -> None:
        put(local, there)
        Path(local).unlink()

    monkeypatch.setattr(files, "put_file", put_and_delete)
    with pytest.raises(ValueError, match=r"global_step_4 changed during the upload"):
        storage.upload(folder)
    assert storage.steps() == []
