"""Games as pictures: a frame of each state, and a GIF of an episode."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

_TILE = 32  # pixels
FRAME_MS = 200
_GROUND = {"wall": "#5b5046", "ice": "#dfeffa", "hole": "#dfeffa", "goal": "#dfeffa"}
_FLOOR = "#efe6d5"
_BODY = {"player": "#2f6db5", "box": "#a8672b", "target": "#c0392b", "hole": "#20384f", "goal": "#2e9e4f"}


def frame_of(game: Any) -> Image.Image | None:
    """The game as it is: its `cells`, or the array that `render` gives (Gymnasium's rgb_array); None without both."""
    if hasattr(game, "cells"):
        return draw(game.cells())
    if not hasattr(game, "render"):
        return None
    picture = np.asarray(game.render())
    is_rgb = picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
    return Image.fromarray(picture) if is_rgb else None


def draw(cells: Sequence[Sequence[str]]) -> Image.Image:
    """A grid of what tiles hold: wall, floor, ice, hole, goal, target, box, player, or one on (or in) another."""
    image = Image.new("RGB", (_TILE * max(map(len, cells)), _TILE * len(cells)), _FLOOR)
    canvas = ImageDraw.Draw(image)
    for row, names in enumerate(cells):
        for column, name in enumerate(names):
            _draw_tile(canvas, column * _TILE, row * _TILE, name)
    return image


def _draw_tile(canvas: ImageDraw.ImageDraw, x: int, y: int, name: str) -> None:
    thing, _, below = name.replace(" in ", " on ").partition(" on ")
    ground = _GROUND.get(below or thing, _FLOOR)
    canvas.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), fill=ground, outline="#c9bfae")
    for part in (below, thing):
        inset = {"target": 11, "goal": 5, "hole": 4, "box": 5, "player": 8}.get(part)
        if inset is None:
            continue
        corners = (x + inset, y + inset, x + _TILE - 1 - inset, y + _TILE - 1 - inset)
        is_round = part in ("player", "hole", "target")
        (canvas.ellipse if is_round else canvas.rectangle)(corners, fill=_BODY[part], outline="#222222")
        if part == thing and below == "target":  # a mark on top: the target below would not be seen
            canvas.ellipse((x + 12, y + 12, x + _TILE - 13, y + _TILE - 13), fill=_BODY["target"])


def gif(frames: Sequence[Image.Image]) -> bytes:
    """The frames as an animation. ValueError without one."""
    if not frames:
        raise ValueError("a GIF needs at least one frame")
    out, (first, *others) = io.BytesIO(), frames
    first.save(out, "GIF", save_all=True, append_images=others, duration=FRAME_MS, loop=0)
    return out.getvalue()
