"""Library interface of the package: `verl_like.run` and `verl_like.build`. docs/library.md shows them at work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from verl_like.config import PPOConfig
from verl_like.observe.run_folder import Run, read_run
from verl_like.trainer.main_ppo import quiet_tokenizers
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.run import fit, opened


def run(config: PPOConfig, *, reward: Callable[..., Any] | None = None, trainer: type[PPOTrainer] | None = None) -> Run:
    """Train as `config` (of `verl_like.compose`) says, and read the run's folder: `run(config).metrics`.

    A run that an interrupt stopped returns too.

    Args:
        config: the run.
        reward: compute_score(data_source, solution_str, ground_truth, extra_info=None) as an object, in place of
            custom_reward_function.path.
        trainer: a class derived from PPOTrainer, in place of trainer.trainer_class.

    Raises ConfigError, which lists what is wrong with the inputs, and RunStopped, which says why training cannot go on.
    """
    quiet_tokenizers()
    return read_run(fit(config, reward=reward, kind=trainer))


def build(
    config: PPOConfig, *, reward: Callable[..., Any] | None = None, trainer: type[PPOTrainer] | None = None
) -> AbstractContextManager[PPOTrainer]:
    """Build the trainer of a run, for a loop of your own: `start`, then `step` until `done`, then `finish`.

    Its processes and its hold on the folder end with the context. Arguments and errors: see `run`.
    """
    quiet_tokenizers()
    # with trainer.objective=sft the class is that objective's, with the same methods for a loop
    return cast("AbstractContextManager[PPOTrainer]", opened(config, reward, trainer))
