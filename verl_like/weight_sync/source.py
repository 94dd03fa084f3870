"""The trainer's side of a weight sync: what is sent, and what it must be."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from verl_like.engine.train_engine import WeightChanges, WeightForm
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import HeldWeights
from verl_like.weight_sync.channel import ChannelError, SendingEnd
from verl_like.weight_sync.header import Header, Wanted, mark_of
from verl_like.weight_sync.probe import trained_text
from verl_like.weight_sync.verdict import Sent, WeightSyncError

if TYPE_CHECKING:
    from verl_like.engine.fsdp import FSDPEngine

logger = logging.getLogger(__name__)


class WeightSource:
    """Sends one training engine's weights. All methods are collective over the trainer's ranks.

    prove: rollout.sync_probe. trainer_dtype: what the trainer computes in; decides with the rollout's dtype how large a
    probe gap is normal. An engine that keeps LoRA adapters apart gets the base weights once, and then the adapters
    alone; whenever it holds something else than what was sent to it last, both again.
    """

    def __init__(
        self,
        engine: FSDPEngine,
        process: ProcessInfo,
        *,
        prove: bool,
        trainer_dtype: torch.dtype = torch.float32,
        name: str = "trainer rank {}",
    ) -> None:
        self._engine, self._prove, self._trainer_dtype = engine, prove, trainer_dtype
        self._name = name.format(process.rank)
        self._sent: Header | None = None  # last
        self.delivered: Header | None = None  # the last of which a receiver has shown that it holds it

    def arrived(self) -> None:
        """Note that the weights sent last are proved to be there.

        The next sync compares with them, even where the engine has let go of them.
        """
        self.delivered = self._sent

    def send(self, version: int, wanted: Wanted, channel: SendingEnd) -> Sent:
        """Send the engine's weights as `version`, to receivers that want `wanted`; problems are in the result.

        Raises WeightSyncError where this rank alone cannot go on: the others wait
        for it in a collective, and only this process ending its call can free them. Receivers are told.
        """
        began = time.perf_counter()
        try:
            header = self._header(version, wanted)
        except Exception as error:
            raise self._alone(channel, "the header of the trained weights", error) from error
        if self._has_sent(wanted.held):
            self.delivered = self._sent
        before = self.delivered
        changed, problems = header.num_changed(before), list[str]()
        moved = before is not None and header.changes.must_differ(before.changes)
        if changed == 0 and moved:
            problems = self._nothing_changed(header)
        seconds = time.perf_counter() - began
        if problems:
            channel.fail("; ".join(problems))
        else:
            problems = self._send(header, channel)
        return Sent(
            version=version,
            form=header.form,
            mark=header.mark,
            num_changed=changed,
            seconds=seconds,
            problems={self._name: problems} if problems else {},
        )

    def _send(self, header: Header, channel: SendingEnd) -> list[str]:
        self._sent = header
        stream = self._engine.export_weights(header.dtype, header.form)
        try:
            channel.send(header, stream)
        except ChannelError as error:
            for _ in stream:  # the other ranks take part in its gathers
                pass
            return [str(error)]
        except Exception as error:
            raise self._alone(channel, "exporting the trained weights failed", error) from error
        return []

    def _header(self, version: int, wanted: Wanted) -> Header:
        """Header of the update that will be sent; the same on every rank."""
        form, base = self._form(wanted), ""
        if form == "adapters":
            assert wanted.held is not None
            base = wanted.held.mark
        checksums = self._engine.weight_checksums(wanted.dtype, form) if self._prove else None
        sizes = (wanted.tokenizer_size, wanted.max_model_len)
        return Header(
            version=version,
            form=form,
            dtype=wanted.dtype,
            shapes=self._engine.weight_names(form),
            checksums=checksums,
            probe=trained_text(self._engine, *sizes, version) if self._prove else None,
            trainer_dtype=self._trainer_dtype,
            changes=self._engine.changes,
            base=base,
            mark=_mark(version, self._engine.changes) if checksums is None else mark_of(checksums, wanted.dtype, base),
        )

    def _form(self, wanted: Wanted) -> WeightForm:
        if not wanted.keeps_adapters:
            return "merged"
        return "adapters" if self._has_sent(wanted.held) else "apart"

    def _has_sent(self, held: HeldWeights | None) -> bool:
        return held is not None and self._sent is not None and held.mark == self._sent.mark

    def _nothing_changed(self, header: Header) -> list[str]:
        if header.dtype != torch.float32:
            logger.warning(
                "the optimizer has stepped, but no weight has changed in %s since the last sync: the rollout engine "
                "still samples from the policy of version %s; updates smaller than that precision are not seen by it",
                *(header.dtype, self.delivered and self.delivered.version),
            )
            return []
        return [
            f"none of {len(header.shapes)} tensors has changed since the last sync, although the optimizer has "
            "stepped: what is to be sent is not what is trained"
        ]

    def _alone(self, channel: SendingEnd, what: str, error: Exception) -> WeightSyncError:
        logger.exception("a weight sync failed: %s", what)
        message = f"{what}: {type(error).__name__}: {error}"
        channel.fail(message)
        return WeightSyncError.of({self._name: [message]})


def _mark(version: int, changes: WeightChanges) -> str:
    """A name for weights whose numbers were not added up: the same on every rank, another for other weights."""
    return f"unproved {version}/{changes.loads}/{changes.steps}"
