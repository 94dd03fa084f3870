"""Images for vLLM: the trainer's own patches, so that vLLM processes no image and needs no processor.

vLLM (0.32) would run the model folder's processor once more for every request; here a request brings prompt tokens that
hold all placeholders, the patches, and a name under which vLLM keeps the tower's features. So tokens and pixels are the
trainer's, bit for bit, the n responses of a prompt share one pass of the tower, and torchvision, which transformers'
processors ask for, may be absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import float64, tensor

from verl_like.rollout.placed_images import PlacedImage

_MODELS = {  # vLLM's module of each architecture
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
}
# Text models in modules of models that see
_BESIDE: dict[str, str] = dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "qwen3_5")
_MANY = 64  # images of a prompt, where nobody has set a limit
_STAND_INS = [
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
]


def engine_options(limit_images: int | None) -> dict[str, Any]:
    """Arguments of vllm.LLM: patches come normalised, and are profiled and kept by nobody."""
    from vllm.engine.arg_utils import EngineArgs

    options = {
        "limit_mm_per_prompt": {"image": limit_images or _MANY, "video": _MANY},
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
    }
    if "mm_device_do_normalize" in vars(EngineArgs)["__dataclass_fields__"]:  # 0.26 never normalises there
        options["mm_device_do_normalize"] = False
    return options


def prepare() -> None:
    """Tell vLLM, before it starts, that no image processor is wanted."""
    import vllm
    from vllm.multimodal.processing.context import BaseProcessingInfo
    from vllm.multimodal.registry import _ProcessorFactories

    class NoProcessing(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None, "video": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
            return {"image": seq_len, "video": seq_len}

    registry: Any = getattr(vllm, "ModelRegistry")  # noqa: B009 (exported lazily, which type checkers do not see)
    with _torchvision():
        for name, module in _MODELS.items():
            model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
            model._processor_factory = _ProcessorFactories(
                info=NoProcessing, processor=_NoProcessor, dummy_inputs=lambda info: info
            )
            registry.register_model(name, model)  # as a class: a name is inspected in another process, without all this


def let_text_in(architecture: str) -> None:
    """Register a text model whose module imports image processors, before vLLM looks for it in another process."""
    if (module := _BESIDE.get(architecture)) is not None:
        import vllm

        registry: Any = getattr(vllm, "ModelRegistry")  # noqa: B009 (see above)
        with _torchvision():
            found = importlib.import_module(f"vllm.model_executor.models.{module}")
        registry.register_model(architecture, getattr(found, architecture))


class _NoProcessor:
    """Stand-in for a multimodal processor, of which vLLM asks `info` alone; 0.26 its cache too, which is off."""

    def __init__(self, info: Any, dummy_inputs: Any, cache: Any = None) -> None:
        self.info, self.dummy_inputs, self.cache = info, dummy_inputs, cache


class _Hollow(ModuleType):
    __path__: Sequence[str] = ()  # pyright: ignore[reportIncompatibleVariableOverride]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def _torchvision() -> Iterator[None]:
    """Put hollow modules in place of torchvision, where it is absent, meanwhile.

    vLLM's Qwen-VL modules import image processors that import torchvision, and never run them here.
    """
    names = [] if importlib.util.find_spec("torchvision") else _STAND_INS
    sys.modules.update({name: _Hollow(name) for name in names})
    for parent, name in itertools.pairwise(names):
        setattr(sys.modules[parent], name.rpartition(".")[2], sys.modules[name])
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def with_images(prompt_ids: list[int], images: Sequence[PlacedImage]) -> Any:
    """Make vLLM's processed input of a prompt with all placeholders in it."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal import inputs as mm

    items, names, places = {}, {}, {}
    for image in images:
        kind = "image" if image.seconds is None else "video"
        pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
        whole = mm.MultiModalFlatField(slices=[slice(0, len(image.pixels))])
        each = mm.MultiModalBatchedField(keep_on_cpu=True)
        fields = {
            pixels: mm.MultiModalFieldElem(data=image.pixels, field=whole),
            f"{kind}_grid_thw": mm.MultiModalFieldElem(data=tensor(image.grid), field=each),
        }
        if image.seconds is not None:
            seconds = tensor(image.seconds, dtype=float64)
            fields["second_per_grid_ts"] = mm.MultiModalFieldElem(data=seconds, field=each)
        items.setdefault(kind, []).append(mm.MultiModalKwargsItem(fields))
        names.setdefault(kind, []).append(image.name)
        places.setdefault(kind, []).append(mm.PlaceholderRange(offset=image.start, length=image.length))
    return mm_input(prompt_ids, mm.MultiModalKwargsItems(items), names, places)
