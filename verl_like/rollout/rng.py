"""Keep the trainer's random numbers out of the rollout engine's hands (vLLM reseeds torch's global generators), and the
engine's out of the trainer's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Generators:
    """States of the global generators: python's, numpy's, torch's on the CPU and on all CUDA devices."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor] | None

    @classmethod
    def now(cls) -> _Generators:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Save the states of all global generators and put them back."""
    outside = _Generators.now()
    try:
        yield
    finally:
        outside.put_back()
