"""cuda turned into cpu: the CUDA branches run, with the CPU's arithmetic, under the stand-in of torch.cuda.

Every tensor has a place, that of its storage: an answer of an operation lies where its inputs lie, or where the call
says. It is what `.device` and `.is_cuda` tell, what memory is counted by, and what a move copies; operations that mix
places fail as on a card. Each operation on the card belongs to the stream that is current: where it touches memory that
other work may still use, without having waited for it, the card keeps a fault (`faults()`).

Processes enter it before they build anything: `enter()`, or from the start of a process by `TWIN=1` with
`tests/twin/site` on PYTHONPATH, which carries it to all processes that are started from there.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from tests.twin import cuda_lines, kernels, stand_in
from tests.twin.stand_in import Card, Lane

CPU = torch.device("cpu")
# operations that take tensors of two places on a card too
_MIXES = {
    "copy_",
    "_to_copy",
    "_foreach_copy_",
    "index",
    "index_put_",
    "index_put",
    "_index_put_impl_",
    "set_",
    "resize_",
}
_MIXES |= {"_foreach_mul_", "_foreach_div_"}
_READS_VALUE = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "unique_consecutive",
    "_unique2",
    "is_nonzero",
}


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one storage, and who used it last: the newest write, and each lane's reads since."""

    place: str
    size: int
    home: Lane
    pinned: bool = False
    wrote: tuple[Lane, int] | None = None
    read: dict[Lane, int] = field(default_factory=dict)
    lent: set[Lane] = field(default_factory=set)  # by Tensor.record_stream
    resized: int = 0  # bytes more than the storage had at first

    def __str__(self) -> str:
        return f"memory of {self.size} bytes on {self.place}"


class _Call(threading.local):
    """What the call under way says of places: where its answer lies, in pinned memory or not, and whether to wait."""

    place: str | None = None
    non_blocking: bool = False
    pinned: bool = False


_blocks: dict[int, Block] = {}
_call = _Call()
_faults: list[str] = []
_freed_on: dict[Lane, list[tuple[int, dict[Lane, int]]]] = {}  # by home: memory that its next tensor may get
_entered = ExitStack()  # never left


def faults() -> list[str]:
    """Uses of memory without a wait for those who use it, since the last call."""
    found = _faults.copy()
    _faults.clear()
    return found


def forget() -> None:
    """Forget who uses which memory: what was done under a planted fault is not held against others."""
    for block in [*_blocks.values()]:
        block.wrote, block.read = None, {}
    _freed_on.clear()
    _faults.clear()


def place_of(tensor: Tensor) -> str:
    """Where the tensor's memory is: "cpu", or "cuda:0"."""
    block = block_of(tensor)
    return block.place if block is not None else "cpu"


def block_of(tensor: Any) -> Block | None:
    """The record of a tensor's memory; None where none was needed, on the host."""
    if not isinstance(tensor, Tensor):
        return None
    with torch._C.DisableTorchFunction():
        tensor = _plain(tensor)
        return _blocks.get(tensor.untyped_storage()._cdata) if _is_real(tensor) else None


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor:
        return tensor
    within = getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))  # of a DTensor, of a collective under way
    return tensor if within is None else _plain(within)


def _is_real(tensor: Any) -> bool:
    is_plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return is_plain and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _own(tensor: Tensor, place: str, pinned: bool = False) -> Block:
    storage, home = tensor.untyped_storage(), stand_in.card().stream()
    if place != "cpu":
        stand_in.card().own(storage, place)
        for size, uses in _freed_on.pop(home, ()):  # torch's allocator may give it the memory
            _check(uses, home, f"memory of {size} bytes on {place} is given to others")
    block = _blocks[storage._cdata] = Block(place, storage.nbytes(), home, pinned)
    weakref.finalize(storage, _freed, storage._cdata, block).atexit = False
    return block


def _freed(key: int, block: Block) -> None:
    if _blocks.get(key) is block:
        del _blocks[key]
    if block.place != "cpu":
        stand_in.card().now[block.place] -= block.resized
        uses = block.read | dict([block.wrote] if block.wrote else [])
        _freed_on.setdefault(block.home, []).append(
            (block.size, {k: v for k, v in uses.items() if k not in block.lent})
        )


def _check(uses: dict[Lane, int], lane: Lane, what: str) -> None:
    if any(lane.seen.get(other, 0) < step for other, step in uses.items() if other is not lane):
        stack = [f for f in traceback.extract_stack() if "/verl_like/" in f.filename and "/tests/" not in f.filename]
        where = f"{stack[-1].filename.rpartition('/verl_like/')[2]}:{stack[-1].lineno}" if stack else "elsewhere"
        _faults.append(f"{where}: {what} while another stream uses it")


class Ran(TorchDispatchMode):
    """Take in each operation: places of its answers, and who uses which memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # DTensor asks for shapes
            return func(*args, **kwargs)
        if any(t is not Tensor and t is not torch.nn.Parameter for t in types):
            return NotImplemented  # the wrapper first; its plain tensors come here
        with torch._C.DisableTorchFunction():
            inputs = [x for x in tree_leaves((args, kwargs)) if _is_real(x)]
            blocks = [_blocks.get(x.untyped_storage()._cdata) for x in inputs]
            places = {block.place for block in blocks if block is not None and block.place != "cpu"}
            name = func._schema.name.partition("::")[2]
            if places and _call.place is None and name not in _MIXES:
                _one_place(func, inputs, blocks)
        result = func(*args, **kwargs)
        if func.is_view or not (places or any(blocks) or _call.place not in (None, "cpu") or _call.pinned):
            return result
        place = _call.place or next(iter(places), "cpu")
        with torch._C.DisableTorchFunction():
            known = {x.untyped_storage()._cdata for x in inputs}
            made = {x.untyped_storage()._cdata: x for x in tree_leaves(result) if _is_real(x)}
            fresh = [_own(x, place, _call.pinned) for key, x in made.items() if key not in known and x.nbytes]
            used = [block or block_of(x) or _own(x, "cpu") for x, block in zip(inputs, blocks, strict=True)]
            changed = _changed(func, args, kwargs)
            writes = [block for x, block in zip(inputs, used, strict=True) if any(x is y for y in changed)]
            self._take_in(name, [b for b in used if b not in writes], writes + fresh, args, kwargs)
        return result

    @staticmethod
    def _take_in(name: str, reads: list[Block], writes: list[Block], args: Any, kwargs: Any) -> None:
        card, everything = stand_in.card(), reads + writes
        on_card = any(block.place != "cpu" for block in everything)
        lane = card.stream() if on_card else card.host
        step = lane.step()
        for block in reads:
            _check(dict([block.wrote] if block.wrote else []), lane, f"{block} is read")
            block.read[lane] = step
        for block in writes:
            _check(block.read | dict([block.wrote] if block.wrote else []), lane, f"{block} is written")
            block.wrote, block.read = (lane, step), {}
        host = [block for block in everything if block.place == "cpu"]
        late = _call.non_blocking or kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if on_card and (name in _READS_VALUE or any(not block.pinned for block in host) or (host and not late)):
            card.host.wait_event(lane)  # pageable memory, and what does not say non_blocking, is waited for


def _one_place(func: Any, inputs: list[Tensor], blocks: list[Block | None]) -> None:
    places = {block.place if block else "cpu" for x, block in zip(inputs, blocks, strict=True) if x.dim()}
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {sorted(places)}")


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if func._schema.name.startswith("c10d::"):  # its schemas do not tell
        return [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


_TELLS: dict[Any, Callable[[Block], Any]] = {
    Tensor.device: lambda block: torch.device(block.place),
    Tensor.is_cuda: lambda block: True,
    Tensor.is_cpu: lambda block: False,
    Tensor.get_device: lambda block: torch.device(block.place).index,
}


class Named(TorchFunctionMode):
    """Turn device arguments into cpu and remember what they said; let tensors tell their place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func is torch.device or name == "_parse_to":  # it only reads the arguments of Module.to
            return func(*args, **kwargs)
        block = block_of(args[0]) if args else None
        tells = _TELLS.get(func if name == "get_device" else getattr(func, "__self__", None))
        if tells is not None and block is not None and block.place != "cpu":
            return tells(block)
        if name == "is_pinned":
            return block is not None and block.pinned
        if name in ("numpy", "__array__", "tolist") and block is not None and block.place != "cpu":
            if name != "tolist":
                raise TypeError(f"can't convert {block.place} device type tensor to numpy. Use Tensor.cpu() first")
            stand_in.card().host.wait_event(stand_in.card().stream())
        pinned = bool(kwargs.pop("pin_memory", False)) or name == "pin_memory"
        place = "cpu" if pinned else _place_said(name, args, kwargs)
        if place is None:
            return func(*args, **kwargs)
        late = bool(kwargs.get("non_blocking", False) or (name == "to" and any(x is True for x in args[2:4])))
        if name in ("cuda", "cpu", "pin_memory"):
            func, args, kwargs = Tensor.to, (args[0], CPU), {}
        with _saying(place, late, pinned or (place == "cpu" and late)):
            result = func(*_as_cpu(args), **_as_cpu(kwargs))
            if (
                not isinstance(result, Tensor)
                or not _is_real(_plain(result))
                or (place_of(result) == place and not pinned)
            ):
                return result
            if not any(isinstance(x, Tensor) for x in args):  # made just now, past the dispatcher
                _own(result, place, pinned)
                return result
            mine = block_of(result)
            return result if pinned and mine is not None and mine.pinned else result.clone()


@contextmanager
def _saying(place: str, non_blocking: bool, pinned: bool) -> Iterator[None]:
    before = _call.__dict__.copy()
    _call.place, _call.non_blocking, _call.pinned = place, non_blocking, pinned
    try:
        yield
    finally:
        _call.__dict__.clear()
        _call.__dict__.update(before)


def _place_said(name: str, args: Any, kwargs: Any) -> str | None:
    """Place that a call names; None where it names none, or one of no memory."""
    if name == "cuda":
        return stand_in.place(*args[1:2])
    if name == "cpu":
        return "cpu"
    if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
        return place_of(args[1])
    for number, value in enumerate((kwargs.get("device"), *args)):
        named = isinstance(value, str) and (number == 0 or (name == "to" and value.startswith(("cpu", "cuda", "meta"))))
        device = torch.device(value) if named else value
        if isinstance(device, torch.device):
            return stand_in.place(device) if device.type == "cuda" else "cpu" if device.type == "cpu" else None
    return None


def _as_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value == "cuda" or value.startswith("cuda:") else value
    if isinstance(value, dict):
        return {key: _as_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_cpu(item) for item in value)
    return value


def enter(devices: int = 1, **about: Any) -> Card:
    """Turn cuda into cpu in this process from now on, in this thread and in those that it starts."""
    if stand_in._card is not None:
        return stand_in._card
    card = stand_in.install(devices, **about)
    if os.environ.get("TWIN_LINES"):
        cuda_lines.record(os.environ["TWIN_LINES"])
    _entered.enter_context(_modes())
    _replace_parts_of_torch()
    _replace_collectives()
    kernels.register()
    return card


@contextmanager
def _modes() -> Iterator[None]:
    """Both modes, as far as they are not on: a mode that is at work is off, also for what it calls."""
    named = any(isinstance(mode, Named) for mode in _get_current_function_mode_stack())
    ran = any(isinstance(mode, Ran) for mode in _get_current_dispatch_mode_stack())
    with nullcontext() if ran else Ran(), nullcontext() if named else Named():
        yield


def _in_modes(work: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _modes():
            return work(*args, **kwargs)

    return call


def _replace_parts_of_torch() -> None:
    thread: Any = threading.Thread
    thread._bootstrap_inner = _in_modes(thread._bootstrap_inner)
    # What is called from within an operation, or from Tensor.backward, would run without the mode that is at work.
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    make = hooks.__init__
    hooks.__init__ = lambda self, pack, unpack: make(self, _in_modes(pack), _in_modes(unpack))
    torch.autograd._engine_run_backward = _in_modes(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def record_stream(tensor: Tensor, stream: Lane) -> None:
        block = block_of(tensor)
        if block is not None:
            block.lent.add(stream)

    Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        block = _blocks.get(storage._cdata)
        if block is not None and block.place != "cpu":
            stand_in.card().now[block.place] += size - block.size
            block.resized, block.size = block.resized + size - block.size, size
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, _as_cpu(device))

    torch.Generator = Generator  # type: ignore[misc]
    torch.multiprocessing.set_sharing_strategy("file_system")  # opened by name, as a handle of CUDA's is
    ForkingPickler.register(Tensor, _reduce)


def _reduce(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        rebuild, given = torch.multiprocessing.reductions.reduce_tensor(tensor)
    return _rebuild, (place_of(tensor), rebuild, given)


def _rebuild(place: str, rebuild: Callable[..., Tensor], given: Any) -> Tensor:
    tensor = rebuild(*given)
    if place != "cpu":
        _own(tensor, place)
    return tensor


def _replace_collectives() -> None:
    """gloo where CUDA has NCCL. The group's tensors are the CPU's, whatever they tell of themselves."""
    start = dist.init_process_group

    def init_process_group(backend: str | None = None, **settings: Any) -> None:
        start(backend.replace("nccl", "gloo") if backend else backend, **settings)

    dist.init_process_group = init_process_group
    dist.is_nccl_available = lambda: True

    class ProcessGroupNCCL:
        """Group of weight_sync/broadcast.py: made with NCCL's options, of which gloo takes the timeout."""

        class Options:
            _timeout = None

        def __new__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            gloo._timeout = options._timeout
            return dist.ProcessGroupGloo(store, rank, size, gloo)

    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc, assignment]
