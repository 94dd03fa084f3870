"""The folder of samples stays within its size, and belongs to one run."""

from __future__ import annotations

import itertools
from pathlib import Path

from verl_like.observe.samples import SampleStore


def kept(folder: Path, part: str = "train") -> list[int]:
    return sorted(int(path.stem) for path in (folder / part).glob("*.jsonl"))


def test_older_steps_are_thinned_out_and_the_newest_stay(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples", 0.02, None)  # 20 kB
    for step in range(1, 61):
        store.write("train", step, [{"output": "x" * 980}])
    steps = kept(store.folder)
    assert sum(path.stat().st_size for path in store.folder.rglob("*.jsonl")) <= 20_000
    assert steps[0] == 1 and steps[-5:] == [56, 57, 58, 59, 60] and 10 <= len(steps) <= 20
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 32  # spread over the run


def test_validations_count_too(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples", 0.01, None)
    for step in range(1, 9):
        store.write("validation", step, [{"output": "x" * 480}])
        store.write("train", step, [{"output": "x" * 980}])
    assert kept(store.folder, "validation") == list(range(1, 9))
    assert sum(path.stat().st_size for path in store.folder.rglob("*.jsonl")) <= 10_000
    assert kept(store.folder)[-1] == 8


def test_a_new_run_sets_the_old_one_aside_and_a_resumed_one_what_it_does_again(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    store = SampleStore(folder, 1.0, None)
    for step in (1, 2, 3):
        store.write("train", step, [{"output": "old"}])
        store.write("validation", step, [{"output": "old"}])
    SampleStore(folder, 1.0, 2)
    assert kept(folder) == [1, 2] and kept(folder, "validation") == [1, 2]
    assert kept(tmp_path / "samples.1") == [3] and kept(tmp_path / "samples.1", "validation") == [3]
    SampleStore(folder, 1.0, None).write("train", 1, [{"output": "new"}])
    assert kept(folder) == [1] and kept(tmp_path / "samples.2") == [1, 2]
