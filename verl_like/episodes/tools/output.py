"""What the programs that tools start write to the worker's stdout and stderr, which they inherit."""

from __future__ import annotations

import os
import threading
from typing import TextIO


class ProgramOutput:
    """Puts itself in the place of file descriptor `number`, and lets `left` bytes through: the rest is dropped, so that
    a program that writes without end fills no log and waits for nobody."""

    def __init__(self, number: int) -> None:
        self.left = 0
        self._real = os.dup(number)
        reading, writing = os.pipe()
        os.dup2(writing, number)  # inherited by programs, as the one before was
        os.close(writing)
        threading.Thread(target=self._pass_on, args=(reading,), daemon=True).start()

    def real(self) -> TextIO:
        """Where the descriptor led before: for what the tools themselves print."""
        return open(self._real, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)

    def _pass_on(self, reading: int) -> None:
        while data := os.read(reading, 1 << 16):
            if self.left > 0:
                os.write(self._real, data[: self.left])
                self.left -= len(data)
