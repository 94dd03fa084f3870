"""Dispatch mode of the twin: CPU tensors stay real, `cuda` tensors are fake, and what the device would do is counted.

Values of fake tensors do not exist: a read answers 1, a copy to the host zeros. Each makes the host wait for the device
and is counted by its place; so is an upload that blocks, and an operand that lies on the host. Memory is that of
storages, rounded as torch's allocator does (512 bytes); what kernels allocate inside themselves is not seen.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from verl_like.kit.bench.meters import group_of, place

_aten = torch.ops.aten
_WRAP = torch.ops._c10d_functional._wrap_tensor_autograd.default  # the same memory; its fake form is a new tensor
_ROUND = 512
_NOT_LAUNCHED = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "is_pinned", "_local_scalar_dense", "detach")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, which all ranks of `group` must issue, in the same order as all others that they share."""

    name: str
    group: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    device: str
    place: str = field(compare=False)
    nbytes: int = field(compare=False)  # of the tensor that is whole


@dataclass(slots=True)
class Counts:
    """Counts of one rank's device since they were taken last."""

    waits: dict[str, int] = field(default_factory=dict)  # "<kind> <file>:<line> <function>": how often
    copied: dict[str, int] = field(default_factory=dict)  # [bytes] "to host", "to device"
    collectives: list[Collective] = field(default_factory=list)
    flops: float = 0.0  # of matrix products and attention
    made: dict[str, int] = field(default_factory=dict)  # [bytes] allocated, by the trainer's file that asked
    launches: int = 0  # operators that write memory: at least a kernel each
    peak: int = 0  # [bytes]


class Twin(TorchDispatchMode):
    """Fake device of one rank; enter it around the trainer's code. `counts` is taken phase by phase."""

    def __init__(self) -> None:
        super().__init__()
        fake_tensor.init_gpu_context = lambda device: None  # in torch's CUDA build a real tensor on the device
        FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment]
        torch.UntypedStorage.resize_ = _resizing(self, torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # type: ignore[method-assign]
        FakeTensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
        self.fake, self.counts, self.allocated = FakeTensorMode(allow_non_fake_inputs=True), Counts(), 0
        self._live: dict[int, tuple[int, Any]] = {}  # storage: (bytes, weak reference)

    def take(self) -> Counts:
        """The counts since the last call. The next peak begins with what is allocated now."""
        taken, self.counts = self.counts, Counts(peak=self.allocated)
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # it comes again with the tensors inside
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks what shape an operator would give: nothing runs
        leaves = tree_leaves([*args, *kwargs.values()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if tensors and (group := group_of(func, leaves)) is not None:
            self._note_collective(func, group, tensors)
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fakes or any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            return self._on_device(func, args, kwargs, tensors, fakes)
        if func is _aten._pin_memory.default:
            return args[0]
        return func(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))

    def _on_device(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], fakes: list[FakeTensor]) -> Any:
        if func is _aten._local_scalar_dense.default:
            self._wait("read")
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _WRAP:
            return args[0].detach()
        to_host = func is _aten._to_copy.default and str(kwargs.get("device")).startswith("cpu")
        if fakes and (to_host or (func is _aten.copy_.default and not isinstance(args[0], FakeTensor))):
            if not (func is _aten.copy_.default and args[2:3] == (True,)):  # to memory that is pinned for that
                self._wait("copy")
            _add(self.counts.copied, "to host", args[0].nbytes)
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype) if to_host else args[0]
        uploads = func in (_aten._to_copy.default, _aten.copy_.default)
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor) and (tensor.ndim or uploads)]
        _add(self.counts.copied, "to device", sum(tensor.nbytes for tensor in on_host))
        if on_host and not (kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:3] == (True,))):
            self._wait("upload")
        with self.fake:
            result = func(*args, **kwargs)
        self.counts.launches += _launches(func)
        self._count_flops(func, args, kwargs, result)
        if uploads and on_host and on_host[0].dtype == torch.int32:
            result.on_host = on_host[0]  # bounds of sequences, for the formula of attention
        self._hold(leaf for leaf in tree_leaves([result]) if isinstance(leaf, FakeTensor))
        return result

    def _count_flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "varlen" in str(func):
            self.counts.flops += attention_flops(args, backward="backward" in str(func))
        elif func.overloadpacket in flop_registry:
            self.counts.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)

    def _wait(self, kind: str) -> None:
        _add(self.counts.waits, f"{kind} {place(sys._getframe(1))}", 1)

    def _hold(self, tensors: Iterable[FakeTensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage._cdata not in self._live:
                key = storage._cdata
                self._live[key] = 0, weakref.ref(storage, lambda _, key=key: self._set(key, None))
                self._set(key, storage.size())
                _add(self.counts.made, place(sys._getframe(1)).partition(":")[0], storage.size())

    def _set(self, key: int, size: int | None) -> None:
        before, held = self._live.pop(key)
        if size is not None:
            self._live[key] = -(-size // _ROUND) * _ROUND, held
        self.allocated += self._live.get(key, (0, None))[0] - before
        self.counts.peak = max(self.counts.peak, self.allocated)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note another size of a storage: FSDP2 frees gathered weights that way."""
        if storage._cdata in self._live:
            self._set(storage._cdata, storage.size())

    def _note_collective(self, func: Any, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        size = max(tensor.nbytes for tensor in tensors)
        size *= len(ranks) if func.namespace == "_c10d_functional" and "gather" in str(func) else 1
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        about = (func._schema.name, ranks, shapes, str(tensors[0].dtype), tensors[0].device.type)
        self.counts.collectives.append(Collective(*about, place=place(sys._getframe(1)), nbytes=size))


def _resizing(twin: Twin, own: Any) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = own(storage, size)
        twin.resized(storage)
        return result

    return resize_


def _add(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] = counts.get(name, 0) + number


@functools.cache
def _launches(func: Any) -> bool:
    """True for an operator that writes memory of the device."""
    name = func._schema.name.partition("::")[2]
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not view and not name.startswith(_NOT_LAUNCHED)


def attention_flops(args: Any, *, backward: bool) -> float:
    """Operations of causal attention over sequences: 4 x heads x head size for each pair of a query and a key it sees.

    args: of the operator; tensors of int32 are the bounds of queries and of keys. A backward pass counts twice.
    """
    q = next(a for a in args if isinstance(a, Tensor) and a.is_floating_point())
    bounds = [a.__dict__["on_host"] for a in args if isinstance(a, Tensor) and hasattr(a, "on_host")]
    own, seen = bounds[0].diff().double(), bounds[-1].diff().double()
    pairs = float((own * (seen - own) + own * (own + 1) / 2).sum())
    return (8.0 if backward else 4.0) * pairs * q.shape[-2] * q.shape[-1]
