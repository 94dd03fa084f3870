"""One step's batch where not every group that is drawn is used: dynamic sampling, and additional prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from verl_like.batch import Prompt, Scores
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import prompts_in_flight
from verl_like.data.loader import PromptLoader
from verl_like.episodes.answering import Collection, Group
from verl_like.episodes.group_filter import Judge
from verl_like.episodes.ledger import filter_metrics
from verl_like.episodes.outcomes import Policies
from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits, Selection
from verl_like.rewards.manager import RewardManager

PASSES_WITHOUT_BOUND = 10  # max_num_gen_batches=0: a step that has seen all prompts ten times will not fill up


class Choosing:
    """Starts groups, judges each as it ends, and knows when the batch is full; then `finish`."""

    def __init__(
        self, config: PPOConfig, loader: PromptLoader, rewards: RewardManager, policies: Policies, *, step: int
    ) -> None:
        self._config, self._loader = config, loader
        self._judging = Judge(config, rewards, policies)
        self._judging.begin(step)
        self._rules = config.algorithm.filter_groups
        additional = config.actor_rollout_ref.rollout.scheduler.additional_prompts
        self._waits = not additional.enable or additional.aborted == "wait"
        self._draws_before = loader.draws
        self._prompts: dict[int, Prompt] = {}  # begun
        self._groups: dict[int, Group] = {}  # ended
        self._collections: list[Collection] = []
        self.selection = self._selection()

    async def collect(self, collection: Collection, begun: Callable[[], Awaitable[None]]) -> None:
        """Keep groups in flight until the batch is full. `begun`: to be awaited after what is asked at first."""
        self._collections.append(collection)
        running: dict[asyncio.Task[Group], int] = {}
        try:
            while not self.selection.complete() and not self.selection.exhausted():
                for prompt in self._start(self.selection.admits()):
                    running[asyncio.ensure_future(self._ended(collection, prompt))] = prompt.group
                await begun()
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=running.__getitem__):
                    del running[task]
                    self._judge(task.result())
        finally:
            await collection.end(running)

    def collect_in_waves(self, answer: Callable[[Sequence[Prompt]], list[Group]]) -> None:
        """The same in whole draws: for scores that a batch gets together, and for a sampler that learns, which must be
        asked for the same rows in every run."""
        while not self.selection.complete() and not self.selection.exhausted():
            groups = answer(self._start(min(self._judging.per_draw, self.selection.room())))
            self._judging.score(groups)
            for group in groups:
                self._judge(group)

    def finish(self) -> list[Group]:
        """The batch; prompts that it does not need go back to the data, or are dropped where the key says so.

        Raises ValueError, or RewardError, when it is not full.
        """
        if self.selection.exhausted():
            self._judging.require_enough()
            raise ValueError(self._judging.gave_up())
        if self._rules.enable:  # of the same groups whatever ended when
            self._judging.report([self._groups[name] for name in (*self.selection.chosen(), *self.selection.dropped())])
        if self._waits:
            self._loader.give_back(self._unused())
        return [self._groups[name] for name in self.selection.chosen()]

    def metrics(self) -> dict[str, float]:
        """Of a batch that is full. scheduler/* depends on time: on what had begun when the batch was full."""
        chosen, dropped = self.selection.chosen(), self.selection.dropped()
        used = [member.episode.num_sampled for name in chosen for member in self._groups[name].sampled]
        found = {"scheduler/num_unused": float(len(self._unused()))}
        if self._collections:
            begun = [tokens for each in self._collections for tokens in each.sampled_tokens()]
            found["scheduler/unused_tokens"] = float(sum(begun) - sum(used))
            if isinstance(self.selection, CompletionOrder):  # aborted ones would be longer yet
                found["scheduler/response_length/used"] = sum(used) / max(len(used), 1)
                found["scheduler/response_length/begun"] = sum(begun) / max(len(begun), 1)
        if self._rules.enable:
            judged = [self._scores_of(name) for name in (*chosen, *dropped)]
            num_dropped, draw = len(dropped), self._judging.per_draw
            found |= filter_metrics(judged, num_judged=len(judged), num_dropped=num_dropped, per_draw=draw)
        return found

    def _selection(self) -> Selection:
        data, extra = self._config.data, self._config.actor_rollout_ref.rollout.scheduler.additional_prompts
        num_extra = extra.max if extra.enable else 0
        draw = self._judging.per_draw if self._rules.enable else data.train_batch_size
        passes = PASSES_WITHOUT_BOUND * max(self._loader.steps_per_epoch, 1)
        in_flight = prompts_in_flight(self._config)
        limits = Limits(
            wanted=data.train_batch_size,
            in_flight=in_flight,
            most=max(draw * (self._rules.max_num_gen_batches or passes), in_flight if num_extra else 0),
            extra=num_extra,
            expected=min(1.0, data.train_batch_size / draw),
        )
        return (CompletionOrder if extra.enable else DrawOrder)(limits)

    def _start(self, count: int) -> list[Prompt]:
        prompts = self._loader.draw(count) if count else []
        for prompt in prompts:
            self._prompts[prompt.group] = prompt
            self.selection.start(prompt.group, overdue=prompt.group < self._draws_before)
        return prompts

    async def _ended(self, collection: Collection, prompt: Prompt) -> Group:
        """The group, with its scores where it is judged by them."""
        group = await collection.group(prompt)
        if self._rules.enable:
            await self._judging.graded(collection, group)
        return group

    def _judge(self, group: Group) -> None:
        name = group.prompt.group
        self._groups[name] = group
        self.selection.judge(name, kept=not self._rules.enable or self._judging.keeps(group))

    def _scores_of(self, name: int) -> Scores:
        scores = self._groups[name].scores
        assert scores is not None
        return scores

    def _unused(self) -> list[Prompt]:
        """In the order of their draws."""
        gone = {*self.selection.chosen(), *self.selection.dropped()}
        return [prompt for name, prompt in self._prompts.items() if name not in gone]
