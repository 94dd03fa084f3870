"""Images and videos of a request: the trainer's own patches, and the places of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_like.batch import MediaHandle
from verl_like.models.vision import VisionProcessor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """Image of a request, or a video with the seconds from one time to the next.

    It has the patches, their grid, its first token, how many it has, and its name in caches.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    start: int
    length: int
    name: str
    seconds: float | None = None

    @classmethod
    def of(cls, handle: MediaHandle, vision: VisionProcessor) -> list[PlacedImage]:
        """Read the images of a placed handle; pixels are read here, unless this process has them.

        A video with text between its times is an image each time, for vLLM as for the model.
        """
        pixels, name = vision.pixels(handle), vision.key(handle)
        spans = vision.spans(handle)
        return [
            cls(
                pixels=part,
                grid=grid,
                start=start,
                length=vision.num_tokens(handle) // len(spans),
                name=name if len(spans) == 1 else f"{name}-{number}",
                seconds=handle.seconds if handle.kind == "video" and not vision.tells_seconds else None,
            )
            for number, ((start, grid), part) in enumerate(zip(spans, pixels.chunk(len(spans)), strict=True))
        ]


def placed_images(media: Sequence[MediaHandle], vision: VisionProcessor | None) -> list[PlacedImage]:
    """Read the images of placed handles, in the order of their tokens; empty for an engine that reads text only."""
    return [] if vision is None else [image for handle in media for image in PlacedImage.of(handle, vision)]
