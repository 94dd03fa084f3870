"""Trained weights as they lie on a disk, read tensor by tensor in one process without accelerator or process group.

Three forms: the folder `model` of our checkpoints (torch.distributed.checkpoint), verl's one file per rank
(model_world_size_<W>_rank_<R>.pt), and safetensors.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from verl_like.checkpoint.harmless import HarmlessReader
from verl_like.small_files import opened_tensors

_VERL_FILE = re.compile(r"model_world_size_([0-9]+)_rank_([0-9]+)\.pt")
_PEFT_PREFIX, _PEFT_PARTS = "base_model.model.", (".base_layer.", ".default.")


class StoredWeights(Protocol):
    """Weights on a disk. Names are those of the module, without prefixes."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        ...

    def empty(self, name: str) -> Tensor:
        """A tensor of its shape and dtype on the meta device."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors. Raises ValueError for files that do not hold them."""
        ...


class ShardedFolder:
    """Folder that any number of ranks wrote with torch.distributed.checkpoint.

    prefix: text before each name in the folder, which `names` does not have.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        stored = HarmlessReader(folder).read_metadata().state_dict_metadata
        self._empty = {
            name.removeprefix(prefix): torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in stored.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self.names = tuple(self._empty)

    def empty(self, name: str) -> Tensor:
        return self._empty[name]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors: dict[str, Any] = {
            self.prefix + name: torch.empty_like(self._empty[name], device="cpu") for name in names
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group is meant
            dcp.load(tensors, storage_reader=HarmlessReader(self.folder), no_dist=True)
        return {name: tensors[self.prefix + name] for name in names}


class VerlFiles:
    """Files of a checkpoint of verl's, one per rank (FSDP1, FSDP2): plain tensors, or DTensors cut along one dimension.

    Files are mapped into memory, not read as a whole.

    trust: also unpickle what is not known to be harmless.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        files = {int(match[2]): path for path in folder.iterdir() if (match := _VERL_FILE.fullmatch(path.name))}
        sizes = {int(match[1]) for path in files.values() if (match := _VERL_FILE.fullmatch(path.name))}
        if len(sizes) != 1 or len(files) != max(sizes) or sorted(files) != list(range(*sizes)):
            raise ValueError(
                f"{folder} does not hold the files of one run's ranks, model_world_size_W_rank_0.pt to rank_(W-1).pt: "
                f"it has {', '.join(sorted(path.name for path in files.values()))}"
            )
        self.folder, self._trust, self.files = folder, trust, [files[rank] for rank in sorted(files)]
        self.ranks = [self._open(path) for path in self.files]
        self.names = tuple(self.ranks[0])

    @staticmethod
    def is_in(folder: Path) -> bool:
        """True where the folder holds such files."""
        return any(_VERL_FILE.fullmatch(path.name) for path in folder.iterdir())

    def empty(self, name: str) -> Tensor:
        tensor = self.ranks[0][name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.joined(name, [state[name] for state in self.ranks]) for name in names}

    @property
    def replica(self) -> list[int]:
        """The ranks that hold the whole model between them, in order."""
        return _replica(next((each for each in self.ranks[0].values() if isinstance(each, DTensor)), None))

    def joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole of a tensor that these are the parts of, of all ranks."""
        first = parts[0]
        if not isinstance(first, DTensor):
            return first.clone()
        *others, last = first.placements
        if any(not each.is_replicate() for each in others):
            raise ValueError(f"{self.folder}: {name} is cut along several mesh dimensions ({first.placements})")
        if not isinstance(last, Shard):
            return first.to_local().clone()
        whole = torch.cat([cast(DTensor, parts[rank]).to_local() for rank in _replica(first)], dim=last.dim)
        if whole.shape != first.shape:
            raise ValueError(f"{self.folder}: the parts of {name} make {tuple(whole.shape)}, not {tuple(first.shape)}")
        return whole

    def _open(self, path: Path) -> dict[str, Any]:
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=not self._trust)
        except Exception as error:
            what = str(error).splitlines()[0]
            raise ValueError(
                f"{path} cannot be read: {what}. If you trust its author: verl-like export --trust-pickle makes a "
                "folder for model.path of it"
            ) from error
        return {_plain_name(name): tensor for name, tensor in state.items()}


class SafetensorsFolder:
    """The safetensors files of a Hugging Face folder; names as they are there."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with opened_tensors(path) as stored:
                self._files |= dict.fromkeys(stored.keys(), path)
        self.names = tuple(self._files)

    def empty(self, name: str) -> Tensor:
        return torch.empty_like(self.read([name])[name], device="meta")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            with opened_tensors(self._files[name]) as stored:
                found[name] = stored.get_tensor(name)
        return found


class LoadedModel:
    """Weights in memory, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors, self.names = tensors, tuple(tensors)

    def empty(self, name: str) -> Tensor:
        return self._tensors[name].to("meta")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}


def _replica(tensor: DTensor | None) -> list[int]:
    if tensor is None:
        return [0]
    mesh = tensor.device_mesh.mesh
    return mesh.reshape(-1, mesh.shape[-1])[0].tolist()


def _plain_name(name: str) -> str:
    """The module's name of what peft calls base_model.model.<module>.base_layer.weight, or .lora_A.default.weight."""
    name = name.removeprefix(_PEFT_PREFIX)
    for part in _PEFT_PARTS:
        name = name.replace(part, ".")
    return name
