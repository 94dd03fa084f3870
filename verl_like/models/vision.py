"""Vision-language models: images and videos become patches, patches features, and features replace placeholder tokens.

    row's media -> VisionProcessor: grid of patches, places of tokens (driver), pixels (worker, cached)
                -> VisionInput: pixels of a micro-batch, each image once, and which feature each token takes
                -> run: vision tower, then the language model on embeddings and positions of three axes

The tower runs in parts of `vision_max_patches_per_gpu` patches; all ranks run the same number of parts, because a
sharded tower gathers its weights in each. What the policy sampled is always text, also where it is a placeholder's id:
which tokens are images is known from the row's handles, never from token ids. "Images" below may be videos: a grid of
patches with more than one time. Qwen3-VL writes the seconds before the tokens of each time.

Letters: b rows, T tokens, K patches of a micro-batch, F features (tokens of images).
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch import MediaHandle
from verl_like.models import families
from verl_like.models.images import MediaError, decoded, header, place_of
from verl_like.models.videos import Clip, clip_of, frames_of
from verl_like.parallel.dist import all_reduce_max
from verl_like.remote_storage import local_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from verl_like.config import ModelConfig

_CACHE_BYTES = 2**30  # of pixels in one process: all passes over a batch find them there
Media = Sequence[MediaHandle]


class VisionProcessor:
    """Image processor of a model folder, with the facts that engines need to know of the model.

    Raises ValueError for a folder without one, and for unknown mm_processor_kwargs.
    """

    def __init__(self, model: ModelConfig, config: PretrainedConfig) -> None:
        from transformers import AutoImageProcessor  # here and below: seconds, which a run of text need not wait for
        from transformers.video_processing_utils import BaseVideoProcessor

        path = self._path = local_folder(model.path)
        try:
            self._images: Any = AutoImageProcessor.from_pretrained(path, backend="pil", **model.mm_processor_kwargs)
            self._video_settings: dict[str, Any] = BaseVideoProcessor.get_video_processor_dict(path)[0]
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
        self._token_ids = {int(config.image_token_id): "image", int(config.video_token_id): "video"}
        self._marks = int(config.vision_start_token_id), int(config.vision_end_token_id)
        self.tells_seconds = config.model_type == "qwen3_vl"
        self._tokens_per_second = getattr(config.vision_config, "tokens_per_second", None)  # of Qwen2.5-VL's positions
        self.merge = int(config.vision_config.spatial_merge_size)
        self.max_patches = model.vision_max_patches_per_gpu
        self._patch = int(self._images.patch_size)
        self._times = int(self._images.temporal_patch_size)  # frames in a patch; an image is twice the same
        theirs = config.vision_config.patch_size, config.vision_config.temporal_patch_size
        if (self.merge, self._patch, self._times) != (self._images.merge_size, *theirs):
            raise ValueError(
                f"model.path={model.path}: config.json has patches of {theirs[0]} pixels and {theirs[1]} frames, "
                f"{self.merge} x {self.merge} of which make a token; preprocessor_config.json or "
                f"model.mm_processor_kwargs {self._patch}, {self._times} and {self._images.merge_size}"
            )
        if not self._images.do_resize:
            raise ValueError(
                "model.mm_processor_kwargs.do_resize=False (or in preprocessor_config.json): images are cut into whole "
                "patches, for which they must be resized; leave it at True"
            )
        self.patch_width = 3 * self._times * self._patch**2  # numbers in a patch
        self._frame_bounds = self._bounds_of_videos(model)
        self._settings = repr((path, self._frame_bounds, sorted(self._images.to_dict().items(), key=str)))

    def _bounds_of_videos(self, model: ModelConfig) -> tuple[int, int]:
        """Least and most pixels: of a frame, or (Qwen3-VL) of all frames together."""
        factor = (self._patch * self.merge) ** 2
        own, given = self._video_settings, model.mm_processor_kwargs
        size = own.get("size") or {"shortest_edge": 128 * factor, "longest_edge": 768 * factor}
        size = size | given.get("size", {})
        least, most = (given.get(key, own.get(key)) for key in ("min_pixels", "max_pixels"))
        return int(least or size["shortest_edge"]), int(most or size["longest_edge"])

    def save(self, folder: Path) -> None:
        """Write the processors' settings beside a saved model."""
        self._images.save_pretrained(folder)
        if "video_processor_type" in self._video_settings:  # the folder had some for videos
            (folder / "video_preprocessor_config.json").write_text(json.dumps(self._video_settings, indent=2))

    def num_tokens(self, handle: MediaHandle) -> int:
        """Count the placeholder tokens of a placed image, at all its times."""
        return handle.grid[0] * handle.grid[1] * handle.grid[2] // self.merge**2

    def spans(self, handle: MediaHandle) -> list[tuple[int, tuple[int, int, int]]]:
        """Spans of a placed image: start of each run of its tokens without text between them, and the run's grid."""
        frames, rows, columns = handle.grid
        return [(start, (frames // len(handle.starts), rows, columns)) for start in handle.starts]

    def expand(self, ids: Sequence[int], media: Media, max_megapixels: float) -> tuple[list[int], list[MediaHandle]]:
        """Expand the prompt to as many placeholders as each image has tokens; a template writes one for each.

        Returns the prompt and the placed images, in their order there. Only headers are read. Raises MediaError where
        an image cannot be used, ValueError where places and images differ.
        """
        places = [(at, token) for at, token in enumerate(ids) if token in self._token_ids]
        for token, kind in self._token_ids.items():
            wanted, given = sum(each == token for _, each in places), sum(handle.kind == kind for handle in media)
            if wanted != given:
                raise ValueError(
                    f"the chat template made {wanted} {kind} placeholders (token {token}) of {given} {kind}s: it must "
                    "write one for each, and the prompt's text none of its own"
                )
        waiting = {kind: iter([h for h in media if h.kind == kind]) for kind in self._token_ids.values()}
        expanded: list[int] = []
        placed, done = [], 0
        for at, token in places:
            expanded += ids[done:at]
            handle, stamps = self._measured(next(waiting[self._token_ids[token]]), max_megapixels)
            starts, count = [], self.num_tokens(handle) // max(1, len(stamps))
            for stamp in stamps or [None]:
                before, after = ([*stamp, self._marks[0]], [self._marks[1]]) if stamp is not None else ([], [])
                starts.append(len(expanded) + len(before))
                expanded += [*before, *[token] * count, *after]
            placed.append(replace(handle, starts=tuple(starts)))
            done = at + 1
        return [*expanded, *ids[done:]], placed

    def expand_one(self, handle: MediaHandle, max_megapixels: float) -> tuple[list[int], MediaHandle]:
        """Return the placeholder tokens of one image, and the image placed at the first of them; errors as `expand`."""
        token = next(token for token, kind in self._token_ids.items() if kind == handle.kind)
        ids, placed = self.expand([token], [handle], max_megapixels)
        return ids, placed[0]

    def placeholders(self, ids: Sequence[int]) -> list[str]:
        """List the kinds, image or video, of the placeholders among tokens, in their order."""
        return [self._token_ids[token] for token in ids if token in self._token_ids]

    def check_places(self, what: str, ids: Sequence[int], media: Media) -> None:
        """Check that the images' tokens stand where their handles say; raises ValueError otherwise."""
        for handle in media:
            count = self.num_tokens(handle) // max(1, len(handle.starts))
            for start in handle.starts:
                found = [self._token_ids.get(token) for token in ids[start : start + count]]
                if found != [handle.kind] * count:
                    raise ValueError(
                        f"{what}: {handle.kind} {handle.number} of {handle.path}, row {handle.row}, has {count} tokens "
                        f"from token {start} on, but {found.count(handle.kind)} placeholders stand there"
                    )

    def _measured(self, handle: MediaHandle, max_megapixels: float) -> tuple[MediaHandle, list[list[int]]]:
        """Measure an image: its handle with a grid, and the tokens written before each of its times, if any are."""
        if handle.kind == "image":
            size = self._images.size
            bounds = size["shortest_edge"], size["longest_edge"]
            return replace(handle, grid=self._grid(handle, header(handle, max_megapixels), bounds)), []
        clip = clip_of(handle, max_megapixels)
        # Rounded: positions are rounded down, and 1.9999999 s must not be one less than 2
        seconds = 1.0 if self._tokens_per_second is None else round(self._times / clip.sampled_fps, 6)
        handle = replace(handle, grid=self._grid_of(handle, clip), seconds=seconds)
        texts = [f"<{time:.1f} seconds>" for time in clip.times(self._times)] if self.tells_seconds else []
        return handle, [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)

    def _grid_of(self, handle: MediaHandle, clip: Clip) -> tuple[int, int, int]:
        """Compute the patches of a video: (time, height, width)."""
        least, most = (own or usual for own, usual in zip(clip.bounds, self._frame_bounds, strict=True))
        whole = len(clip.numbers) if self.tells_seconds and clip.bounds == (None, None) else 0
        _, rows, columns = self._grid(handle, clip.size, (min(least, most), most), frames=whole)
        return -(-len(clip.numbers) // self._times), rows, columns

    def _grid(
        self, handle: MediaHandle, size: tuple[int, int], bounds: tuple[int, int], *, frames: int = 0
    ) -> tuple[int, int, int]:
        """Compute the patches of an image: (time, height, width). frames: so many share the bounds."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_whole

        limits = {"min_pixels": bounds[0], "max_pixels": bounds[1], "factor": self._patch * self.merge}
        try:
            if frames:
                height, width = smart_resize_whole(frames, size[1], size[0], temporal_factor=self._times, **limits)
            else:
                height, width = smart_resize(size[1], size[0], **limits)
        except ValueError as error:
            raise MediaError(f"{place_of(handle)}: {error}") from error
        return 1, height // self._patch, width // self._patch

    def pixels(self, handle: MediaHandle) -> Tensor:
        """Load the pixels, float32 [patches, patch_width]; from the cache of this process where it has them."""
        return _pixels.get(self.key(handle), functools.partial(self._processed, handle))

    def key(self, handle: MediaHandle) -> str:
        """Name of an image in caches: equal for the same image under the same settings."""
        return hashlib.blake2b(repr((handle.image, self._settings)).encode(), digest_size=16).hexdigest()

    def _processed(self, handle: MediaHandle) -> Tensor:
        if handle.kind == "video":
            clip = clip_of(handle)
            self._check_grid(handle, self._grid_of(handle, clip))
            return self._frames(handle, clip)
        result = self._images(images=[decoded(handle)], return_tensors="pt")
        self._check_grid(handle, tuple(result["image_grid_thw"][0].tolist()))
        return result["pixel_values"].float()

    def _check_grid(self, handle: MediaHandle, found: tuple[int, ...]) -> None:
        if found != handle.grid:
            raise MediaError(
                f"{place_of(handle)} gives {found} patches, but its prompt was made for {handle.grid}: was the file "
                "changed during the run?"
            )

    def _frames(self, handle: MediaHandle, clip: Clip) -> Tensor:
        """Compute the patches of a video.

        Each frame goes through the image processor, which makes it a whole group of equal ones; of the groups that
        really follow each other one frame each is kept.
        """
        times, rows, columns = handle.grid
        size, frames = (columns * self._patch, rows * self._patch), []
        for frame in frames_of(handle, clip):
            done = self._images(
                images=[frame.resize(size, resample=self._images.resample)], do_resize=False, return_tensors="pt"
            )
            frames.append(done["pixel_values"].float().view(-1, 3, self._times, self._patch**2)[:, :, 0])
        frames += [frames[-1]] * (times * self._times - len(frames))
        patches = torch.stack(frames).unflatten(0, (times, self._times))  # [times, group, K, color, pixels]
        return patches.permute(0, 2, 3, 1, 4).reshape(-1, self.patch_width)

    def positions(self, length: int, media: Media) -> Tensor:
        """Positions [3, length] (time, height, width) of a row's tokens: text moves on by one along all axes; what
        follows an image comes after its longest side. Qwen2.5-VL counts a video's time in parts of a second.

        Source: Qwen's own code and vLLM. transformers 5 begins the text after a video by its height and width alone, so
        that it lies amid a video that lasts longer.
        """
        parts, done, now = [], 0, 0
        for handle in media:
            interval = (self._tokens_per_second or 1) * handle.seconds if handle.kind == "video" else 1
            for start, (frames, rows, columns) in self.spans(handle):
                text = start - done
                parts.append(torch.arange(text).expand(3, -1) + now)
                time = (torch.arange(frames, dtype=torch.float64) * interval).long()
                sides = time, torch.arange(rows // self.merge), torch.arange(columns // self.merge)
                axes = torch.stack([axis.flatten() for axis in torch.meshgrid(*sides, indexing="ij")])
                parts.append(axes + now + text)
                now += text + int(axes.max()) + 1
                done = start + axes.shape[1]
        parts.append(torch.arange(length - done).expand(3, -1) + now)
        return torch.cat(parts, dim=1)

    def features(self, rows: Sequence[tuple[int, Media]], known: dict[str, tuple[MediaHandle, int]]) -> list[Tensor]:
        """Map tokens to features, int64 [length] for each row (its length, its images); -1 for text.

        `known` collects the images, each once, with their first feature.
        """
        found = []
        for length, media in rows:
            feature_L = torch.full((length,), -1, dtype=torch.int64)
            for handle in media:
                last = next(reversed(known.values()), None)
                first = 0 if last is None else last[1] + self.num_tokens(last[0])
                first = known.setdefault(self.key(handle), (handle, first))[1]
                count = self.num_tokens(handle) // len(handle.starts)
                for number, start in enumerate(handle.starts):
                    feature_L[start : start + count] = first + number * count + torch.arange(count)
            found.append(feature_L)
        return found

    def together(self, rows: Sequence[tuple[int, Media]]) -> tuple[list[Tensor], list[Tensor], tuple[MediaHandle, ...]]:
        """Positions [3, length] and features [length] of each row, and the images that have these features."""
        known: dict[str, tuple[MediaHandle, int]] = {}
        features = self.features(rows, known)
        return [self.positions(*row) for row in rows], features, tuple(handle for handle, _ in known.values())

    def load(self, feature_ids: Tensor, images: Media, device: torch.device) -> VisionInput:
        """Load the pixels of these images on the device, in parts of at most max_patches.

        A larger image is one part alone; a video may be cut, for its times do not see each other in the tower.
        """
        parts: list[list[tuple[Tensor, tuple[int, int, int]]]] = []
        room = 0
        for handle in images:
            pixels, (left, rows, columns) = self.pixels(handle), handle.grid
            while left:
                if rows * columns > room:
                    parts.append([])
                    room = self.max_patches
                count = min(left, max(1, room // (rows * columns)))
                taken, pixels = pixels.split([count * rows * columns, len(pixels) - count * rows * columns])
                parts[-1].append((taken, (count, rows, columns)))
                room -= len(taken)
                left -= count
        return VisionInput(
            feature_ids=feature_ids.to(device),
            parts=tuple(
                (torch.cat([pixels for pixels, _ in part]).to(device), torch.tensor([grid for _, grid in part]))
                for part in parts
            ),
            token_patches=self.merge**2,
            patch_width=self.patch_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionInput:
    """Images of a micro-batch, as pixels on the device."""

    feature_ids: Tensor  # int64, as input_ids: the feature that the token takes, -1 for text
    parts: tuple[tuple[Tensor, Tensor], ...]  # float32 [K, patch width], int64 [images, 3] on the CPU
    token_patches: int  # patches of the smallest image: those of one token
    patch_width: int


class _PixelCache:
    """Cache of tensors by key, least recently used first out; two threads that ask for one compute it once."""

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
    """Load the processor of a vision-language model; None for a model that reads text only."""
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
    """Run the language model on text and images; return its output.

    Args:
        hf: the vision-language model.
        input_ids: token ids.
        position_ids: [4, ...] (text, then the three axes), or [3, ...].
        images: images of the micro-batch; None for text alone.
        collective: the model is sharded over all ranks, which call this together.
        kwargs: further arguments of the language model.
    """
    core: Any = hf.base_model
    embeds, deep = hf.get_input_embeddings()(input_ids), ()
    if images is not None:
        embeds, deep, mask = _merged(core.visual, embeds, images, collective)
        if deep:
            kwargs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
    return core.language_model(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


def _merged(tower: Any, embeds: Tensor, images: VisionInput, collective: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Compute the embeddings with features in their places; returns them, further features, and the places.

    Further features of these places are Qwen3-VL's, one [F', H] for each of the first layers.
    """
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower.parameters())
    count = max(len(images.parts), int(trained))  # a tower that is trained runs once at least
    if collective and torch.distributed.is_initialized():
        count = all_reduce_max(count)
    mask = images.feature_ids >= 0
    if count == 0:
        return embeds, [], mask
    side = round(images.token_patches**0.5)
    blank = embeds.new_zeros(images.token_patches, images.patch_width), torch.tensor([[1, side, side]])
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
