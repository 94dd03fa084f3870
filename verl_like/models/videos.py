"""Videos of dataset rows: the choice of frames, and the frames themselves.

A cell holds a video file in any form in which images.py takes an image, or a list of images, which are the frames; or
a dictionary with one of these under "video" (or as for images) beside what is taken of it, under the names of
qwen-vl-utils, which verl's rows have: fps, nframes, min_frames, max_frames, min_pixels and max_pixels (of a frame),
video_start and video_end [s], sample_fps (of a list: its frames a second).

Files are decoded by OpenCV, frame after frame: to jump in a file gives other frames in other containers.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from verl_like.batch import MediaHandle
from verl_like.models.images import PLACES, MediaError, bounded, cell_of, decoded, header, local_path, place_of, read
from verl_like.remote_storage import is_remote

# Frames a second and their number where a row says nothing; frames come in pairs. Source: qwen-vl-utils.
_FPS, _MIN_FRAMES, _MAX_FRAMES, _PAIR = 2.0, 4, 768, 2
_OPTIONS = {"fps", "sample_fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels"}
_OPTIONS |= {"video_start", "video_end"}
_MISSING = 0.05  # of the frames that a header counts: containers that estimate it are off by a few


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Part of a video that is used.

    numbers: chosen frames, counted from 0.
    fps: frames a second of the file, so that number / fps is a frame's time.
    sampled_fps: chosen frames a second.
    bounds: least and most pixels of a frame, where the row says so.
    """

    size: tuple[int, int]  # width, height
    numbers: tuple[int, ...]
    fps: float
    sampled_fps: float
    bounds: tuple[int | None, int | None] = (None, None)

    def times(self, per_patch: int) -> list[float]:
        """Middle of each group of frames that make a patch [s]; the last frame fills the last group."""
        numbers = [*self.numbers, *[self.numbers[-1]] * (-len(self.numbers) % per_patch)]
        ends = zip(numbers[::per_patch], numbers[per_patch - 1 :: per_patch], strict=True)
        return [(first + last) / 2 / self.fps for first, last in ends]


def clip_of(handle: MediaHandle, max_megapixels: float = math.inf) -> Clip:
    """Choose the frames of a video; only headers are read.

    Raises MediaError: missing, no video, too large, options that are unknown or fit no frames.
    """
    value, options = _parsed(handle)
    bounds: Any = tuple(int(options[key]) if key in options else None for key in ("min_pixels", "max_pixels"))
    if isinstance(value, list):
        size = bounded(handle, decoded(handle, value[0]).size, max_megapixels)
        fps, most = options.get("sample_fps", options.get("fps", _FPS)), options.get("max_frames", _MAX_FRAMES)
        if len(value) > most:
            raise MediaError(
                f"{place_of(handle)} has {len(value)} frames, more than max_frames={most:g}: leave some out"
            )
        return Clip(size=size, numbers=tuple(range(len(value))), fps=fps, sampled_fps=fps, bounds=bounds)
    with _opened(handle, value) as (cv2, capture):
        return _chosen(handle, cv2, capture, options, max_megapixels, bounds)


def _chosen(
    handle: MediaHandle, cv2: Any, capture: Any, options: dict[str, float], max_megapixels: float, bounds: Any
) -> Clip:
    """Choose the frames of a video file. Raises MediaError where the header or the options fit no frames."""
    total, fps = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), float(capture.get(cv2.CAP_PROP_FPS))
    size = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    if total < 1 or not 0 < fps < math.inf or min(size) < 1:
        raise MediaError(f"{place_of(handle)}: its header gives {total} frames, {fps:g} a second, of {size} pixels")
    first = math.ceil(options.get("video_start", 0) * fps)
    last = min(total - 1, math.floor(min(options.get("video_end", math.inf) * fps, total)))
    count = last - first + 1
    wanted = _num_frames(options, count, fps)
    if not _PAIR <= wanted <= count:
        raise MediaError(
            f"{place_of(handle)}: {wanted} frames are asked for ({options or 'no options'}) of {max(0, count)} in this "
            f"time ({total} in all): {_PAIR} at least, and no more than there are"
        )
    numbers = np.linspace(first, last, wanted).round().astype(int).tolist()
    size = bounded(handle, size, max_megapixels)
    return Clip(size=size, numbers=tuple(numbers), fps=fps, sampled_fps=wanted / count * fps, bounds=bounds)


def _num_frames(options: dict[str, float], count: int, fps: float) -> int:
    """Number of frames to take of `count`, by qwen-vl-utils' rule."""
    if "nframes" in options:
        return round(options["nframes"] / _PAIR) * _PAIR
    least = math.ceil(options.get("min_frames", _MIN_FRAMES) / _PAIR) * _PAIR
    most = math.floor(options.get("max_frames", min(_MAX_FRAMES, count)) / _PAIR) * _PAIR
    wanted = min(max(count / fps * options.get("fps", _FPS), least), most, count)
    return math.floor(wanted / _PAIR) * _PAIR


def frames_of(handle: MediaHandle, clip: Clip) -> Iterator[Image.Image]:
    """Yield the chosen frames in RGB, one after the other.

    Raises MediaError where the video is cut off or damaged, or is another now.
    """
    value, _ = _parsed(handle)
    frames = (decoded(handle, frame) for frame in value) if isinstance(value, list) else _frames(handle, value, clip)
    for frame in frames:
        if frame.size != clip.size:
            raise MediaError(f"{place_of(handle)}: a frame has {frame.size} pixels, the video {clip.size}")
        yield frame


def look_through(media: Sequence[MediaHandle], max_megapixels: float) -> None:
    """Decode all images and videos; raises MediaError for a damaged one: an engine would refuse the whole request."""
    for handle in media:
        if handle.kind == "image":
            header(handle, max_megapixels)
            decoded(handle)
        else:
            deque(frames_of(handle, clip_of(handle, max_megapixels)), maxlen=0)


def _frames(handle: MediaHandle, value: Any, clip: Clip) -> Iterator[Image.Image]:
    at, image = 0, None
    with _opened(handle, value) as (_, capture):
        for number in clip.numbers:
            enough = (1 - _MISSING) * number
            while at <= number and capture.grab():
                at += 1
                if at > enough and (found := capture.retrieve())[0]:
                    image = Image.fromarray(np.ascontiguousarray(found[1][:, :, ::-1]))
            if image is None or at <= enough:
                raise MediaError(f"{place_of(handle)} cannot be decoded from frame {at} on (wanted: {number})")
            yield image


def _parsed(handle: MediaHandle) -> tuple[Any, dict[str, float]]:
    """Split a cell into the file (or the frames) and the options."""
    value, options = cell_of(handle), {}
    if isinstance(value, dict):
        options = {k: v for k, v in value.items() if v is not None and k not in ("video", "type", *PLACES)}
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            known = ", ".join(sorted(_OPTIONS))
            raise MediaError(f"{place_of(handle)}: {unknown[0]!r} is no option of a video; they are {known}")
        wrong = [k for k, v in options.items() if not isinstance(v, int | float) or not (v > 0 or k == "video_start")]
        if wrong:
            raise MediaError(f"{place_of(handle)}: {wrong[0]}={options[wrong[0]]!r} must be a number above 0")
        value = next((value[key] for key in ("video", *PLACES) if value.get(key)), None)
    if isinstance(value, list) and not value:
        raise MediaError(f"{place_of(handle)} has no frames")
    return value, options


@contextmanager
def _opened(handle: MediaHandle, value: Any) -> Iterator[tuple[Any, Any]]:
    """Open the video; yield OpenCV and its reader. Raises MediaError where nothing here can decode it."""
    try:
        import cv2
    except ImportError as error:
        raise MediaError(
            f"{place_of(handle)}: to decode videos takes OpenCV: pip install 'verl_like[video]', or give their frames "
            "as lists of images"
        ) from error
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # it would tell of each file that is none
    if isinstance(value, str) and not is_remote(value) and not value.startswith("data:"):
        path = local_path(handle, value)
        if not path.is_file():
            raise MediaError(f"{place_of(handle)}: {value[:200]!r} cannot be read: No such file ({path})")
        file, what = nullcontext(path), str(path)
    else:
        data = read(handle, value)
        file, what = _file_of(data), f"{len(data)} bytes"
    with file as path:
        capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        if not capture.isOpened():
            raise MediaError(f"{place_of(handle)} is no video that OpenCV can open ({what})")
        try:
            yield cv2, capture
        finally:
            capture.release()


@contextmanager
def _file_of(data: bytes) -> Iterator[Path]:
    """Write the video to a temporary file, and yield its path.

    OpenCV 5.0 can read from memory too, but dies of a segmentation fault in some of these tests.
    """
    with tempfile.NamedTemporaryFile(suffix=".video") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)
