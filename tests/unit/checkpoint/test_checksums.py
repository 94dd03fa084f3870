"""Damage is found file by file, in what a run reads and in nothing else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from verl_like.checkpoint import checksums
from verl_like.checkpoint.checksums import checksum, collect, find_faults, note


def checkpoint(folder: Path) -> Path:
    """Two ranks noted their shards; the driver's file and the tokenizer were noted by nobody."""
    for name in ("actor/model", "actor/huggingface"):
        (folder / name).mkdir(parents=True)
    for rank in (0, 1):
        shard = folder / "actor" / "model" / f"__{rank}_0.distcp"
        shard.write_bytes(bytes(range(200)) * (rank + 1))
        note(shard.parent, [shard], rank)
    (folder / "actor" / "huggingface" / "tokenizer.json").write_text("{}")
    (folder / "trainer_state.json").write_text('{"step": 3}')
    collect(folder)
    return folder


def test_every_file_is_listed_once(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    listed = json.loads((path / "checksums.json").read_text())
    files = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert set(listed) == files - {"checksums.json"}
    assert listed["actor/model/__1_0.distcp"] == {"bytes": 400, "crc32": listed["actor/model/__1_0.distcp"]["crc32"]}
    assert not list(path.rglob(".checksums*"))


def test_what_a_rank_noted_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = checksum
    monkeypatch.setattr(checksums, "checksum", lambda path: read.append(path.name) or real(path))
    checkpoint(tmp_path)
    assert sorted(read) == ["__0_0.distcp", "__1_0.distcp", "tokenizer.json", "trainer_state.json"]


def test_the_sums_are_those_of_the_moment_of_writing(tmp_path: Path) -> None:
    """A shard that changed between the rank's note and the driver's list is damaged, not newly listed."""
    shard = tmp_path / "actor" / "model" / "__0_0.distcp"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"as written")
    note(shard.parent, [shard], 0)
    shard.write_bytes(b"as writtem")
    collect(tmp_path)
    (fault,) = find_faults(tmp_path, ["actor/model"])
    assert str(shard) in fault and "damaged" in fault


def test_any_flipped_bit_of_a_shard_is_found(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    shard = path / "actor" / "model" / "__0_0.distcp"
    data = shard.read_bytes()
    for bit in range(0, len(data) * 8, 37):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(flipped)
        assert checksum(shard)["crc32"] not in (path / "checksums.json").read_text()
    (fault,) = find_faults(path, ["actor/model"])
    assert str(shard) in fault
    shard.write_bytes(data)
    assert find_faults(path, ["actor/model"]) == []


def test_only_what_is_read_is_compared(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (path / "actor" / "huggingface" / "tokenizer.json").unlink()
    assert find_faults(path, ["actor/model"]) == []
    (path / "trainer_state.json").write_text('{"step": 4}')  # on top: always
    assert "trainer_state.json is damaged" in find_faults(path, [])[0]


def test_a_checkpoint_of_an_older_version_passes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_faults(path, ["actor/model"]) == []
    assert "was written without checksums" in caplog.text
