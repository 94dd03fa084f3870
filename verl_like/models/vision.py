"""Vision-language models: images become patches, patches features, and features take the places of placeholder tokens.

    row's media -> VisionProcessor: grid of patches, places of tokens (driver), pixels (worker, cached)
                -> VisionInput: pixels of a micro-batch, each image once, and which feature each token takes
                -> run: vision tower, then the language model on embeddings and positions of three axes

The tower runs in parts of `vision_max_patches_per_gpu` patches; all ranks run the same number of parts, because a
sharded tower gathers its weights in each. What the policy sampled is always text, also where it is a placeholder's id:
which tokens are images is known from the row's handles, never from token ids.

Letters: b rows, T tokens, K patches of a micro-batch, F features (tokens of images).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from verl_like.batch import MediaHandle
from verl_like.models import families
from verl_like.models.images import MediaError, decoded, header, place_of
from verl_like.parallel.dist import all_reduce_max
from verl_like.remote import local_folder

if TYPE_CHECKING:
    from verl_like.config import ModelConfig

_CACHE_BYTES = 2**30  # of pixels in one process: all passes over a batch find them there
Media = Sequence[MediaHandle]


class VisionProcessor:
    """The image processor of a model folder, and what the engines have to know of the model.

    Raises ValueError for a folder without one, and for unknown mm_processor_kwargs.
    """

    def __init__(self, model: ModelConfig, config: PretrainedConfig) -> None:
        path = local_folder(model.path)
        try:
            self._images: Any = AutoImageProcessor.from_pretrained(path, backend="pil", **model.mm_processor_kwargs)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"model.path={model.path}: its image processor (preprocessor_config.json) cannot be loaded: {error}"
            ) from error
        unknown = [key for key in model.mm_processor_kwargs if key not in self._images.valid_kwargs.__annotations__]
        if unknown:
            known = ", ".join(sorted(self._images.valid_kwargs.__annotations__))
            raise ValueError(
                f"model.mm_processor_kwargs.{unknown[0]} is unknown to the image processor: it has {known}"
            )
        self.token_id = int(config.image_token_id)
        self.merge = int(config.vision_config.spatial_merge_size)
        self.max_patches = model.vision_max_patches_per_gpu
        self._patch = int(self._images.patch_size)
        if (self.merge, self._patch) != (self._images.merge_size, config.vision_config.patch_size):
            raise ValueError(
                f"model.path={model.path}: config.json has patches of {config.vision_config.patch_size} pixels, of "
                f"which {self.merge} x {self.merge} make a token, preprocessor_config.json {self._patch} and "
                f"{self._images.merge_size}"
            )
        self.patch_width = 3 * int(self._images.temporal_patch_size) * self._patch**2  # numbers in a patch
        self._settings = repr((path, sorted(self._images.to_dict().items(), key=str)))

    def save(self, folder: Path) -> None:
        """The image processor with its settings, beside a saved model."""
        self._images.save_pretrained(folder)

    def num_tokens(self, handle: MediaHandle) -> int:
        """Placeholder tokens of a placed image."""
        return handle.grid[0] * handle.grid[1] * handle.grid[2] // self.merge**2

    def expand(self, ids: Sequence[int], media: Media, max_megapixels: float) -> tuple[list[int], list[MediaHandle]]:
        """The prompt with as many placeholders as each image has tokens (a template writes one), and the placed images.

        Only headers are read. MediaError where an image cannot be used, ValueError where places and images differ.
        """
        places = [at for at, token in enumerate(ids) if token == self.token_id]
        if len(places) != len(media):
            raise ValueError(
                f"the chat template made {len(places)} image placeholders (token {self.token_id}) of {len(media)} "
                "images: it must write one for each, and the prompt's text none of its own"
            )
        expanded: list[int] = []
        placed, done = [], 0
        for handle, at in zip(media, places, strict=True):
            expanded += ids[done:at]
            placed.append(replace(handle, grid=self._grid(handle, max_megapixels), start=len(expanded)))
            expanded += [self.token_id] * self.num_tokens(placed[-1])
            done = at + 1
        return [*expanded, *ids[done:]], placed

    def _grid(self, handle: MediaHandle, max_megapixels: float) -> tuple[int, int, int]:
        """Patches of an image: (time, height, width)."""
        width, height = header(handle, max_megapixels)
        size, factor = self._images.size, self._patch * self.merge
        bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            height, width = smart_resize(height, width, factor=factor, **bounds)
        except ValueError as error:
            raise MediaError(f"{place_of(handle)}: {error}") from error
        return 1, height // self._patch, width // self._patch

    def pixels(self, handle: MediaHandle) -> Tensor:
        """Float32 [patches, patch_width]; from the cache of this process where it has them."""
        return _pixels.get(self.key(handle), functools.partial(self._processed, handle))

    def key(self, handle: MediaHandle) -> str:
        """The same for the same image under the same settings: names it in caches."""
        return hashlib.blake2b(repr((handle.image, self._settings)).encode(), digest_size=16).hexdigest()

    def _processed(self, handle: MediaHandle) -> Tensor:
        result = self._images(images=[decoded(handle)], return_tensors="pt")
        found = tuple(result["image_grid_thw"][0].tolist())
        if found != handle.grid:
            raise MediaError(
                f"{place_of(handle)} gives {found} patches, but its prompt was made for {handle.grid}: was the file "
                "changed during the run?"
            )
        return result["pixel_values"].float()

    def positions(self, length: int, media: Media) -> Tensor:
        """Positions [3, length] (time, height, width) of a row's tokens: text moves on by one along all axes; an image
        lies at one time, and what follows it comes after its longer side."""
        parts, done, now = [], 0, 0
        for handle in media:
            text, (frames, rows, columns) = handle.start - done, handle.grid
            parts.append(torch.arange(text).expand(3, -1) + now)
            sides = torch.arange(frames), torch.arange(rows // self.merge), torch.arange(columns // self.merge)
            parts.append(torch.stack([axis.flatten() for axis in torch.meshgrid(*sides, indexing="ij")]) + now + text)
            now += text + max(rows, columns) // self.merge
            done = handle.start + parts[-1].shape[1]
        parts.append(torch.arange(length - done).expand(3, -1) + now)
        return torch.cat(parts, dim=1)

    def features(self, rows: Sequence[tuple[int, Media]], known: dict[str, tuple[MediaHandle, int]]) -> list[Tensor]:
        """For each row (its length, its images) int64 [length]: the feature that a token takes, -1 for text. `known`
        collects the images, each once, with their first feature."""
        found = []
        for length, media in rows:
            feature_L = torch.full((length,), -1, dtype=torch.int64)
            for handle in media:
                last = next(reversed(known.values()), None)
                first = 0 if last is None else last[1] + self.num_tokens(last[0])
                first = known.setdefault(self.key(handle), (handle, first))[1]
                count = self.num_tokens(handle)
                feature_L[handle.start : handle.start + count] = first + torch.arange(count)
            found.append(feature_L)
        return found

    def together(self, rows: Sequence[tuple[int, Media]]) -> tuple[list[Tensor], list[Tensor], tuple[MediaHandle, ...]]:
        """Of each row the positions [3, length] and the features [length]; and the images that have these."""
        known: dict[str, tuple[MediaHandle, int]] = {}
        features = self.features(rows, known)
        return [self.positions(*row) for row in rows], features, tuple(handle for handle, _ in known.values())

    def load(self, feature_ids: Tensor, images: Media, device: torch.device) -> VisionInput:
        """The pixels of these images on the device, in parts of at most max_patches (a larger image is one alone)."""
        parts: list[list[MediaHandle]] = []
        room = 0
        for handle in images:
            patches = self.num_tokens(handle) * self.merge**2
            if patches > room:
                parts.append([])
                room = self.max_patches
            parts[-1].append(handle)
            room -= patches
        return VisionInput(
            feature_ids=feature_ids.to(device),
            parts=tuple(
                (torch.cat([self.pixels(h) for h in part]).to(device), torch.tensor([h.grid for h in part]))
                for part in parts
            ),
            token_patches=self.merge**2,
            patch_width=self.patch_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionInput:
    """Images of a micro-batch."""

    feature_ids: Tensor  # int64, as input_ids: the feature that the token takes, -1 for text
    parts: tuple[tuple[Tensor, Tensor], ...]  # float32 [K, patch width], int64 [images, 3] on the CPU
    token_patches: int  # patches of the smallest image: those of one token
    patch_width: int


class _PixelCache:
    """Tensors by key, least recently used first out; two threads that ask for one at a time compute it once."""

    def __init__(self, limit: int) -> None:
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        self._limit, self._bytes, self.misses = limit, 0, 0
        self._lock = threading.Lock()

    def get(self, key: str, make: Any) -> Tensor:
        with self._lock:
            if key not in self._held:
                self.misses += 1
                self._held[key] = make()
                self._bytes += self._held[key].nbytes
            self._held.move_to_end(key)
            value = self._held[key]
            while self._bytes > self._limit and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
            return value


_pixels = _PixelCache(_CACHE_BYTES)


def processor_of(model: ModelConfig, config: PretrainedConfig) -> VisionProcessor | None:
    """None for a model that reads text only."""
    return VisionProcessor(model, config) if families.sees(config) else None


def run(
    hf: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    images: VisionInput | None,
    *,
    collective: bool = True,
    **kwargs: Any,
) -> Any:
    """The language model's output on text and images. position_ids: [4, ...] (text, then the three axes), or [3, ...].

    collective: the model is sharded over all ranks, which call this together.
    """
    core: Any = hf.base_model
    embeds, deep = hf.get_input_embeddings()(input_ids), ()
    if images is not None:
        embeds, deep, mask = _merged(core.visual, embeds, images, collective)
        if deep:
            kwargs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
    return core.language_model(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


def _merged(tower: Any, embeds: Tensor, images: VisionInput, collective: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Embeddings with features in their places; Qwen3-VL's further features of these places, one [F', H] for each of
    the first layers; and the places."""
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower.parameters())
    count = max(len(images.parts), int(trained))  # a tower that is trained runs once at least
    if collective and torch.distributed.is_initialized():
        count = all_reduce_max(count)
    mask = images.feature_ids >= 0
    if count == 0:
        return embeds, [], mask
    blank = (embeds.new_zeros(images.token_patches, images.patch_width), _blank_grid(images.token_patches))
    features, deep = [], []
    with nullcontext() if trained else torch.no_grad():
        for pixels, grids in [*images.parts, *[blank] * (count - len(images.parts))]:
            output = tower(pixels.to(embeds.dtype), grid_thw=grids.to(embeds.device))
            features.append(output.pooler_output)
            deep.append(getattr(output, "deepstack_features", None) or [])
    feature_FH = torch.cat(features).to(embeds.dtype)
    deep = [torch.cat(parts) for parts in zip(*deep, strict=True)]
    taken_FH = feature_FH[images.feature_ids[mask]]
    merged = embeds.masked_scatter(mask[..., None], taken_FH)
    unused = feature_FH.sum() + sum(part.sum() for part in deep) if trained else 0
    return merged + 0 * unused, [part[images.feature_ids[mask]] for part in deep], mask


def _blank_grid(token_patches: int) -> Tensor:
    side = round(token_patches**0.5)
    return torch.tensor([[1, side, side]])
