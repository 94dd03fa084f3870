"""The door to what the trainer does not import: plugins and the kit, found by menu and name.

A part is text, `module:name`, until a run needs it; then `user_code` loads it, as it loads code of the user's own. So
the trainer runs without a plugin that it does not use, and a plugin's imports cost nothing before. Graders
(`rewards/graders.py`), engines (`config/engines.py`) and verbs (`cli/main.py`) have tables of their own, whose rows
say more than a place.
"""

from __future__ import annotations

from typing import Any

from verl_like.user_code import load

_PLUGINS, _KIT = "verl_like.plugins", "verl_like.kit"
PARTS: dict[str, dict[str, str]] = {
    # ways from a prompt to an episode, beside the single turn
    "tools": {
        "open": f"{_PLUGINS}.agents.start:open_toolbox",
        "check": f"{_PLUGINS}.agents.start:check_interactions",
        "runner": f"{_PLUGINS}.agents.start:tool_agent",
    },
    "loops": {
        "check": f"{_PLUGINS}.verl_agents.start:check_agents",
        "runner": f"{_PLUGINS}.verl_agents.start:with_agent_loops",
    },
    # what is trained, beside answers that are sampled (trainer.objective): verl's names of its keys, its parts on the
    # driver, its loss in the workers
    "names": dict.fromkeys(("sft", "preference", "serve"), f"{_PLUGINS}.sft.names:spelled"),
    "objective": {
        **{name: f"{_PLUGINS}.{name}.start:objective" for name in ("sft", "preference")},
        "serve": f"{_PLUGINS}.tinker_server.start:objective",
    },
    "loss": {
        "sft": f"{_PLUGINS}.sft.experience:Imitation",
        "preference": f"{_PLUGINS}.preference.pairs:Carried",
    },
    # where programs in responses run
    "execution": {"sandbox": f"{_PLUGINS}.code_grading.execution:ExecutionPlace"},
    # a checkpoint that another trainer wrote
    "checkpoint": {
        "is_verls": f"{_KIT}.coming_from.verl_checkpoints:is_verl_step",
        "from_verl": f"{_KIT}.coming_from.verl_checkpoints:converted",
    },
    # where training prompts come from, beside files in their order
    "sampler": {
        "own": f"{_PLUGINS}.samplers.curriculum:CustomSampler",
        "class": f"{_PLUGINS}.samplers.curriculum:sampler_class",
        "difficulty": f"{_PLUGINS}.samplers.difficulty:CurriculumSampler",
        "weighted": f"{_PLUGINS}.samplers.mixing:WeightedSampler",
    },
    # tokens that a response may go on with
    "drafts": {
        "lookup": f"{_PLUGINS}.drafts.lookup:Lookup",
        "history": f"{_PLUGINS}.drafts.history:History",
    },
    "environments": {"datasets": f"{_PLUGINS}.games.dataset:datasets"},
    # models that grade: the judge behind an endpoint, and those of the run's own workers
    "reward_model": {
        "judge": f"{_PLUGINS}.reward_models.judge:Judge",
        "score": f"{_PLUGINS}.reward_models.model_score:ModelScore",
        "server": f"{_PLUGINS}.reward_models.server:RewardServer",
    },
    # teachers of distillation: which has a row, and those that are no models of the run
    "teachers": {
        "open": f"{_PLUGINS}.teachers.choice:open_teachers",
        "check": f"{_PLUGINS}.teachers.choice:check_teachers",
        "rows": f"{_PLUGINS}.teachers.choice:check_rows",
    },
    # where metrics go, by trainer.logger; and for whoever asks
    "tracker": {
        name: f"{_PLUGINS}.trackers.services:{name.capitalize()}Tracker"
        for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
    },
    "metrics": {"prometheus": f"{_PLUGINS}.trackers.prometheus:PrometheusTracker"},
    # what is told about a run before it and while it goes on
    "forecast": {"memory": f"{_KIT}.forecast.memory:of_start"},
    "readback": {"differences": f"{_KIT}.readback:differences"},
    "speed": {"report": f"{_KIT}.speed.report:SpeedReport"},
    "proof": {
        "step": f"{_KIT}.selfcheck.step_proof:prove_at_start",
        "parity": f"{_KIT}.selfcheck.parity:prove_at_start",
    },
    "report": {"html": f"{_KIT}.report.writer:ReportWriter"},
}


def part(menu: str, name: str) -> Any:
    """The object behind a row of PARTS. Raises KeyError for a menu or name that it lacks."""
    return load(PARTS[menu][name], f"{menu}.{name}")
