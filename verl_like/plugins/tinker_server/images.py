"""Images among a request's tokens: each becomes as many placeholder tokens as the model's family has for it.

The bytes came with the request and stay in it: nothing is opened for a client, neither a file nor an address.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from verl_like.batch import MediaHandle
from verl_like.models.images import MediaError, place_of
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.tinker_server.bodies import Refused

_SIGNATURES = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"  # of other formats PIL hands some to programs (Ghostscript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Image of a request: its file, png or jpeg, and the tokens that the client takes it for; None: it does not say."""

    data: bytes
    expected: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader of requests for a model. vision: its processor of images; None: it reads text alone."""

    vision: VisionProcessor | None = None
    max_megapixels: float = 0.0

    def content(
        self, parts: Iterable[NDArray[np.int32] | Picture], place: str
    ) -> tuple[NDArray[np.int32], tuple[MediaHandle, ...]]:
        """Put tokens and those of images in a row; of an image the header alone is read.

        place: of the parts, for messages. Raises Refused.
        """
        found, media, length = [np.zeros(0, np.int32)], list[MediaHandle](), 0
        for number, part in enumerate(parts):
            if isinstance(part, Picture):
                ids, handle = self._placed(part, f"{place}.chunks[{number}]")
                media.append(replace(handle, starts=(length,)))
                part = np.asarray(ids, np.int32)
            found.append(part)
            length += len(part)
        return np.concatenate(found), tuple(media)

    def _placed(self, picture: Picture, place: str) -> tuple[list[int], MediaHandle]:
        if self.vision is None:
            raise Refused(f"{place} is an image: the model of this server reads text alone")
        if not picture.data.startswith(_SIGNATURES):
            raise Refused(f"{place} is neither a png nor a jpeg ({len(picture.data)} bytes)")
        source = "data:;base64," + base64.b64encode(picture.data).decode()
        handle = MediaHandle(kind="image", path="a request", column="chunks", row=0, number=0, source=source)
        try:
            ids, handle = self.vision.expand_one(handle, self.max_megapixels)
        except MediaError as error:
            raise Refused(f"{place}{str(error).removeprefix(place_of(handle))}") from error
        if picture.expected not in (None, len(ids)):
            raise Refused(f"{place}.expected_tokens={picture.expected}: this image has {len(ids)} tokens")
        return ids, handle
