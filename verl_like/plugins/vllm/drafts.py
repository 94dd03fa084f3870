"""Guesses of ours in vLLM's own speculative path, which keeps each with the probability that the model gives it.

A guess is one token with probability 1: vLLM keeps it with chance p(token), and draws another one from what is left of
p otherwise, so tokens have the model's distribution whatever is guessed. Source: vLLM 0.26 and 0.32,
v1/sample/rejection_sampler.py (without probabilities of drafts), v1/spec_decode/custom_class_proposer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_like.rollout.rollout_engine import GenerationRequest


@dataclass(slots=True, eq=False)
class Row:
    """Response under way in vLLM, as the lookup reads it; drafted, kept: see Completion."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    drafting: Any = None
    drafted: int = 0
    kept: int = 0

    def kept_of(self, num_sampled: int) -> int:
        """Count the guesses among the tokens that vLLM gives out, which may end within a pass's."""
        beyond = len(self.token_ids) - num_sampled
        return self.kept - max(0, beyond - 1)


class Proposer:
    """vLLM's proposer, which asks `lookup` once the engine has set it; vLLM makes it, with its configuration.

    rows: those under way, by vLLM's own names; requests that are not here (probes, scores) get no guesses.
    runner: vLLM's, whose batch names the rows of a step.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.lookup: Any = None
        self.rows: dict[str, Row] = {}
        self.runner: Any = None

    def load_model(self, model: Any) -> None:
        """Load nothing: there is no second model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Guess each row's next tokens.

        Args:
            sampled_token_ids: those of this step, by row; empty for a prompt that is not computed to its end.
            num_tokens_no_spec: tokens [rows] that are known, prompts and these included.
            token_ids_cpu: all known tokens [rows, max_model_len].
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        names = self.runner.input_batch.req_ids
        going = {i: self.rows[names[i]] for i, new in enumerate(sampled_token_ids) if new and names[i] in self.rows}
        for i, row in going.items():
            first = len(row.request.prompt_ids) + len(row.token_ids)
            row.token_ids += token_ids_cpu[i, first : int(num_tokens_no_spec[i])].tolist()
            row.kept += len(sampled_token_ids[i]) - 1
        if going:
            for (i, row), draft in zip(going.items(), self.lookup.propose([*going.values()]), strict=True):
                drafts[i] = draft
                row.drafted += len(draft)
        return drafts
