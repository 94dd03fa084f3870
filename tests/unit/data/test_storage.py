"""Remote files are fetched once, whole, and again when they changed; shared memory holds a copy for this process."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from tests.unit.data.factory import CharTokenizer, write_prompts
from verl_like.config import DataConfig
from verl_like.data import storage
from verl_like.data.dataset import PromptDataset


@pytest.fixture
def remote() -> fsspec.AbstractFileSystem:
    system = fsspec.filesystem("memory")
    system.store.clear()
    return system


def get(url: str, cache: Path) -> Path:
    return storage.localize(url, cache_dir=str(cache), use_shm=False, key="data.train_files")


def test_a_remote_file_is_fetched_once_and_again_when_it_changed(
    tmp_path: Path, remote: fsspec.AbstractFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    url = "memory://bucket/part=1/a.jsonl"
    remote.pipe("/bucket/part=1/a.jsonl", b"one")
    with caplog.at_level(logging.INFO, "verl_like"):
        first = get(url, tmp_path)
        assert first.name == "a.jsonl" and first.read_bytes() == b"one" and tmp_path in first.parents
        assert get(url, tmp_path) == first
    assert caplog.text.count("fetching") == 1 and caplog.text.count("is cached") == 1
    remote.pipe("/bucket/part=1/a.jsonl", b"three")
    second = get(url, tmp_path)
    assert second != first and second.read_bytes() == b"three"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a.jsonl"] * 2  # nothing half-written


class ConnectError(Exception):
    """Of a client's own, as httpx raises it below hf://: no OSError."""


class Offline(fsspec.AbstractFileSystem):
    def info(self, path: str, **options: object) -> None:
        raise ConnectError("Name or service not known")


def test_what_cannot_be_fetched_names_key_and_address(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> None:
    remote.pipe("/bucket/a.jsonl", b"one")
    fsspec.register_implementation("offline", Offline)
    for url, message in [
        ("offline://x/a.jsonl", "ConnectError: Name or service not known"),
        ("memory://bucket/b.jsonl", "FileNotFoundError"),
        ("memory://bucket", "folder"),
        ("nonsense://x/a.jsonl", "nonsense"),
    ]:
        with pytest.raises(ValueError, match=rf"data\.train_files: {url} cannot be fetched.*{message}"):
            get(url, tmp_path)


def test_a_transfer_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="got 3 of 5 bytes"):
        storage._write(io.BytesIO(b"abc"), tmp_path / "a.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_pyarrows_own_file_systems_are_used_for_s3_and_hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import fs

    (tmp_path / "a.csv").write_text("a\n1\n")
    seen = []

    def from_uri(uri: str) -> tuple[fs.FileSystem, str]:
        seen.append(uri)
        return fs.LocalFileSystem(), str(tmp_path / uri.rsplit("/", 1)[-1])

    class Fake:
        FileType, FileSystem = fs.FileType, type("FileSystem", (), {"from_uri": staticmethod(from_uri)})

    monkeypatch.setattr(storage, "arrow_fs", Fake)
    for url in ("s3://bucket/a.csv", "hdfs://node:9000/a.csv", "gcs://bucket/a.csv"):
        assert get(url, tmp_path / "cache").read_text() == "a\n1\n"
    assert seen == ["s3://bucket/a.csv", "hdfs://node:9000/a.csv", "gs://bucket/a.csv"]
    with pytest.raises(ValueError, match=r"s3://bucket/absent\.csv cannot be fetched: FileNotFoundError"):
        get("s3://bucket/absent.csv", tmp_path / "cache")


def test_file_urls_are_local(tmp_path: Path) -> None:
    path = tmp_path / "with space.parquet"
    write_prompts(path, ["a"])
    assert get(f"file://{tmp_path}/with%20space.parquet", tmp_path / "cache") == path
    assert not (tmp_path / "cache").exists()


def test_a_data_set_from_a_remote_file(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> None:
    remote.pipe("/bucket/a.parquet", Path(write_prompts(tmp_path / "a.parquet", ["x", "y"])).read_bytes())
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    dataset = PromptDataset(data, "memory://bucket/a.parquet", CharTokenizer(), split="train")
    local = PromptDataset(data, str(tmp_path / "a.parquet"), CharTokenizer(), split="train")
    assert len(dataset) == 2
    assert dataset.identity() == local.identity()  # a checkpoint does not care where the file lay


def test_shared_memory_holds_a_copy_until_the_process_ends(tmp_path: Path) -> None:
    if not storage.SHM_ROOT.is_dir():
        pytest.skip("no /dev/shm here")
    path = write_prompts(tmp_path / "a.parquet", ["x"])
    code = (
        "import sys; from verl_like.data.storage import localize\n"
        f"p = localize({path!r}, cache_dir=None, use_shm=True, key='k'); assert p.is_file(); print(p)"
    )
    root = Path(__file__).resolve().parents[3]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    copy = Path(done.stdout.strip())
    assert storage.SHM_ROOT in copy.parents and copy.name == "a.parquet"
    assert not copy.exists() and not copy.parent.exists()


def test_a_file_that_does_not_fit_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(write_prompts(tmp_path / "a.parquet", ["x"]))
    monkeypatch.setattr(storage, "SHM_ROOT", tmp_path / "absent")
    with caplog.at_level(logging.WARNING, "verl_like"):
        assert storage.to_shared_memory(path, "data.train_files") == path
    assert "data.use_shm has no effect" in caplog.text


def test_use_shm_reads_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SHM_ROOT", tmp_path)
    path = write_prompts(tmp_path / "a.parquet", ["x"])
    dataset = PromptDataset(DataConfig(use_shm=True), path, CharTokenizer(), split="train")
    assert dataset.files[0].path.parent.name.startswith("verl_like_data_")
