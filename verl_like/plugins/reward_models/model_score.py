"""Scores of a reward model: the text it reads, and how its score is joined with the rule's.

The model reads prompt and response as tokens. Where it has a tokenizer and chat template of its own
(reward_model.model.input_tokenizer names the policy's), the response is decoded, put behind the row's messages as the
assistant's answer, and written with the reward model's template; otherwise it reads the policy's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_like.batch import RewardFailure, Scores
from verl_like.config import RewardModelConfig
from verl_like.data.chat import PromptEncoder
from verl_like.rewards.grading import Answer
from verl_like.rewards.reward_call import is_finite_reward

Score = Callable[[Sequence[Sequence[int]]], Sequence[float]]  # texts as tokens -> one number each


class ModelScore:
    """Scores answers with the reward model that `score` runs, and joins rule and model.

    own_tokenizer: the reward model's, where its text differs from the policy's; None: it reads the policy's tokens.
    """

    def __init__(self, config: RewardModelConfig, score: Score, *, policy_tokenizer: Any, own_tokenizer: Any) -> None:
        self._config, self._score = config, score
        self._policy_tokenizer = policy_tokenizer
        self._encoder = None if own_tokenizer is None else PromptEncoder(own_tokenizer, {})  # no turns of the policy's

    @property
    def needs_rule(self) -> bool:
        """True where rules grade as well (reward_model.rule_weight)."""
        return self._config.rule_weight != 0

    def texts(self, answers: Sequence[Answer]) -> list[list[int] | str]:
        """Make the reward model's inputs, cut on the right at reward_model.max_length tokens.

        A row that cannot be read has the reason, a text, instead of token ids.
        """
        most = self._config.max_length
        if self._encoder is None:
            return [[*answer.prompt_ids, *answer.response][:most] for answer in answers]
        texts = map(self._templated, answers)
        return [text if isinstance(text, str) else text[:most] for text in texts]

    def add_to(self, scores: Scores, answers: Sequence[Answer]) -> Scores:
        """Add model_weight * model + rule_weight * rule; both parts are kept in the extras (model_score, rule_score).

        A row whose rule failed stays failed; a model score that is not finite is a failure of its row. Failed rows are
        left out, or score reward_model.failure_penalty, as they do without a model.
        """
        texts = self.texts(answers)
        readable = [text for text in texts if not isinstance(text, str)]
        scored = iter(self._score(readable) if readable else ())
        values = [math.nan if isinstance(text, str) else float(next(scored)) for text in texts]
        penalty = self._config.failure_penalty
        failed = math.nan if penalty is None else penalty
        joined, failures, extras = [], list(scores.failures), []
        for row, (value, rule) in enumerate(zip(values, scores.score_B.tolist(), strict=True)):
            parts = {"model_score": value} | ({"rule_score": rule} if self.needs_rule else {})
            extras.append({**scores.extras[row], **parts})
            weighted = self._config.model_weight * value + (self._config.rule_weight * rule if self.needs_rule else 0.0)
            if failures[row] is None and not is_finite_reward(weighted):
                source = answers[row].row.data_source
                told = f"the reward model's score is {value}, weighted {weighted}"
                message = str(texts[row]) if isinstance(texts[row], str) else told
                failures[row] = RewardFailure(row=row, data_source=source, kind="bad_value", message=message)
            lost = failures[row] is not None and scores.failures[row] is not None and not bool(scores.valid_B[row])
            joined.append(weighted if failures[row] is None else math.nan if lost else failed)
        return Scores(
            score_B=torch.tensor(joined, dtype=torch.float32),
            valid_B=torch.tensor([not math.isnan(value) for value in joined], dtype=torch.bool),
            extras=extras,
            failures=failures,
            seconds_B=scores.seconds_B,
        )

    def _templated(self, answer: Answer) -> list[int] | str:
        assert self._encoder is not None
        messages = answer.row.messages[:-1] if answer.row.begun else answer.row.messages
        messages = [*messages, {"role": "assistant", "content": answer.text(self._policy_tokenizer)}]
        try:
            return self._encoder.encode([(messages, None)], to_answer=False)[0]
        except ValueError as error:  # templates refuse roles and orders that others take
            return f"the chat template of the reward model refuses the conversation: {error}"
