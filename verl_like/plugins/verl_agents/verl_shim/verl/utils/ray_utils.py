"""verl.utils.ray_utils: the event loop. There is no Ray in a worker."""

from __future__ import annotations

import asyncio


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The one that runs here."""
    return asyncio.get_running_loop()
