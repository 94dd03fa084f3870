"""The rollout engine's side of a weight sync: load what comes, and prove that it is there.

Four proofs, each sees what the others cannot: every name of the model came once with its shape; the checksums of what
came and of what the engine holds are those of the trainer's shards, computed before anything was gathered (header,
ledger); no prompt of before is left in the engine's cache; trainer and engine agree on the log-probs of probe tokens
(probe). A sync that fails on any rank of the receiving group fails on all of them and leaves their engines unloaded; a
rank that raises inside a collective does so alone, and the worker group ends the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from torch import Tensor

from verl_like.config import LoadFormat, RolloutConfig
from verl_like.parallel.dist import ProcessInfo, all_reduce_max
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.channel import ChannelError, ReceivingEnd
from verl_like.weight_sync.header import Header, Wanted
from verl_like.weight_sync.ledger import QuantisedLedger, WeightLedger
from verl_like.weight_sync.probe import Gap, Probe
from verl_like.weight_sync.verdict import Problems, Receipt, WeightSyncError

logger = logging.getLogger(__name__)


class WeightReceiver:
    """Fills one rollout engine. `receive` and `unload` are collective over the receiving process group.

    name: of this rank in messages.
    """

    def __init__(
        self, rollout: RolloutEngine, config: RolloutConfig, process: ProcessInfo, *, name: str = "rollout rank {}"
    ) -> None:
        self._rollout, self._process = rollout, process
        self._name = name.format(process.rank)
        self._names = [name.format(rank) for rank in range(process.world_size)]
        self._whole_first = config.load_format == LoadFormat.dummy_hf
        self._tolerance, self._quantization = config.sync_probe_tolerance, config.quantization
        self._quantised: QuantisedLedger | None = None  # of the sync under way
        self._probe: Probe | None = None
        self._has_said = False

    def wanted(self) -> Wanted:
        """Requirements that the sender has to know; local."""
        rollout = self._rollout
        return Wanted(
            dtype=rollout.dtype,
            keeps_adapters=rollout.keeps_adapters,
            tokenizer_size=rollout.tokenizer_size,
            max_model_len=rollout.max_model_len,
            held=rollout.held,
        )

    def receive(self, channel: ReceivingEnd) -> Receipt:
        """Take the next update; what any rank has found is in the receipts of all, and their engines are unloaded.

        Raises WeightSyncError where this rank alone cannot go on; its engine is unloaded, and the others wait for it in
        a collective: only this process ending its call can free them.
        """
        self._rollout.pause()  # nothing is drawn from weights that are being replaced, or not proved yet
        began = time.perf_counter()
        try:
            header, stream = self._header(channel)
            began = time.perf_counter()
            return self._receive(header, stream, began)
        except _Agreed as agreed:
            self._rollout.unload()
            return Receipt(mark=None, seconds=time.perf_counter() - began, problems=agreed.problems)

    def unload(self) -> None:
        """After a verdict against an update that was well received here."""
        self._rollout.unload()

    def _header(self, channel: ReceivingEnd) -> tuple[Header, Iterator[tuple[str, Tensor]]]:
        got: list[tuple[Header, Iterator[tuple[str, Tensor]]]] = []
        problems: list[str] = []
        try:
            got.append(channel.receive())
            held = self._rollout.held
            if got[0][0].form == "adapters" and (held is None or held.mark != got[0][0].base):
                problems.append(f"adapters came for weights that the engine does not hold: it has {held}")
        except ChannelError as error:
            problems.append(str(error))
        try:
            self._require(problems)
        except _Agreed as agreed:
            if got:  # the sender waits for this rank to take what comes
                channel.fail(str(WeightSyncError.of(agreed.problems)))
            raise
        return got[0]

    def _receive(self, header: Header, stream: Iterator[tuple[str, Tensor]], began: float) -> Receipt:
        prove = header.checksums is not None
        if prove and self._rollout.held is not None:
            self._rollout.cached_tokens()  # leaves a prompt that the load must make the engine forget
        ledger = WeightLedger(header)
        self._require(self._load(ledger, header, stream))
        num_read_back, gap = self._proved(header, ledger) if prove else (0, None)
        receipt = Receipt(
            mark=header.mark,
            seconds=time.perf_counter() - began,
            bytes=ledger.num_bytes,
            num_tensors=ledger.num_tensors,
            num_read_back=num_read_back,
            gap=gap,
        )
        logger.debug("weights of version %d received: %s", header.version, receipt)
        return receipt

    def _load(self, ledger: WeightLedger, header: Header, stream: Iterator[tuple[str, Tensor]]) -> list[str]:
        """The problems this rank saw. The stream is always read to its end: the sender waits for it, and in one process
        it is a collective."""
        partial = header.form == "adapters"
        if not partial:
            self._rollout.unload()
        errors: list[Exception] = []
        coming, problems = _recording(stream, errors), list[str]()
        watched = ledger.watch(coming)
        if self._quantization is not None and header.checksums is not None:
            self._quantised = QuantisedLedger(self._quantization)
            watched = self._quantised.watch(watched)
        try:
            self._rollout.load_weights(self._order(watched), header.version, partial=partial, mark=header.mark)
        except Exception as error:
            if not errors:
                logger.exception("loading weights into the rollout engine failed")
                problems.append(f"{type(error).__name__}: {error}")
        if not errors:
            try:
                for _ in ledger.watch(coming):
                    pass
            except ChannelError:
                pass  # it is in `errors`
        if errors and isinstance(errors[0], ChannelError):
            return [str(errors[0])]
        if errors:  # the trainer's, in this process: its other ranks are left alone in a gather
            raise self._alone("exporting the trained weights failed", errors[0]) from errors[0]
        return ledger.problems() + problems

    def _proved(self, header: Header, ledger: WeightLedger) -> tuple[int, Gap]:
        """After a load: how many tensors were compared inside the engine, and the probe's gap."""
        held: list[tuple[str, int]] = []
        quantised: list[tuple[str, Tensor]] = []

        def look_inside() -> list[str]:
            problems = list[str]()  # not returned before all that ranks do together is done
            held.extend(self._rollout.weight_checksums(header.shapes))
            if self._quantised is not None:
                quantised.extend(self._rollout.weight_sketches(header.shapes))
                problems, self._quantised = self._quantised.differences(quantised), None
            stale = self._rollout.cached_tokens()
            cache = [f"the prefix cache was not emptied: {stale} tokens of a prompt of before"] if stale else []
            return problems + ledger.differences(held) + cache

        self._checked("reading the rollout engine", look_inside)
        names = {name for name, _ in held} | {name for name, _ in quantised}
        if not self._has_said and len(names) < len(header.shapes):
            left_out = sorted(header.shapes.keys() - names)
            logger.info("%d tensors cannot be compared inside the engine: %s ...", len(left_out), left_out[:3])
        self._has_said = True
        return len(names), self._compare(header)

    def _compare(self, header: Header) -> Gap:
        if self._probe is None:
            quantised = self._quantization is not None
            self._probe = Probe(self._rollout.dtype, header.trainer_dtype, self._tolerance, quantised=quantised)
        probe, text, gaps = self._probe, header.probe, list[Gap]()
        assert text is not None

        def measure() -> list[str]:
            gaps.append(probe.measure(self._rollout, text))
            problem = probe.problem(gaps[0])
            return [] if problem is None else [problem]

        self._checked("the probe", measure)
        probe.passed(gaps[0])
        return gaps[0]

    def _order(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """load_format: tensor by tensor, or (dummy_hf) the full state dict first: more memory, no half-loaded engine
        when the export fails."""
        return iter(list(stream)) if self._whole_first else iter(stream)

    def _checked(self, what: str, check: Callable[[], list[str]]) -> None:
        """Require that `check` finds no problems; if it fails, this rank leaves alone, at once."""
        try:
            problems = check()
        except Exception as error:
            # It is a collective, in which the other ranks may wait: only this process ending its call can free them.
            raise self._alone(what, error) from error
        self._require(problems)

    def _alone(self, what: str, error: Exception) -> WeightSyncError:
        logger.error("a weight sync failed: %s", what, exc_info=error)
        self._rollout.unload()
        return WeightSyncError.of({self._name: [f"{what}: {type(error).__name__}: {error}"]})

    def _require(self, problems: list[str]) -> None:
        """Raise _Agreed on every rank if any rank has a problem."""
        alone = self._process.world_size == 1
        if not (problems if alone else all_reduce_max(len(problems))):  # one number: texts travel if there are any
            return
        everyones: list[list[str]] = [problems]
        if not alone:
            everyones = [[] for _ in range(self._process.world_size)]
            dist.all_gather_object(everyones, problems)
        raise _Agreed({name: found for name, found in zip(self._names, everyones, strict=True) if found})


class _Agreed(Exception):
    """Some rank has found problems, and every rank knows them."""

    def __init__(self, problems: Problems) -> None:
        super().__init__()
        self.problems = problems


def _recording(stream: Iterable[tuple[str, Tensor]], errors: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """The stream as it is; what it raises is kept in `errors` too, so that it can be told from a loader's error."""
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise
