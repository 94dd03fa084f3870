"""Start of a supervised run: what it is made of, what is checked before processes start, and the trainer's parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from verl_like.algorithms.kl import KLController
from verl_like.config.errors import problems_of
from verl_like.config.paths import Files
from verl_like.config.roles import ACTOR
from verl_like.data.loader import PromptLoader
from verl_like.models.loading import num_positions, tell_positions
from verl_like.observe.trackers import check_trackers
from verl_like.plugins.sft.dataset import Batches, SFTDataset
from verl_like.plugins.sft.turns import Row
from verl_like.trainer.build import Objective
from verl_like.trainer.checkpoints import Checkpoints
from verl_like.trainer.facts import Fact, Facts, required, train_loader
from verl_like.trainer.own_code import trainer_class
from verl_like.trainer.reporting import Reporter
from verl_like.trainer.roles import ActorHandle, handle_options
from verl_like.trainer.start_checks import check_best, check_machine, check_models, refuse_media, refuse_media_keys
from verl_like.trainer.state import TrainState
from verl_like.trainer.workers import Pools
from verl_like.user_code import load_class

logger = logging.getLogger(__name__)


class SFTFacts(Facts):
    """Facts of a supervised run: its data hold the answers, and no part samples or judges.

    dataset_class: of the rows; data.custom_cls is derived from it.
    """

    dataset_class: type[SFTDataset] = SFTDataset

    @property
    def trainer_class(self) -> type[Any]:
        """Class of the trainer, or what trainer.trainer_class names; imported late, with the trainer's parts."""
        from verl_like.plugins.sft.trainer import SFTTrainer

        return trainer_class(self.config, SFTTrainer)

    @property
    def measures(self) -> list[str]:
        """Ends of the names of what a validation computes over all rows, val/..."""
        return ["loss"]

    def row_options(self) -> dict[str, Any]:
        """Return arguments of the data set beside those of any."""
        return {"sft": self.config.sft, "seed": self.config.trainer.seed, "vision": self.vision}

    def first_rows(self) -> dict[str, Row]:
        """Return the last row of each answer of the first row of the data, for the log, by what tells them apart."""
        rows = [answer[-1] for answer in self.train.answers(0)]  # pyright: ignore[reportAttributeAccessIssue]
        return dict(zip(("'s chosen answer", "'s rejected answer") if len(rows) == 2 else ("",), rows, strict=True))

    def _dataset(self, split: str, files: Files) -> SFTDataset | None:
        if split == "val" and not files:
            return None
        own, custom = self.dataset_class, self.data.custom_cls
        kind = own
        if custom.path is not None:
            names = {"path_key": "data.custom_cls.path", "name_key": "data.custom_cls.name"}
            kind = load_class(custom.path, custom.name, **names)
            if not issubclass(kind, own):
                raise ValueError(f"data.custom_cls: {kind.__name__} must derive from {own.__module__}.{own.__name__}")
        _ = self.room
        return self._checked(
            kind(self.data, files, self.tokenizer, split=split, **self.row_options(), **custom.kwargs),
            f"data.{split}_files",
        )

    def _checked(self, dataset: Any, key: str) -> Any:
        """Check a data set's rows, before anybody asks how many there are."""
        refuse_media(dataset, key, self.hf_config)
        dataset.check_rows()
        return dataset

    @Fact
    def max_model_len(self) -> int:
        """Longest row. Raises ValueError where the model has fewer positions."""
        longest = self.config.sft.max_length
        if longest > num_positions(self.hf_config):
            raise ValueError(f"sft.max_length={longest}: {tell_positions(self.hf_config)}; lower it")
        return longest


def problems(facts: SFTFacts) -> Iterator[str]:
    """Yield all that is wrong with a run, as far as it can be told without workers."""
    config = facts.config
    if (temperature := config.actor_rollout_ref.rollout.temperature) != 1:
        yield f"actor_rollout_ref.rollout.temperature={temperature}: nothing is sampled; leave it out"
    yield from problems_of(
        lambda: facts.device,
        lambda: check_machine(config, facts),
        lambda: check_trackers(config.trainer),
        lambda: facts.trainer_class,
        lambda: check_models(config, facts),
        lambda: facts.max_model_len,
        lambda: _check_data(facts),
        lambda: check_best(config, facts, [f"val/{name}" for name in facts.measures]),
        lambda: facts.plan,
        lambda: facts.known("train") and train_loader(config, facts.train, facts.plan),
    )


def _check_data(facts: SFTFacts) -> Iterator[str]:
    """Check the rows against model and template. The first is shown, with what of it is trained."""
    yield from problems_of(lambda: facts.train, lambda: facts.val)
    refuse_media_keys(facts.data, facts.hf_config)
    for name, row in facts.first_rows().items() if facts.known("train") else ():
        logger.info("the first row%s, what is trained of it in \u27e6 \u27e7: %s", name, shown(row, facts.tokenizer))


def shown(row: Row, tokenizer: Any) -> str:
    """Write a row as text, with its trained parts in brackets."""
    parts = np.split(row.ids, np.flatnonzero(np.diff(row.trained)) + 1)
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    odd = 1 - int(row.trained[0])  # parts take turns
    return "".join(f"\u27e6{text}\u27e7" if number % 2 == odd else text for number, text in enumerate(texts))


def assemble(
    facts: SFTFacts,
    loader: PromptLoader,
    pools: Pools,
    report: Reporter,
    stop: Any,
    checkpoints: Checkpoints,
    stack: ExitStack,
    kind: Any,
) -> Any:
    """Put the driver's parts around the workers; see `trainer.build.assemble`."""
    config, plan = facts.config, facts.plan
    actor = ActorHandle(pools.of(ACTOR), plan, **handle_options(config.trainer, plan, ACTOR, facts.costs.actor))
    return (kind or facts.trainer_class)(
        config=config,
        plan=plan,
        total_steps=required(plan.total_training_steps),
        state=TrainState(step=0, weight_version=0, kl=KLController.from_config(config.algorithm.kl_ctrl)),
        source=Batches(loader, facts.train),
        val=facts.val,
        pools=pools,
        actor=actor,
        checkpoints=checkpoints,
        report=report,
        stop=stop,
    )


def objective() -> Objective:
    """Return the parts of trainer.objective=sft."""
    return Objective(facts=SFTFacts, problems=problems, assemble=assemble)
