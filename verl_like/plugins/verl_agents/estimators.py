"""Advantage estimators that take verl's arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from omegaconf import OmegaConf
from torch import Tensor

from verl_like.algorithms.advantages import AdvantageFunction, AdvantageInputs, AdvantageOutputs
from verl_like.config import AlgorithmConfig
from verl_like.config.schema import to_dict
from verl_like.user_code import accepted


def of_verls(function: Callable[..., tuple[Tensor, Tensor]]) -> AdvantageFunction:
    """Make an estimator of one that takes verl's arguments, of which it is given those that it names.

    Those are token_level_rewards and response_mask [B, R], index [B] (text, equal for the same prompt) and config, the
    section algorithm. It returns advantages and returns [B, R].
    """

    def estimator(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
        given = {
            "token_level_rewards": inputs.token_rewards_BR,
            "response_mask": inputs.response_mask_BR.long(),
            "index": np.array([str(group) for group in inputs.group_B.tolist()], dtype=object),
            "config": OmegaConf.create(to_dict(algorithm)),
        }
        found = function(**accepted(function, given))
        mask_BR = inputs.response_mask_BR
        parts = found if isinstance(found, tuple | list) else [found]
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in parts]
        if shapes != [tuple(mask_BR.shape)] * 2:
            name = f"algorithm.adv_estimator={algorithm.adv_estimator!r}"
            raise ValueError(f"{name} returned {shapes}: return advantages and returns, both {tuple(mask_BR.shape)}")
        advantages_BR, returns_BR = (each.float() * mask_BR for each in found)
        return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)  # type: ignore[call-arg]

    return estimator
