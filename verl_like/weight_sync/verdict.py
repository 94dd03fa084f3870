"""Reports of the two sides on one update, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_like.engine.train_engine import WeightForm
from verl_like.weight_sync.probe import Gap

Problems = dict[str, list[str]]  # by the name of the rank that found them

_MAX_LISTED = 12  # problems named in an error message


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trained weights; it is unloaded. A later full sync may succeed.

    problems: all that any rank has found (of a rank that raises alone, its own); the message lists some of the first
    rank with a problem.
    """

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems

    def __reduce__(self) -> tuple[type[WeightSyncError], tuple[str, list[str]]]:
        return type(self), (str(self), self.problems)  # it travels between processes

    @classmethod
    def of(cls, problems: Problems) -> WeightSyncError:
        """The error of these problems, of which there are some."""
        first, found = next(iter(problems.items()))
        more = len(found) - _MAX_LISTED
        listed = "; ".join(found[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
        every = list(dict.fromkeys(problem for some in problems.values() for problem in some))
        ranks = ", ".join([*problems][:_MAX_LISTED]) + (" and others" if len(problems) > _MAX_LISTED else "")
        return cls(f"weight sync failed on {ranks}. {first[0].upper()}{first[1:]}: {listed}", every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Report of one rank of the trainer. seconds: to make the header. mark: of what receivers must hold now."""

    version: int
    form: WeightForm
    mark: str
    num_changed: int | None  # tensors that are others than in the last sync of this form; None: nothing to compare with
    seconds: float
    problems: Problems = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Report of one receiving rank.

    seconds: since the header came. mark: of what it holds now, None where it is unloaded.
    """

    mark: str | None
    seconds: float
    bytes: int = 0  # of full tensors, in the rollout dtype
    num_tensors: int = 0
    num_read_back: int = 0  # tensors whose checksum was compared inside the engine
    gap: Gap | None = None  # of the probe; None where the sync is not proved
    problems: Problems = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One proved sync."""

    version: int
    form: WeightForm
    seconds: float
    bytes: int  # of full tensors, in the rollout dtype
    num_tensors: int
    num_read_back: int  # tensors whose checksum was compared inside the engine
    num_changed: int | None  # tensors that are others than in the last sync of this form; None: nothing to compare with
    probe_gap: float | None  # nats, the largest difference; None when rollout.sync_probe is off
    probe_gap_mean: float | None


def verdict(sent: Sequence[Sent], receipts: Sequence[Receipt]) -> SyncReport:
    """The report of a sync that succeeded everywhere, of all ranks of both sides or of some. Raises WeightSyncError
    with what any of them has found; whoever called the receivers then unloads all of them (WeightReceiver.unload)."""
    problems: Problems = {}
    for report in [*sent, *receipts]:
        problems |= report.problems
    if not problems and len({report.mark for report in [*sent, *receipts]}) != 1:
        held = [report.mark for report in receipts]
        problems["driver"] = [f"rollout engines hold {held}, the trainer has sent {[report.mark for report in sent]}"]
    if problems:
        raise WeightSyncError.of(problems)
    first, gaps = receipts[0], [receipt.gap for receipt in receipts if receipt.gap is not None]
    return SyncReport(
        version=sent[0].version,
        form=sent[0].form,
        seconds=max(report.seconds for report in sent) + max(report.seconds for report in receipts),
        bytes=first.bytes,
        num_tensors=first.num_tensors,
        num_read_back=min(receipt.num_read_back for receipt in receipts),
        num_changed=sent[0].num_changed,
        probe_gap=max((gap.largest for gap in gaps), default=None),
        probe_gap_mean=max((gap.mean for gap in gaps), default=None),
    )
