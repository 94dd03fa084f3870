"""Check of the user's own code that the configuration names, on the driver, before any process starts.

Data sets, samplers and reward code are loaded and checked where they are used; all of that is before the workers too.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import itertools
import logging
import os
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.kl import FULL_KL_KIND, KL_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.config import PPOConfig
from verl_like.config.errors import problems_of
from verl_like.observe.trackers import check_trackers
from verl_like.trainer.loop import Loop
from verl_like.trainer.ppo import PPOTrainer
from verl_like.user_code import UserCodeError, load, resolve_path
from verl_like.workers.roles import reward_worker_class

logger = logging.getLogger(__name__)
_REWARD = "compute_score"
T = TypeVar("T", bound=Loop)


def check_own_code(config: PPOConfig) -> Iterator[str]:
    """Check that the code is there, can be imported and can be called as it must."""
    actor, algorithm, reward = config.actor_rollout_ref.actor, config.algorithm, config.reward_model
    custom = config.custom_reward_function
    kinds = [algorithm.kl_penalty] * algorithm.use_kl_in_reward + [actor.kl_loss_type] * actor.use_kl_loss
    yield from problems_of(
        lambda: ADVANTAGES.lookup(algorithm.adv_estimator),
        lambda: POLICY_LOSSES.lookup(actor.policy_loss.loss_mode),
        *(partial(KL_ESTIMATORS.lookup, kind) for kind in kinds if kind != FULL_KL_KIND),
        lambda: check_trackers(config.trainer),
        lambda: trainer_class(config),
        lambda: custom.path and resolve_path(custom.path, "custom_reward_function.path"),
        lambda: reward_worker_class(reward) if reward.enable else None,
    )


def trainer_class(config: PPOConfig, base: type[T] = PPOTrainer) -> type[T]:
    """Return the objective's trainer, or the class derived from it that trainer.trainer_class names."""
    reference = config.trainer.trainer_class
    if reference is None:
        return base
    return _trainer(load(reference, "trainer.trainer_class"), f"trainer.trainer_class={reference}", base)


def _trainer(found: Any, setting: str, base: type[T] = PPOTrainer) -> type[T]:
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserCodeError(f"{setting} must be a class derived from {base.__module__}.{base.__name__}")
    return found


def check_given(config: PPOConfig, reward: Any, trainer: Any) -> None:
    """Refuse objects in place of keys (`verl_like.run`) that cannot be used, or whose key is set too (ValueError)."""
    for given, name, key, value in (
        (reward, "reward", "custom_reward_function.path", config.custom_reward_function.path),
        (trainer, "trainer", "trainer.trainer_class", config.trainer.trainer_class),
    ):
        if given is not None and value is not None:
            raise UserCodeError(f"both {name}={given!r} and {key}={value} are given: leave one out")
    if trainer is not None:
        _trainer(trainer, f"trainer={trainer!r}", PPOTrainer if config.trainer.objective == "rl" else Loop)
    if reward is not None and not callable(reward):
        raise UserCodeError(f"reward={reward!r}: a {type(reward).__name__} cannot be called; hand over a function")


def with_reward(config: PPOConfig, reward: Callable[..., Any], folder: Path) -> PPOConfig:
    """Set a function as custom_reward_function.path: `folder` gets a file that holds it, pickled.

    So it runs where reward files do, in processes that are killed at their time limit, and a later start, `verl-like
    eval` for instance, finds it too. What can be imported is pickled by name, what a notebook or `__main__` defines by
    value, with what it refers to. Raises UserCodeError for what cannot be pickled.
    """
    try:
        data = base64.b85encode(cloudpickle.dumps(reward))
    except Exception as error:
        raise UserCodeError(
            f"reward={reward!r} cannot be sent to the processes that grade, because something that it refers to cannot "
            f"be pickled: {error}. Make locks, connections and models inside the function, when it is first called"
        ) from error
    try:
        source = textwrap.indent(textwrap.dedent(inspect.getsource(reward)), "# ", lambda line: True)
    except (OSError, TypeError):  # typed at a prompt; an object with __call__
        source = textwrap.indent(repr(reward), "# ", lambda line: True) + "\n"
    path = folder.resolve() / "reward_function.py"
    lines = ["# The reward of this run, pickled by verl_like:", source, "import base64", "import pickle", ""]
    text = "\n".join([*lines, f"{_REWARD} = pickle.loads(base64.b85decode({data!r}))", ""])
    if path.exists() and path.read_text(encoding="utf-8") != text:
        earlier = next(other for n in itertools.count(1) if not (other := path.with_stem(f"{path.stem}_{n}")).exists())
        path.rename(earlier)
        logger.warning("%s holds another reward than it did: that one is %s now", path, earlier.name)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:  # it may hold secrets
        file.write(text)
    custom = dataclasses.replace(config.custom_reward_function, path=str(path), name=_REWARD)
    return dataclasses.replace(config, custom_reward_function=custom)
