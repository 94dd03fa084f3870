"""Episodes, and the protocol that runs them: the seam for everything between one answer and an agent with tools.

    EpisodeRunner.run(prompt, sample, ask) -> Episode      a coroutine; `ask` samples one turn with the policy

An episode is its turns. It becomes one row of the batch, or several where the context was rewritten between two turns:
what the model saw and wrote is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl_like.batch import MediaHandle, Prompt
from verl_like.rollout.rollout_engine import Completion, FinishReason, Sampled, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Tokens sampled between two observations, and the observation before them.

    observation_ids: the tokens before it that no earlier turn holds; for the first turn, the prompt.
    sampled: what the policy sampled; no token where the budget is used up.
    new_row: `observation_ids` are a whole context instead, which begins another row.
    media: the images in `observation_ids`, placed in the row; None: the prompt's in the first turn, none in later ones.
    reward: the environment's for this turn.
    state_id: equal for equal states before a turn, -1 where states have no identity.
    """

    observation_ids: Sequence[int]
    sampled: Sampled
    finish_reason: FinishReason
    new_row: bool = False
    media: Sequence[MediaHandle] | None = None
    reward: float | None = None
    state_id: int = -1

    @classmethod
    def of(
        cls,
        observation_ids: Sequence[int],
        completion: Completion,
        *,
        new_row: bool = False,
        media: Sequence[MediaHandle] | None = None,
        state_id: int = -1,
    ) -> Turn:
        """A turn of what was asked and answered."""
        return cls(
            observation_ids=observation_ids,
            sampled=completion.sampled,
            finish_reason=completion.finish_reason,
            new_row=new_row,
            media=media,
            state_id=state_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """Reason for which an episode says nothing about the policy.

    outcome: how it counts (`outcomes.py`): timed_out, tool_error, environment_error or aborted. kind: what it was, more
    exactly.
    """

    kind: str
    message: str
    outcome: str = "environment_error"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """One answer to one prompt: at least one turn.

    reward: the environment's for the whole, which is its score; None: graders score it. info: what graders find in
    extra_info beside the row's own. counts: what happened, summed over a batch in the metrics tools/*. name: in logs
    and samples; whoever has it run gives it.
    """

    turns: tuple[Turn, ...]
    reward: float | None = None
    failure: EpisodeFailure | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def lost(cls, prompt: Prompt, failure: EpisodeFailure) -> Episode:
        """One of which nothing is left: a turn without a token, and without images, which may be what was wrong."""
        nothing = Turn(observation_ids=prompt.ids, sampled=Sampled.of([], [], 0), finish_reason="stop", media=())
        return cls(turns=(nothing,), failure=failure)

    def named(self, name: str) -> Episode:
        """Return a copy with this name; without dataclasses.replace, which is slow where thousands end at once."""
        return Episode(
            turns=self.turns, reward=self.reward, failure=self.failure, info=self.info, counts=self.counts, name=name
        )

    def rows(self) -> list[tuple[Turn, ...]]:
        """The turns of each row, in order."""
        if len(self.turns) == 1:
            return [self.turns]
        starts = [0, *(place for place, turn in enumerate(self.turns) if turn.new_row and place)]
        return [self.turns[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    def response_ids(self) -> list[int]:
        """Everything after the prompt of the last row: what is graded."""
        return self.response_array().tolist()

    def response_array(self) -> NDArray[np.int32]:
        """Return `response_ids` as an array, which takes a ninth of the memory."""
        first, *later = self.rows()[-1]
        if not later:
            return first.sampled.token_ids
        parts = [part for turn in later for part in (turn.observation_ids, turn.sampled.token_ids)]
        return np.concatenate([first.sampled.token_ids, *(np.asarray(part, dtype=np.int32) for part in parts)])

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.sampled) for turn in self.turns)


class EpisodeAborted(BaseException):
    """Raised by `Ask` when the episode is no longer wanted.

    It is no `Exception`: a runner that tries again after any error must not try again after this one.
    """


class Ask(Protocol):
    """Samples the next turn of one episode."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of a call that is given none."""
        ...

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Sequence[MediaHandle] | None = None,
    ) -> Completion:
        """The policy's continuation of these tokens: all that came before, with earlier turns as they were sampled.

        sampling: None for the run's own. max_tokens: at most so many, and never more than `sampling` allows. media: the
        images in these tokens; None for the prompt's, with which they must begin then. Raises ValueError for what the
        engine refuses, RolloutError when it died, EpisodeAborted.
        """
        ...


class Toolbox(Protocol):
    """The tools and environments of a run, in processes of their own, as the start and the loop know them."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Tools offered to the model, in the form of a chat template's tools."""
        ...

    @property
    def gives_reward(self) -> bool:
        """True where episodes are scored by an environment, not by graders."""
        ...

    def take_usage(self) -> dict[str, float]:
        """Metrics of the tools since they were taken last."""
        ...


class EpisodeRunner(Protocol):
    """Turns a prompt into an episode. One object runs all of them, in one event loop: it must not block."""

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        """The episode with this number of the prompt's group: 0 ... n - 1, and further ones where more are begun than
        are needed (rollout.n_redundant), or one is for a baseline."""
        ...


class SingleTurn:
    """The plain case: the prompt, and one response."""

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        return Episode(turns=(Turn.of(prompt.ids, await ask(prompt.ids)),))
