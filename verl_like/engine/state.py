"""State of an engine on disk: shards through torch.distributed.checkpoint, counters and RNG per rank, HF export.

Sharded parts are keyed by parameter name, so that they load on another number of ranks. Each rank reads the files
that it wrote again, for their checksums. With `checkpoint.async_save` a thread writes them while training goes on.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from verl_like.checkpoint.checksums import note
from verl_like.checkpoint.harmless import AFRESH, OF_NUMPY, HarmlessReader
from verl_like.heartbeat import span
from verl_like.parallel.sharding import local_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_SLOWEST_DISK = 10e6  # [bytes/s] of one rank: what is slower counts as stuck


def save_sharded(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write each rank's shards (collective over `group`, or all ranks). Raises RuntimeError when any rank cannot."""
    try:
        with _watched("writing", tensors):
            dcp.save(tensors, checkpoint_id=str(folder), process_group=group)
    except CheckpointException as error:  # a BaseException: it would pass by whoever reports errors of a rank
        causes = "; ".join(
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()
        )
        there = next(parent for parent in folder.parents if parent.is_dir())  # torch says nothing of a full disk
        free = f"{shutil.disk_usage(there).free / 2**20:,.0f} MB are free there"
        raise RuntimeError(f"writing {folder} failed ({free}): {causes}") from error
    rank = dist.get_rank(group)
    own = list(folder.glob(f"__{rank}_*"))  # as torch.distributed.checkpoint's FileSystemWriter names them
    note(folder, [*own, folder / ".metadata"] if rank == 0 else own, rank)


def _watched(what: str, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Tell the watchdog how many bytes this rank writes or reads inside."""
    amount = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
    return span(what, amount=amount, expected_s=amount / _SLOWEST_DISK)


def load_sharded(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the shards given from a folder that any number of ranks wrote (collective)."""
    _require(folder)
    if (folder / AFRESH).exists():
        log.warning("%s begins afresh: %s", folder.name, (folder / AFRESH).read_text())
        return
    reader = HarmlessReader(folder)
    try:
        with torch.no_grad(), _watched("reading", tensors):
            reader.read_metadata()  # torch 2.11 goes on without an index that is refused, and says that there is none
            dcp.load(tensors, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise RuntimeError(f"reading {folder} failed: {error}") from error


def not_finite(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> tuple[list[str], bool]:
    """Find tensors with NaN or infinite numbers: names in this rank's shard, and whether any rank has one.

    Collective. device: where the ranks' process group takes its messages from.
    """
    shards = [(name, local_tensor(tensor)) for name, tensor in tensors]
    extremes = [  # NaN is both; a tenth of the time of isfinite on every number
        (name, torch.stack(torch.aminmax(shard)))
        for name, shard in shards
        if shard.is_floating_point() and shard.numel() > 0
    ]
    names = [name for name, pair in extremes if not bool(pair.isfinite().all())]
    count = torch.tensor(len(names), device=device)
    dist.all_reduce(count)
    return names, bool(count)


def save_extra(folder: Path, rank: int, counters: dict[str, int]) -> None:
    """Write the counters and this rank's random state."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"rank_{rank}.pt"
    torch.save({"counters": counters, "rng": _rng_state()}, own)
    note(folder, [own], rank)
    dist.barrier()


def load_extra(folder: Path, rank: int) -> dict[str, int]:
    """Read the counters; restore the random state too where this rank was there when the checkpoint was written."""
    _require(folder)
    own = folder / f"rank_{rank}.pt"
    with torch.serialization.safe_globals(OF_NUMPY):
        stored = torch.load(own if own.exists() else folder / "rank_0.pt", weights_only=True)
    if own.exists() and stored["rng"] is not None:
        _set_rng_state(stored["rng"])
    else:
        log.warning("%s has no random state for rank %d: it keeps its own", folder, rank)
    return stored["counters"]


def export_hf(
    hf: PreTrainedModel, weights: Iterator[tuple[str, Tensor]], folder: Path, *, rank: int, dtype: torch.dtype
) -> None:
    """Write what `from_pretrained` reads; every rank must drain `weights`, rank 0 writes (collective)."""
    collected = {name: tensor.cpu().contiguous() for name, tensor in weights if rank == 0}
    if rank == 0:
        write_config(hf, folder, dtype)
        _write_safetensors(collected, folder)
        note(folder, folder.glob("*.safetensors"), rank)
    dist.barrier()


def export_adapter(weights: Iterator[tuple[str, Tensor]], config: dict[str, Any], folder: Path, *, rank: int) -> None:
    """Write a LoRA adapter as the peft library reads it; every rank drains `weights`, rank 0 writes (collective)."""
    collected = {name: tensor.cpu().contiguous() for name, tensor in weights if rank == 0}
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(collected, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    dist.barrier()


def write_config(hf: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the model's config.json; one rank does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf.config.__class__.from_dict(hf.config.to_dict())
    name = type(hf).__name__.removeprefix("FSDP")
    has_value_head = "score" in dict(hf.named_children())
    config.architectures = [name.replace("ForCausalLM", "ForSequenceClassification") if has_value_head else name]
    config.dtype = dtype
    config.save_pretrained(folder)
    if not has_value_head and hf.generation_config is not None:
        hf.generation_config.to_json_file(folder / "generation_config.json")  # whatever stands in it


def _write_safetensors(tensors: dict[str, Tensor], folder: Path) -> None:
    plan = split_torch_state_dict_into_shards(tensors)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist: the checkpoint was saved without it. Take it out of checkpoint.load_contents"
        )


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


Part = tuple[dict[str, Tensor], Path]  # shards by name, and the folder they go to


class BackgroundWriter:
    """Writer that copies shards to host memory at once and writes them later, one checkpoint at a time.

    Writing is collective: the thread has a process group of its own, so that its messages never meet the trainer's.
    The constructor is collective.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def write(self, parts: list[Part]) -> None:
        """Begin to write; first waits for the checkpoint before it, so that at most one copy is in host memory."""
        self.wait()
        copies = [({name: t.detach().to("cpu", copy=True) for name, t in part.items()}, to) for part, to in parts]
        self._written = self._thread.submit(self._write, copies)

    def done(self) -> bool:
        """True where no checkpoint is being written. Raises the error of a writing that failed."""
        if self._written is None:
            return True
        if self._written.done():
            self.wait()
            return True
        return False

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of a writing that failed."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write(self, parts: list[Part]) -> None:
        for tensors, folder in parts:
            save_sharded(tensors, folder, group=self._group)
