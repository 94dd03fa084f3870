"""verl.interactions.utils.interaction_registry: simulated users for agent loops that talk to them themselves."""

from __future__ import annotations

from typing import Any

from verl_like.plugins.agents.tools.interactions import load_interactions


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, Any]:
    """The objects of a YAML file's classes, by name."""
    return load_interactions(interaction_config_file, "actor_rollout_ref.rollout.multi_turn.interaction_config_path")
