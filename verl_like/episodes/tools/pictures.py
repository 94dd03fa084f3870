"""Images that tools return, as what travels to the trainer: a path, a URL, or the file itself as a data: URL."""

from __future__ import annotations

import base64
import io
from typing import Any

_NAMES = ("bytes", "path", "image", "url", "image_url")  # as in the cells of data files (models/images.py)


def sources_of(value: Any) -> list[str]:
    """Of the images of verl's ToolResponse(image=[...]); none of any other value.

    An image is one of PIL's, an array, a file's bytes, a path or URL (which every worker must be able to read), or a
    dictionary with one of these under "bytes", "path", "image", "url" or "image_url". ValueError for anything else.
    """
    images = getattr(value, "image", None) if hasattr(value, "text") else None
    return [_source(image) for image in images or []]


def _source(image: Any) -> str:
    while isinstance(image, dict):
        image = next((image[name] for name in _NAMES if image.get(name)), None)
    if isinstance(image, str) and image:
        return image
    if not isinstance(image, bytes):
        image = _png(image)
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"  # readers look at the content, not at the type


def _png(image: Any) -> bytes:
    from PIL import Image

    if not isinstance(image, Image.Image):
        try:
            image = Image.fromarray(image)
        except Exception as error:  # of any kind of thing
            raise ValueError(
                f"a tool's image must be one of PIL's, an array, bytes, a path or a URL: {error}"
            ) from error
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()
