"""One step's batch where not every group that is drawn is used: dynamic sampling, and additional prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from verl_like.algorithms.group_filter import has_signal_B, large_enough_B
from verl_like.batch import Prompt, Scores
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import prompts_in_flight
from verl_like.data.loader import PromptLoader
from verl_like.episodes.answering import Collection, Group, all_graded
from verl_like.episodes.outcomes import Policies
from verl_like.episodes.pending import of_rows, renumbered
from verl_like.episodes.rows import assemble_rollouts, episode_of_rows
from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits, Selection
from verl_like.episodes.tally import filter_metrics
from verl_like.rewards.manager import RewardManager

PASSES_WITHOUT_BOUND = 10  # max_num_gen_batches=0: a step that has seen all prompts ten times will not fill up


class Choosing:
    """Starts groups, judges each as it ends, and knows when the batch is full; then `finish`."""

    def __init__(
        self, config: PPOConfig, loader: PromptLoader, rewards: RewardManager, policies: Policies, *, step: int
    ) -> None:
        self._config, self._loader, self._rewards, self._step = config, loader, rewards, step
        self._policies = policies
        self._rules = config.algorithm.filter_groups
        additional = config.actor_rollout_ref.rollout.scheduler.additional_prompts
        self._waits = not additional.enable or additional.aborted == "wait"
        self._draws_before = loader.draws
        self._prompts: dict[int, Prompt] = {}  # begun
        self._groups: dict[int, Group] = {}  # ended
        self._judged: list[Scores] = []  # in the order of their ends
        self._collections: list[Collection] = []
        self.selection = self._selection()

    @property
    def per_draw(self) -> int:
        """Prompts that one draw of rounds would take."""
        return self._config.data.gen_batch_size or self._config.data.train_batch_size

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
            groups = answer(self._start(min(self.per_draw, self.selection.room())))
            self._score(groups)
            for group in groups:
                self._judge(group)

    def finish(self) -> list[Group]:
        """The batch; prompts that it does not need go back to the data, or are dropped where the key says so.

        Raises ValueError, or RewardError, when it is not full.
        """
        if self.selection.exhausted():
            self._rewards.require_enough(self._judged, step=self._step)
            raise ValueError(self._gave_up())
        if self._rules.enable:  # of the same groups whatever ended when
            judged = [self._groups[name] for name in (*self.selection.chosen(), *self.selection.dropped())]
            graded = all_graded((member for group in judged for member in group.sampled), self._rewards)
            scores = renumbered(Scores.concat([self._scores_of(group.prompt.group) for group in judged]))
            self._rewards.report(scores, graded, step=self._step)
            self._rewards.require_enough([scores], step=self._step)
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
            num_dropped, draw = len(dropped), self.per_draw
            found |= filter_metrics(judged, num_judged=len(judged), num_dropped=num_dropped, per_draw=draw)
        return found

    def _selection(self) -> Selection:
        data, extra = self._config.data, self._config.actor_rollout_ref.rollout.scheduler.additional_prompts
        num_extra = extra.max if extra.enable else 0
        draw = self.per_draw if self._rules.enable else data.train_batch_size
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
            for each in all_graded(group.sampled, self._rewards):
                for future in each.futures:
                    await collection.arrivals.wait_for(future)
            self._score([group])
        return group

    def _score(self, groups: Sequence[Group]) -> None:
        graded = all_graded((member for group in groups for member in group.sampled), self._rewards)
        scores = self._rewards.gather(graded, step=self._step, may_all_fail=True, quiet=True).result()
        for group, part in zip(groups, scores.split([len(group.sampled) for group in groups]), strict=True):
            group.scores = part

    def _judge(self, group: Group) -> None:
        name = group.prompt.group
        self._groups[name] = group
        self.selection.judge(name, kept=not self._rules.enable or self._is_useful(group))
        if group.scores is not None:
            self._judged.append(group.scores)
            if len(self._judged) % self.per_draw == 0:  # a grader that always fails is no lack of signals
                self._rewards.require_any(self._judged[-self.per_draw :], step=self._step)

    def _is_useful(self, group: Group) -> bool:
        """It has a signal, and members enough."""
        episodes = [[member.episode for member in group.sampled]]
        rollouts = assemble_rollouts([group.prompt], episodes)
        judged, _ = self._policies.apply(episodes[0], self._scores_of(group.prompt.group), keep=False)
        scores = of_rows(judged, episode_of_rows(episodes))
        limit, least = self._config.data.max_response_length, self._config.algorithm.min_group_size
        signal_B = has_signal_B(self._rules, self._config.reward_model, rollouts, scores, limit)
        enough_B = signal_B if least is None else signal_B & large_enough_B(rollouts, scores, least)
        return bool(enough_B.any())

    def _scores_of(self, name: int) -> Scores:
        scores = self._groups[name].scores
        assert scores is not None
        return scores

    def _unused(self) -> list[Prompt]:
        """In the order of their draws."""
        gone = {*self.selection.chosen(), *self.selection.dropped()}
        return [prompt for name, prompt in self._prompts.items() if name not in gone]

    def _gave_up(self) -> str:
        data, rules, judged = self._config.data, self._rules, self._judged
        num_draws, kept = math.ceil(len(judged) / self.per_draw), len(judged) - len(self.selection.dropped())
        values = [value for scores in judged for value in scores.score_B[scores.valid_B].tolist()]
        return (
            f"step {self._step}: {num_draws} draws ({len(judged)} prompts, mean score "
            f"{sum(values) / max(len(values), 1):.3g}) gave {kept} groups with a signal, but data.train_batch_size="
            f"{data.train_batch_size} are needed. The prompts are too easy or too hard for this model, or "
            f"algorithm.filter_groups asks for too much (metric={rules.metric}, range={rules.range}, std_threshold="
            f"{rules.std_threshold}). Raise algorithm.filter_groups.max_num_gen_batches={rules.max_num_gen_batches}, "
            f"data.gen_batch_size={self.per_draw} or actor_rollout_ref.rollout.n, or keep and mask such groups: "
            "algorithm.filter_groups.resample=false"
        )
