"""Checkpoint files read without running what they hold: the index of torch.distributed.checkpoint is a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

AFRESH = "begins_afresh"  # file in place of a part that another trainer's checkpoint does not give; says why
# What the random state of numpy is made of, beside plain data.
OF_NUMPY = [np.ndarray, np.dtype, np.dtypes.UInt32DType, np._core.multiarray._reconstruct]  # pyright: ignore

_KNOWN = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up
    (_StorageInfo.__module__, _StorageInfo.__name__): _StorageInfo,
    ("pathlib", "PosixPath"): Path,
}


class HarmlessReader(FileSystemReader):
    """Reader of torch's whose index may name the classes of an index and nothing else.

    Tensors it reads with weights_only anyway. Raises ValueError for an index that names anything else.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Unpickler(file).load()
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def faults_of(folder: Path) -> list[str]:
    """List the files of a checkpoint's part that cannot be read without running them.

    These are the index of shards and the small pickles of the ranks. Files of weights are left to their checksums.
    """
    faults = []
    for path in (*folder.glob(".metadata"), *folder.glob("rank_*.pt")):
        try:
            if path.name == ".metadata":
                HarmlessReader(folder).read_metadata()
            else:
                with torch.serialization.safe_globals(OF_NUMPY):
                    torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            faults.append(f"{path} cannot be read: {(str(error) or repr(error)).splitlines()[0]:.300}")
    return faults


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        elif module == metadata.__name__ and getattr(vars(metadata).get(name), "__module__", "") == module:
            known = vars(metadata)[name]
        if known is None:
            raise ValueError(f"the checkpoint's .metadata names {module}.{name}, which no checkpoint needs: not loaded")
        return known
