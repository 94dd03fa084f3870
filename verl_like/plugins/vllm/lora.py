"""Adapters of LoRA in vLLM, filled from tensors in memory: one that all requests use here, many in adapters.py.

vLLM itself reads adapters from folders. Its worker keeps a manager (vllm.lora.*) that takes tensors just as well, and
the worker lives in this process. B comes with its scale multiplied in, so that the engine holds what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

from torch import Tensor, nn

from verl_like.models.lora import is_adapter
from verl_like.rollout.held_weights import Held, Layout
from verl_like.rollout.rollout_engine import WeightLoadError

_ID, _NAME = 1, "policy"
A, B = ".lora_A.weight", ".lora_B.weight"


_OWN = ("actor_rollout_ref.model.lora_rank={} with model.lora.merge=False", "set model.lora.merge=True")


def engine_options(rank: int, slots: int = 1, named: tuple[str, str] = _OWN) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. Raises ValueError for a rank that vLLM cannot hold.

    slots: adapters that act in one step. named: how the rank is asked for, and what helps where it is too high.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if rank > ranks[-1]:
        raise ValueError(f"{named[0].format(rank)}: vLLM keeps adapters up to rank {ranks[-1]}; {named[1]}")
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": next(r for r in ranks if r >= rank)}


def request() -> Any:
    """Make the object with which a request uses the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, "in memory")


def let_base_weights_in(llm: Any) -> None:
    """Let layers with an adapter take their own weights under their old names, as later versions of vLLM do.

    Such a layer of vLLM 0.26 finds no parameter of that name.
    """
    for module in manager_of(llm).modules.values():
        if not callable(getattr(module, "load_weights", None)):
            module.load_weights = partial(_load_base, module)


def _load_base(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    base: Any = module.base_layer
    load: Any = getattr(base, "load_weights", None)  # fused layers know their parts
    return AutoWeightsLoader(base).load_weights(weights) if load is None else load(weights)


def put(llm: Any, tensors: dict[str, Tensor]) -> None:
    """Make `tensors` the whole adapter; the engine must be idle.

    Raises WeightLoadError when vLLM would leave some out.
    """
    modules = {name.removesuffix(A).removesuffix(B) for name in tensors if is_adapter(name)}
    incomplete = [name for name in sorted(modules) if f"{name}{A}" not in tensors or f"{name}{B}" not in tensors]
    strangers = sorted(name for name in tensors if not is_adapter(name))
    if not modules or incomplete or strangers:
        raise WeightLoadError(f"not an adapter: A or B is missing of {incomplete[:8]}, no part of one: {strangers[:8]}")
    manager = manager_of(llm)
    manager.remove_adapter(_ID)
    if unused := add(llm, tensors, _ID):
        manager.remove_adapter(_ID)
        raise WeightLoadError(
            f"vLLM cannot adapt {unused[:8]}: leave them out by actor_rollout_ref.model.exclude_modules, or set "
            "model.lora.merge=True"
        )
    manager.activate_adapter(_ID)


def add(llm: Any, tensors: Mapping[str, Tensor], number: int) -> list[str]:
    """Give vLLM an adapter of this number; return those parts of it that vLLM would leave out."""
    manager = manager_of(llm)
    adapter = _adapter(manager.model, tensors, number)
    manager.add_adapter(adapter)  # joins the parts of fused modules, in `adapter.loras`
    return sorted(set(adapter.loras) - set(manager.modules))


def held(llm: Any, fused: dict[str, list[str]], layout: Layout) -> Iterator[Held]:
    """Yield this rank's part of the adapter, as the engine computes with it."""
    for path, module in manager_of(llm).modules.items():
        parent, _, leaf = path.rpartition(".")
        parts = [f"{parent}.{part}" for part in fused.get(leaf, [])] or [path]
        if len(parts) != len(module.lora_a_stacked):
            continue  # one Hugging Face module cut into slices: not taken apart here
        for part, a_stacked, b_stacked in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if part + A in layout.shapes:
                rank = layout.shapes[part + A][0]
                for name, local in ((part + A, a_stacked[0, 0, :rank]), (part + B, b_stacked[0, 0, :, :rank])):
                    found = layout.held(name, path, local)
                    if found is not None:
                        yield found


def compute_directly(llm: Any) -> None:
    """Compute adapters on CPU by two products: every token here uses the one adapter.

    vLLM copies A and B once for each token of a step.
    """
    for punica in manager_of(llm).punica_wrapper_mapping.values():
        punica.add_lora_linear = _add_lora_linear


def _add_lora_linear(
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **unused: Any,
) -> None:
    """Add scale (x A^T) B^T to y, each slice of y with its own adapter, in place."""
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + width].addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)
        start += width


def _adapter(model: nn.Module, tensors: Mapping[str, Tensor], number: int) -> Any:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A))
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # without the rules that fuse modules; the second: 0.26
        if hasattr(mapper, name):
            mapper = getattr(mapper, name)()
            break
    first = next(iter(tensors.values()))
    return LoRAModel.from_lora_tensors(
        number,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # alpha / r = 1: B is scaled already
        device=str(first.device),
        dtype=first.dtype,
        weights_mapper=mapper,
    )


def manager_of(llm: Any) -> Any:
    """Return the worker's own manager of adapters."""
    return llm.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)[0]
