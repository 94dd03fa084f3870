"""A measuring probe: bytes of all tensors alive that operations inside have made, and the most there ever were."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakBytes(TorchDispatchMode):
    """`peak`: the largest sum of storage bytes alive at the end of any operation.

    Storages that existed before are not counted, views are counted once. Scratch memory inside one operation is not
    seen: `test_probe_sees_what_the_process_holds` compares with the process's own figure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in before | self._seen:
                self._add(t.untyped_storage())
        self.peak = max(self.peak, self._now)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self._now += size

        def gone() -> None:
            self._seen.discard(key)
            self._now -= size

        weakref.finalize(storage, gone)

    def __enter__(self) -> PeakBytes:
        gc.collect()
        return super().__enter__()
