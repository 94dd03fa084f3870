"""Images for SGLang (0.5.23): the trainer's own patches and positions; none of SGLang's processors is loaded.

Every time of a video is an image of its own: towers do not look from one time to another (SGLang's Qwen2.5-VL would,
unlike transformers'), and where its tokens stand in time is said by the positions. Source: handle_generate_request of
sglang/srt/managers/scheduler.py, and embed_mm_inputs of mm_utils.py.
"""

from __future__ import annotations

import hashlib
import importlib
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from verl_like.rollout.placed_images import PlacedImage

_BATCH = "sglang.srt.managers.schedule_batch"
_FEATURES = "sglang.srt.managers.mm_schedule"
_CACHE = "sglang.srt.mem_cache.multimodal_cache"
USED = (  # as compat.py's: what is looked for at the start
    *((_BATCH, name) for name in ("MultimodalDataItem.set_identity", "MultimodalDataItem.padding_sequence")),
    *((_BATCH, name) for name in ("MultimodalInputs", "MultimodalProcessorOutput.build_padded_input_ids")),
    ("sglang.srt.multimodal.modality", "Modality.IMAGE"),
    (_FEATURES, "init_mm_embedding_cache"),
    (_CACHE, "MultiModalStaticCache.clear"),
)


def prepare() -> None:
    """Set the number of colors under SGLang's name, which files of Qwen2-VL that transformers wrote do not have."""
    settings: Any = Qwen2VLVisionConfig
    settings.in_chans = 3


def show(request: Any, images: Sequence[PlacedImage], positions: Tensor) -> None:
    """Give these images to a request of SGLang's, before it is added.

    positions: int64 [3, tokens + 1], see VisionProcessor.positions: with one more than tokens SGLang knows where a
        response begins, whatever ends the prompt.
    """
    batch = importlib.import_module(_BATCH)
    modality = importlib.import_module("sglang.srt.multimodal.modality").Modality.IMAGE
    items = []
    for image in images:
        times, rows, columns = image.grid
        count = image.length // times
        for time, pixels in enumerate(image.pixels.chunk(times)):
            start = image.start + time * count
            item = batch.MultimodalDataItem(
                modality=modality,
                feature=pixels,
                offsets=[(start, start + count - 1)],
                model_specific_data={"image_grid_thw": torch.tensor([[1, rows, columns]])},
            )
            item.set_identity(hashlib.sha256(f"{image.name}-{time}".encode()).digest())
            items.append(item)
    padded = batch.MultimodalProcessorOutput.build_padded_input_ids(list(request.origin_input_ids), items)
    request.origin_input_ids = array("q", padded)  # names of images in the places of their tokens: keys of the cache
    request.multimodal_inputs = batch.MultimodalInputs(
        mm_items=items,
        mrope_positions=positions,
        mrope_position_delta=(positions.max() + 1 - positions.shape[1]).view(1, 1),
    )


def forget() -> None:
    """Drop the features of all images: those of other weights. SGLang's own flush of its cache keeps them."""
    cache = importlib.import_module(_FEATURES).embedding_cache
    if cache is None:
        return
    cache.clear()
    if len(cache) or cache.current_size:
        raise RuntimeError(f"SGLang did not drop the features of {len(cache)} images")
