"""The samples that every run keeps: `<log_dir>/samples/{train,validation}/<step>.jsonl`, bounded in size."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from verl_like.observe.samples import Sample, dump_samples

logger = logging.getLogger(__name__)

_NEWEST = 5  # files that are never thinned out: what happens now is looked at most


class SampleStore:
    """Writes records of a step, and thins older steps out where the folder grows over its limit."""

    def __init__(self, folder: Path, max_mb: float, resumed_at: int | None) -> None:
        """resumed_at: the last step of the run that goes on; samples of later steps are set aside under the first free
        number. None: a new run; all are."""
        self.folder, self.max_bytes = folder, max_mb * 1e6
        files = sorted(folder.glob("*/*.jsonl"))
        later = [path for path in files if resumed_at is None or step_of(path) > resumed_at]
        if later:
            names = (folder.with_name(f"{folder.name}.{n}") for n in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            for path in later:
                target = aside / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            logger.info("%d files of samples that were in %s are now in %s", len(later), folder, aside.name)

    def write(self, part: str, step: int, samples: Sequence[Sample]) -> None:
        """Keep the records of a step. part: train or validation."""
        dump_samples(self.folder / part, step, samples)
        thin_out(sorted((self.folder / "train").glob("*.jsonl")), self.max_bytes - self._size("validation"))
        thin_out(sorted((self.folder / "validation").glob("*.jsonl")), self.max_bytes)

    def _size(self, part: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / part).glob("*.jsonl"))


def step_of(path: Path) -> int:
    """The step that a file of samples belongs to."""
    return int(path.stem)


def thin_out(files: Sequence[Path], max_bytes: float) -> None:
    """Delete every second file between the first and the newest until the rest fits; then the oldest of the newest."""
    kept = list(files)
    while len(kept) > 1 and sum(path.stat().st_size for path in kept) > max_bytes:
        between = kept[1:-_NEWEST]
        gone = set(between[::2]) or {kept[0]}
        for path in gone:
            path.unlink()
        kept = [path for path in kept if path not in gone]
