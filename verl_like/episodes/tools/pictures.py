"""Images and videos of tools, as what travels to the trainer: a path, a URL, or the file itself as a data: URL."""

from __future__ import annotations

import base64
import io
from typing import Any

_NAMES = ("bytes", "path", "image", "url", "image_url")  # as in the cells of data files (models/images.py)


def media_of(value: Any) -> list[tuple[str, Any]]:
    """Kind and source of the images, then of the videos, of verl's ToolResponse(image=[...], video=[...]); none of any
    other value.

    An image is one of PIL's, an array, a file's bytes, a path or URL (which every worker must be able to read), or a
    dictionary with one of these under "bytes", "path", "image", "url" or "image_url". A video is a file in one of these
    forms, its frames (a list of images, an array of all), or a dictionary with one of these under "video" or an image's
    names, and a row's options beside it (models/videos.py). ValueError for anything else.
    """
    if not hasattr(value, "text"):
        return []
    images, videos = getattr(value, "image", None) or (), getattr(value, "video", None) or ()
    return [*(("image", _source(image)) for image in images), *(("video", _film(video)) for video in videos)]


def _film(video: Any) -> Any:
    if isinstance(video, dict):
        names = [name for name in ("video", *_NAMES) if video.get(name) is not None]
        if names:
            options = {key: option for key, option in video.items() if key not in ("video", "type", *_NAMES)}
            return {"video": _film(video[names[0]]), **options}
    elif isinstance(video, str | bytes):
        return _source(video)
    elif hasattr(video, "__iter__"):
        return [_source(frame) for frame in video]
    raise ValueError(
        "a tool's video must be a file's bytes, a path or a URL, a list of images, an array of frames, or a dictionary "
        f"with one of these under 'video', not {video!r:.200}"
    )


def _source(image: Any) -> str:
    while isinstance(image, dict):
        image = next((image[name] for name in _NAMES if image.get(name) is not None), None)
    if isinstance(image, str) and image:
        return image
    if not isinstance(image, bytes):
        image = _png(image)
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"  # readers look at the content, not at the type


def _png(image: Any) -> bytes:
    from PIL import Image

    from verl_like.models.images import shown

    if not isinstance(image, Image.Image):
        try:
            image = Image.fromarray(image)
        except Exception as error:  # of any kind of thing
            raise ValueError(
                f"a tool's image must be one of PIL's, an array, bytes, a path or a URL: {error}"
            ) from error
    file = io.BytesIO()
    shown(image).save(file, "PNG")
    return file.getvalue()
