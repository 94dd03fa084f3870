"""Send the trained weights to the rollout engine and prove that they arrived.

Four proofs, each sees what the others cannot: every name of the model came once with its shape; the checksums of what
was sent and of what the engine holds are those of the trainer's shards, computed before anything was gathered (header,
ledger); no prompt of before is left in the engine's cache; trainer and engine agree on the log-probs of probe tokens
(probe). A sync that fails on any rank fails on all of them and leaves the engine unloaded; a rank that raises inside a
collective does so alone, and the worker group ends the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.config import LoadFormat, RolloutConfig
from verl_like.engine.train_engine import TrainEngine, WeightForm
from verl_like.parallel.dist import ProcessInfo, all_reduce_max
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.weight_sync.header import Header
from verl_like.weight_sync.ledger import WeightLedger
from verl_like.weight_sync.probe import Gap, Probe

logger = logging.getLogger(__name__)

_MAX_LISTED = 12  # problems named in an error message


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trained weights; it is unloaded. A later full sync may succeed.

    problems: all that any rank has found (of a rank that raises alone, its own); the message lists some of the first
    rank with a problem.
    """

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems


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


class WeightSync:
    """Syncs one training engine with one rollout engine in the same process. All methods are collective.

    trainer_dtype: what the trainer computes in; decides with the rollout's dtype how large a probe gap is normal.
    An engine that keeps LoRA adapters apart gets the base weights once, and then the adapters alone; after a sync that
    failed, or when the engine was unloaded, both again.
    """

    def __init__(
        self,
        engine: TrainEngine,
        rollout: RolloutEngine,
        config: RolloutConfig,
        process: ProcessInfo,
        *,
        trainer_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._engine = engine
        self._rollout = rollout
        self._process = process
        self._prove = config.sync_probe
        self._whole_first = config.load_format == LoadFormat.dummy_hf
        self._last: Header | None = None
        self._probe = Probe(rollout.dtype, trainer_dtype, config.sync_probe_tolerance)

    def sync(self, version: int, *, optimizer_moved: bool = False) -> SyncReport:
        """Fill the rollout engine with the engine's weights as `version`. Raises WeightSyncError on every rank.

        optimizer_moved: since the last sync the optimizer made steps that float32 weights cannot have missed.
        """
        start = time.perf_counter()
        self._rollout.pause()  # nothing is drawn from weights that are being replaced, or not proved yet
        header = self._header(version)
        changed = header.num_changed(self._last)
        if changed == 0 and optimizer_moved:
            self._require(self._nothing_changed(header))
        if self._prove and self._rollout.weight_version is not None:
            self._rollout.cached_tokens()  # leaves a prompt that the load must make the engine forget
        ledger = WeightLedger(header)
        self._require(self._send(ledger, header))
        num_read_back, gap = self._proved(header, ledger) if self._prove else (0, None)
        self._last = header
        report = SyncReport(
            version=version,
            form=header.form,
            seconds=time.perf_counter() - start,
            bytes=ledger.num_bytes,
            num_tensors=ledger.num_tensors,
            num_read_back=num_read_back,
            num_changed=changed,
            probe_gap=None if gap is None else gap.largest,
            probe_gap_mean=None if gap is None else gap.mean,
        )
        logger.debug("weight sync: %s", report)
        return report

    def _header(self, version: int) -> Header:
        """What will be sent; the same on every rank: a sync that fails on one unloads the engines of all."""
        form: WeightForm = "merged"
        if self._rollout.keeps_adapters:
            form = "adapters" if self._rollout.holds_weights else "apart"
        dtype, sums = self._rollout.dtype, {}

        def add_up() -> list[str]:
            sums.update(self._engine.weight_checksums(dtype, form))
            return []

        if self._prove:
            self._checked("the checksums of the trained weights", add_up)
        return Header(
            version=version,
            form=form,
            dtype=dtype,
            shapes=self._engine.weight_names(form),
            checksums=sums if self._prove else None,
        )

    def _nothing_changed(self, header: Header) -> list[str]:
        if header.dtype != torch.float32:
            logger.warning(
                "the optimizer has stepped, but no weight has changed in %s since the last sync: the rollout engine "
                "still samples from the policy of version %s; updates smaller than that precision are not seen by it",
                *(header.dtype, self._last and self._last.version),
            )
            return []
        return [
            f"none of {len(header.shapes)} tensors has changed since the last sync, although the optimizer has "
            "stepped: what is to be sent is not what is trained"
        ]

    def _send(self, ledger: WeightLedger, header: Header) -> list[str]:
        """Stream the weights; the problems this rank saw. The stream is always read to its end: it is a collective."""
        partial = header.form == "adapters"
        if not partial:
            self._rollout.unload()
        export_errors: list[Exception] = []
        exported = _recording(self._engine.export_weights(header.dtype, header.form), export_errors)
        problems: list[str] = []
        try:
            self._rollout.load_weights(self._order(ledger.watch(exported)), header.version, partial=partial)
        except Exception as error:
            logger.exception("loading weights into the rollout engine failed")
            problems.append(f"{type(error).__name__}: {error}")
        if export_errors:
            # The other ranks are left alone in a gather: only this process ending its call can free them.
            self._rollout.unload()
            message = f"exporting the trained weights failed: {export_errors[0]}"
            raise WeightSyncError(message, [message]) from export_errors[0]
        for _ in ledger.watch(exported):
            pass
        return ledger.problems() + problems

    def _proved(self, header: Header, ledger: WeightLedger) -> tuple[int, Gap]:
        """After a load: how many tensors were compared inside the engine, and the probe's gap."""
        held: list[tuple[str, int]] = []

        def look_inside() -> list[str]:
            held.extend(self._rollout.weight_checksums(header.shapes))
            stale = self._rollout.cached_tokens()
            cache = [f"the prefix cache was not emptied: {stale} tokens of a prompt of before"] if stale else []
            return ledger.differences(held) + cache

        self._checked("reading the rollout engine", look_inside)
        names = {name for name, _ in held}
        if self._last is None and len(names) < len(header.shapes):
            left_out = sorted(header.shapes.keys() - names)
            logger.info("%d tensors cannot be compared inside the engine: %s ...", len(left_out), left_out[:3])
        return len(names), self._compare(header.version)

    def _checked(self, what: str, check: Callable[[], list[str]]) -> None:
        """Raise on every rank if `check` finds problems on any; on this one alone, at once, if it fails."""
        try:
            problems = check()
        except Exception as error:
            # It is a collective, in which the other ranks may wait: only this process ending its call can free them.
            logger.exception("a weight sync failed: %s", what)
            self._rollout.unload()
            message = f"{what}: {type(error).__name__}: {error}"
            raise WeightSyncError(f"weight sync failed on rank {self._process.rank}: {message}", [message]) from error
        self._require(problems)

    def _order(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """load_format: tensor by tensor, or (dummy_hf) the full state dict first: more memory, no half-loaded engine
        when the export fails."""
        return iter(list(stream)) if self._whole_first else iter(stream)

    def _compare(self, version: int) -> Gap:
        gaps: list[Gap] = []

        def measure() -> list[str]:
            gaps.append(self._probe.measure(self._engine, self._rollout, version))
            problem = self._probe.problem(gaps[0])
            return [] if problem is None else [problem]

        self._checked("the probe", measure)
        self._probe.passed(gaps[0])
        return gaps[0]

    def _require(self, problems: list[str]) -> None:
        """Raise on every rank if any rank has a problem."""
        alone = self._process.world_size == 1
        if not (problems if alone else all_reduce_max(len(problems))):  # one number: texts travel if there are any
            return
        everyones: list[list[str]] = [problems]
        if not alone:
            everyones = [[] for _ in range(self._process.world_size)]
            dist.all_gather_object(everyones, problems)
        bad = {rank: found for rank, found in enumerate(everyones) if found}
        self._rollout.unload()
        rank, found = next(iter(bad.items()))
        more = len(found) - _MAX_LISTED
        listed = "; ".join(found[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
        every = list(dict.fromkeys(problem for some in bad.values() for problem in some))
        raise WeightSyncError(f"weight sync failed on ranks {sorted(bad)}. Rank {rank}: {listed}", every)


def _recording(stream: Iterable[tuple[str, Tensor]], errors: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """The stream as it is; what it raises is kept in `errors` too, so that it can be told from a loader's error."""
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise
