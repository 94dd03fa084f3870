"""Images in the rows of a proof: files of noise, and what transformers' own model is given for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, PretrainedConfig

from verl_like.batch import MediaHandle
from verl_like.config import ModelConfig
from verl_like.models.vision import processor_of
from verl_like.remote_storage import local_folder

_SIDES = ((84, 56), (56, 140))  # pixels of a prompt's first and second picture, which have unlike numbers of tokens
_MEGAPIXELS = 64.0


def with_pictures(
    model: ModelConfig, hf_config: PretrainedConfig, prompts: list[list[int]], longest: int, folder: Path
) -> tuple[list[list[int]], list[list[MediaHandle]], str]:
    """Begin each fourth prompt with two pictures and the two before it with one, where `longest` tokens have room.

    What the third and the fourth begin with differs in nothing but what a picture shows.
    Returns the prompts, the placed images of each, and what cannot be proved (empty where all is).
    """
    vision = processor_of(model, hf_config)
    assert vision is not None
    config: Any = hf_config
    start, image, stop = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
    made: list[list[int]] = []
    placed: list[list[MediaHandle]] = []
    for number, text in enumerate(prompts):
        count = (0, 1, 1, 2)[number % 4]
        handles = [_picture(folder, 2 * number + each) for each in range(count)]
        ids, found = vision.expand([*[start, image, stop] * count, *text], handles, _MEGAPIXELS)
        if len(ids) > longest:
            ids, found = text, []
        made.append(ids)
        placed.append(found)
    if not any(placed):
        return made, placed, f"not checked: images, which have no room in data.max_prompt_length={longest}"
    return made, placed, ""


def text_alone(hf_config: Any, ids: list[int], vocab_size: int) -> list[int]:
    """Replace ids that stand for images by the next one: transformers' own forward takes each of them for one."""
    special = {hf_config.image_token_id, hf_config.video_token_id}
    special |= {hf_config.vision_start_token_id, hf_config.vision_end_token_id}
    following = range(len(special) + 1)
    return [next(each for k in following if (each := (token + k) % vocab_size) not in special) for token in ids]


class PlainPictures:
    """Inputs of transformers' own forward of one row, by its own processor."""

    def __init__(self, model: ModelConfig, hf_config: Any) -> None:
        folder = local_folder(model.path)
        self._read: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", **model.mm_processor_kwargs)
        self._token = int(hf_config.image_token_id)

    def of(self, tokens: Tensor, media: list[MediaHandle], dtype: torch.dtype) -> dict[str, Tensor]:
        """Pixels [patches, width], grids [images, 3] and kinds of tokens [1, L]; `tokens`: [1, L]."""
        if not media:
            return {}
        found = self._read(images=[Image.open(str(handle.source)) for handle in media], return_tensors="pt")
        return {
            "pixel_values": found["pixel_values"].to(tokens.device, dtype),
            "image_grid_thw": found["image_grid_thw"].to(tokens.device),
            "mm_token_type_ids": (tokens == self._token).int(),
        }


def _picture(folder: Path, number: int) -> MediaHandle:
    file = folder / f"picture{number}.png"
    if not file.exists():
        pixels = np.random.default_rng(number).integers(0, 256, (*_SIDES[number % 2], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return MediaHandle(kind="image", path=str(file), column="images", row=number, number=0, source=str(file))
