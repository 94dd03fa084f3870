"""Start of a preference run: what it is made of besides a supervised run's parts, and its own checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_like.config.paths import Files
from verl_like.plugins.preference.dataset import PreferenceDataset
from verl_like.plugins.preference.losses import measured
from verl_like.plugins.preference.rollouts import RolloutPairs
from verl_like.plugins.sft.start import SFTFacts, assemble
from verl_like.plugins.sft.start import problems as problems_of_rows
from verl_like.trainer.build import Objective
from verl_like.trainer.own_code import trainer_class


class PreferenceFacts(SFTFacts):
    """Facts of a preference run."""

    dataset_class = PreferenceDataset

    @property
    def trainer_class(self) -> type[Any]:
        """Class of the trainer, or what trainer.trainer_class names."""
        from verl_like.plugins.preference.trainer import PreferenceTrainer

        return trainer_class(self.config, PreferenceTrainer)

    @property
    def measures(self) -> list[str]:
        """Ends of the names of what a validation computes over all rows, val/..."""
        return measured(self.config.preference)

    def _dataset(self, split: str, files: Files) -> Any:
        if split == "train" and self.config.preference.rollouts:
            found = RolloutPairs(self.config.preference, self.config.sft, self.data, self.tokenizer)
            return self._checked(found, "preference.rollouts")
        return super()._dataset(split, files)

    def row_options(self) -> dict[str, Any]:
        """Return arguments of the data set beside those of any."""
        return super().row_options() | {"preference": self.config.preference}


def problems(facts: PreferenceFacts) -> Iterator[str]:
    """Yield all that is wrong with a run, as far as it can be told without workers."""
    yield from problems_of_rows(facts)
    if (config := facts.known("hf_config")) is not None and (rates := _rates(config.to_dict())):
        given = ", ".join(f"{name}: 0.0" for name in rates)
        yield (
            f"actor_rollout_ref.model.path: the model drops {', '.join(rates)} in training, and a pair is weighed "
            f"without: set actor_rollout_ref.model.override_config={{{given}}}"
        )


def _rates(config: dict[str, Any]) -> list[str]:
    """List the names of the rates of dropout that are not 0."""
    named = ((k, v) for k, v in config.items() if "dropout" in k or k.endswith("_pdrop"))
    return [name for name, rate in named if isinstance(rate, float) and rate > 0]


def objective() -> Objective:
    """Return the parts of trainer.objective=preference."""
    return Objective(facts=PreferenceFacts, problems=problems, assemble=assemble)
