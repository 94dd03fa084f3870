"""What the loop itself counts: an episode of several rows once."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import torch

from tests.unit.algorithms.builders import rollouts, scores
from verl_like.batch import Rollouts, Scores
from verl_like.observe.timing import StepClock
from verl_like.trainer.ppo import PPOTrainer


def test_controller_curriculum_and_reward_metrics_are_given_episodes() -> None:
    batch = rollouts((2, 3, 1, 2), [0, 0, 0, 1]).replace(episode_B=torch.tensor([5, 6, 5, 7]))
    graded, trainer = scores([1.0, 0.0, 1.0, 0.5]), MagicMock()
    heard: list[tuple[Rollouts, Scores]] = []
    given: list[Any] = []
    trainer.begin_step.return_value = (1, StepClock())
    trainer.source.next_batch.return_value = (batch, MagicMock(result=lambda: graded))
    trainer.source.metrics.return_value = {}
    trainer.rewards.metrics.side_effect = lambda *seen: given.append(seen) or {}
    trainer.make_experience.return_value = (MagicMock(), {"critic/kl": 0.1})
    trainer.on_scores = lambda *seen: heard.append(seen)
    trainer.critic, trainer.config.trainer.critic_warmup = None, 0
    trainer.update_actor.return_value = trainer.sync_weights.return_value = trainer.validate_if_due.return_value = {}
    state = trainer.state
    PPOTrainer.step(trainer)
    assert state.advance.call_args.kwargs["num_sequences"] == 3
    ((seen, marks),) = heard
    assert seen.response_length_B.tolist() == [3, 3, 2] and marks.score_B.tolist() == [1.0, 0.0, 0.5]
    assert given == [(marks, seen.rows)]
    trainer.make_experience.assert_called_once_with(batch, graded, trainer.evaluate.return_value)  # in rows
