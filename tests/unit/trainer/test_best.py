"""The best checkpoint by a validation metric, and the early end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from verl_like.checkpoint import layout
from verl_like.config import TrainerConfig
from verl_like.config.errors import RunStopped
from verl_like.trainer.best import Best

NAME = "val-core/a/acc/mean@1"


def best(root: Path, resumed_at: int | None = None, **keys: object) -> Best:
    return Best(TrainerConfig(best_metric=NAME, **keys), root, resumed_at=resumed_at)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("mode", "values"), [("max", [0.1, 0.3, 0.2, 0.3]), ("min", [-0.1, -0.3, -0.2, -0.3])])
def test_it_is_the_first_with_the_best_value(tmp_path: Path, mode: str, values: list[float]) -> None:
    watched = best(tmp_path, best_mode=mode, early_stop_patience=2)
    found = [watched.judge(step, {NAME: value}) for step, value in enumerate(values, 1)]
    assert found == [True, True, False, False] and watched.folder is None
    watched.committed(2)
    assert watched.folder == tmp_path / "global_step_2"
    assert watched.stays_away() and not watched.judge(5, {"actor/loss": 1.0})
    watched.keep()
    resumed = best(tmp_path, resumed_at=4, best_mode=mode, early_stop_patience=2)
    assert (resumed.step, resumed.value, resumed.stays_away()) == (2, values[1], True)
    earlier = best(tmp_path, resumed_at=1, best_mode=mode)
    assert (earlier.step, earlier.value) == (1, values[0]) and not earlier.stays_away()
    fresh = best(tmp_path, best_mode=mode)
    assert fresh.step == 0 and math.isnan(fresh.value) and fresh.judge(0, {NAME: 9.0})


def test_a_resumed_run_counts_no_validation_twice(tmp_path: Path) -> None:
    """Saved at 2, lost after 4: of 3 and 4 nothing is known, and the validation before training is that of 2 again."""
    watched = best(tmp_path, early_stop_patience=2)
    for step, value in enumerate([0.5, 0.2, 0.1, 0.1], 1):
        watched.judge(step, {NAME: value})
    watched.keep()
    assert watched.stays_away()
    resumed = best(tmp_path, resumed_at=2, early_stop_patience=2)
    assert not resumed.judge(2, {NAME: 0.2}) and not resumed.stays_away()
    assert not resumed.judge(3, {NAME: 0.1}) and resumed.stays_away()


def test_a_best_that_is_no_checkpoint_yet_gives_way_to_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    watched = best(tmp_path)
    for step, value in ((1, 0.1), (2, 0.05), (3, 0.2)):
        watched.judge(step, {NAME: value})
        watched.keep()
    assert best(tmp_path, resumed_at=2).folder == tmp_path / "global_step_1"


def test_an_unknown_metric_ends_the_run_and_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"trainer.best_metric=val-core/a/acc/mean@1.*val-core/b/reward/mean@1"):
        best(tmp_path).judge(1, {"val-core/b/reward/mean@1": 0.5})


def test_patience_needs_a_metric() -> None:
    with pytest.raises(ValueError, match=r"early_stop_patience.*set best_metric"):
        TrainerConfig(early_stop_patience=2)


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        folder = layout.prepare_step_dir(tmp_path, step)
        (folder / "actor").mkdir()
        layout.write_trainer_state(folder, {})
        latest = layout.commit(folder)
    layout.rotate(latest, 2, None, [tmp_path / "global_step_2"])
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [f"global_step_{n}" for n in (2, 4, 5)]
    layout.forget(latest)
    assert layout.find_latest(tmp_path) == tmp_path / "global_step_4"
    for name in ("global_step_4", "global_step_2"):
        layout.forget(tmp_path / name)
    assert layout.find_latest(tmp_path) is None
