"""The servers of a reward model that writes text, as whoever grades sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl_like.services.server import answers

_HEALTH_S, _TRIES = 10.0, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Addresses of the servers of a reward model, for its graders.

    path: path of the model, and the name under which the servers answer.
    places: (host:port, what to call it) of each server.
    lost: makes the error that ends a run which has lost a server.
    end_ids: tokens that end the model's answers.
    """

    path: str
    places: Sequence[tuple[str, str]]
    lost: Callable[[str], Exception]
    end_ids: Sequence[int] = ()
    _turns: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.places]

    def next_address(self) -> str:
        """Return the address of the server whose turn it is."""
        return self.places[next(self._turns) % len(self.places)][0]

    def require_alive(self) -> None:
        """Raise `lost` where a server does not answer: a function of the user's may have taken that for a 0."""
        for address, name in self.places:
            if not any(answers(f"http://{address}/health", _HEALTH_S) for _ in range(_TRIES)):
                raise self.lost(f"{name} does not answer; what was graded since may be wrong, and is not used")
