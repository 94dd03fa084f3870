"""Send the trained weights to the rollout engine and prove that they arrived.

Three proofs, each sees what the others cannot: every name of the model came once with its shape (ledger); what the
engine holds is bit for bit what was sent, where it can be read back (checksums); trainer and engine agree on the
log-probs of probe tokens (probe). A sync that fails on any rank fails on all of them and leaves the engine unloaded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.config import LoadFormat, RolloutConfig
from verl_like.engine.train_engine import TrainEngine, WeightForm
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.weight_sync.ledger import WeightLedger
from verl_like.weight_sync.probe import Gap, Probe
from verl_like.weight_sync.transport import InProcessTransport, Transport, in_buckets

logger = logging.getLogger(__name__)

_MAX_LISTED = 12  # problems named in an error message


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trained weights; it is unloaded. A later full sync may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One proved sync."""

    version: int
    form: WeightForm
    seconds: float
    bytes: int  # of full tensors, in the rollout dtype
    num_tensors: int
    num_read_back: int  # tensors whose checksum was compared inside the engine
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
        self._bucket_bytes = config.update_weights_bucket_megabytes * 2**20
        self._transport: Transport = InProcessTransport(rollout)
        self._probe = Probe(rollout.dtype, trainer_dtype, config.sync_probe_tolerance)

    def sync(self, version: int) -> SyncReport:
        """Fill the rollout engine with the engine's weights as `version`. Raises WeightSyncError on every rank."""
        start = time.perf_counter()
        form = self._form()
        ledger = WeightLedger(self._engine.weight_names(form), self._rollout.dtype, with_checksums=self._prove)
        self._require(self._send(ledger, version, form))
        num_read_back, gap = 0, None
        if self._prove:
            held = self._rollout.read_weights() or {}
            num_read_back = len(held.keys() & ledger.checksums.keys())
            self._require(ledger.differences(held))
            gap = self._compare(version)
        report = SyncReport(
            version=version,
            form=form,
            seconds=time.perf_counter() - start,
            bytes=ledger.num_bytes,
            num_tensors=ledger.num_tensors,
            num_read_back=num_read_back,
            probe_gap=None if gap is None else gap.largest,
            probe_gap_mean=None if gap is None else gap.mean,
        )
        logger.debug("weight sync: %s", report)
        return report

    def _form(self) -> WeightForm:
        """The same on every rank: a sync that fails on one unloads the engines of all."""
        if not self._rollout.keeps_adapters:
            return "merged"
        return "adapters" if self._rollout.holds_weights else "apart"

    def _send(self, ledger: WeightLedger, version: int, form: WeightForm) -> list[str]:
        """Stream the weights; the problems this rank saw. The stream is always read to its end: it is a collective."""
        self._transport.begin(version, partial=form == "adapters")
        export_errors: list[Exception] = []
        exported = _recording(self._engine.export_weights(self._rollout.dtype, form), export_errors)
        problems: list[str] = []
        try:
            self._transport.send(in_buckets(self._order(ledger.watch(exported)), self._bucket_bytes))
            self._transport.finish()
        except Exception as error:
            logger.exception("loading weights into the rollout engine failed")
            problems.append(f"{type(error).__name__}: {error}")
        if export_errors:
            # The other ranks are left alone in a gather: only this process ending its call can free them.
            self._rollout.unload()
            raise WeightSyncError(f"exporting the trained weights failed: {export_errors[0]}") from export_errors[0]
        for _ in ledger.watch(exported):
            pass
        return ledger.faults() + problems + ledger.missing()

    def _order(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """load_format: tensor by tensor, or (dummy_hf) the full state dict first: more memory, no half-loaded engine
        when the export fails."""
        return iter(list(stream)) if self._whole_first else iter(stream)

    def _compare(self, version: int) -> Gap:
        gap, problems = Gap(math.nan, math.nan), []
        try:
            gap = self._probe.measure(self._engine, self._rollout, version)
            problem = self._probe.problem(gap)
            problems = [] if problem is None else [problem]
        except Exception as error:
            logger.exception("the probe of a weight sync failed")
            problems = [f"the probe failed: {type(error).__name__}: {error}"]
        self._require(problems)
        self._probe.passed(gap)
        return gap

    def _require(self, problems: list[str]) -> None:
        """Raise on every rank if any rank has a problem."""
        everyones: list[list[str]] = [problems]
        if self._process.world_size > 1:
            everyones = [[] for _ in range(self._process.world_size)]
            dist.all_gather_object(everyones, problems)
        bad = {rank: found for rank, found in enumerate(everyones) if found}
        if not bad:
            return
        self._rollout.unload()
        rank, found = next(iter(bad.items()))
        more = len(found) - _MAX_LISTED
        listed = "; ".join(found[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
        raise WeightSyncError(f"weight sync failed on ranks {sorted(bad)}. Rank {rank}: {listed}")


def _recording(stream: Iterable[tuple[str, Tensor]], errors: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """The stream as it is; what it raises is kept in `errors` too, so that it can be told from a loader's error."""
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise
