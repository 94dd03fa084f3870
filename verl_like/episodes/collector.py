"""Batches of rollouts with their scores: the first of the loop's four seams.

    loader --prompts--> Collector --requests--> replicas, open while it collects
                            |  <--responses--
                            |  --each as it ends--> graders
                            +--> a step's rollouts, with their scores on their way

Plain batches, dynamic sampling, masking, greedy baselines, additional prompts and validation differ in what is asked,
which groups are used, and what is done to the scores.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from verl_like.algorithms.reward_shaping import baseline_rewards, has_signal_B, large_enough_B
from verl_like.batch import Episodes, Prompt, PromptRow, Rollouts, Scores, whole_episodes
from verl_like.config import PPOConfig
from verl_like.data.loader import PromptLoader
from verl_like.episodes import partial_responses
from verl_like.episodes.answering import Answering, Collection, Group, Member, all_graded
from verl_like.episodes.episode import EpisodeFailure
from verl_like.episodes.group_filter import completed
from verl_like.episodes.ledger import conversation_metrics, filter_metrics, lost_in_races, race_metrics
from verl_like.episodes.loop import EpisodeLoop
from verl_like.episodes.outcomes import outcome_metrics, trained_too
from verl_like.episodes.pending_scores import PendingBatch, of_rows
from verl_like.episodes.rows import assemble_rollouts, episode_of_rows
from verl_like.episodes.source import Source
from verl_like.episodes.staleness import staleness_metrics
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import RolloutClient

logger = logging.getLogger(__name__)
T = TypeVar("T")

Collecting = Callable[[Collection], Coroutine[Any, Any, T]]
_PARTING_S = 10.0


class Replicas(Protocol):
    """Engines that sample, opened and closed together, such as `trainer.replicas.RolloutGroup`."""

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Run `work`, which makes its first requests at once, with the replicas open until its future is done."""
        ...


class Collector:
    """Gives each step its rollouts and their scores, and remembers where in the data it is.

    A batch is sampled by one version of the weights, which the replicas hold while they are open; in the asynchronous
    modes by several, which a correction of the loss is told. total_steps: of the run; None: not known.
    """

    def __init__(
        self,
        loader: PromptLoader,
        rewards: RewardManager,
        replicas: Replicas,
        how: Answering,
        config: PPOConfig,
        total_steps: int | None = None,
    ) -> None:
        self.loader, self.rewards, self.replicas, self.how, self.config = loader, rewards, replicas, how, config
        self._masks = config.algorithm.filter_groups.enable and not config.algorithm.filter_groups.resample
        self._loop = EpisodeLoop()
        self._patience_s = config.trainer.rpc_timeout
        self._source = Source(config, loader, rewards, how, total_steps=total_steps)
        self._metrics: dict[str, float] = {}

    def next_batch(self, step: int) -> tuple[Rollouts, PendingBatch]:
        """The step's rollouts and their scores, which may still be computed.

        Raises RolloutError, RewardError, and RunStopped where dynamic sampling finds too few groups.
        """
        groups = self._take(step)
        self._metrics = dict(self._source.metrics)
        rollouts, pending = self._batch(groups, step)
        self._check_versions(rollouts)
        self._metrics |= conversation_metrics([member.episode for group in groups for member in group.sampled])
        self._metrics |= race_metrics(groups) | self.how.tool_usage()
        if self.how.drafts is not None:
            self._metrics |= self.how.drafts.metrics()
        self._metrics["timing_s/episodes_lag_max"] = self._loop.take_lag()
        if self.how.greedy_too:
            self._add_baseline(groups, rollouts, pending, step)
        if self._masks:
            pending.then(partial(self._without_signal_masked, rollouts, step))
        if self.config.algorithm.min_group_size is not None:
            pending.then(partial(self._small_groups_masked, rollouts))
        return rollouts, pending

    def answer(self, prompts: Sequence[Prompt], how: Answering, *, step: int) -> tuple[Rollouts, PendingBatch]:
        """Answers to these prompts, and their scores, of which all may fail: one batch of a validation."""
        batch = self._batch(self._answer(prompts, how), step, validation=True)
        how.tool_usage()  # a step's are those of its training
        return batch

    def feedback(self, rollouts: Rollouts, scores: Scores) -> None:
        """Tell a sampler that learns what became of the last batch, a row for each response."""
        if self.loader.learns:
            self._metrics |= self._loop.call(self._source.feedback(rollouts, scores), self._patience_s)

    def probe(self, prompts: Sequence[Prompt], how: Answering) -> Rollouts:
        """Answers to these prompts, which nobody grades."""
        groups = self._answer(prompts, how)
        return assemble_rollouts(prompts, [[member.episode for member in group.sampled] for group in groups])

    def weights_changed(self, version: int) -> None:
        """The replicas hold these weights from now on."""
        self._loop.call(self._source.weights_changed(version), self._patience_s)

    def trained(self) -> None:
        """The last batch is in the weights of a finished step."""
        self._loop.call(self._source.trained(), self._patience_s)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch, complete when its scores are there."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and what became of the prompts before. Plain values."""
        return self._loop.call(self._source.state(), self._patience_s)

    def save_under_way(self, folder: Path) -> None:
        """Into a checkpoint's folder: the tokens of groups that are not trained yet, and responses for drafts."""
        if self.how.drafts is not None:
            self.how.drafts.write(folder)
        if self._source.across_steps:
            running = {} if self._source.client is None else self._source.client.snapshot()
            partial_responses.write(folder, self._loop.call(self._source.tokens(running), self._patience_s))

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Go on with the very next prompt; of those under way, from the tokens in `folder`. ValueError if the data set
        changed."""
        self._source.load_state_dict(state, folder)
        if self.how.drafts is not None and folder is not None:
            self.how.drafts.read(folder)
        logger.info("%s", self._source.ledger.text(draws=self.loader.draws, waiting=self.loader.num_waiting))

    def close(self) -> None:
        """End what is under way, and the event loop."""
        if self._source.across_steps:
            try:
                self._loop.call(self._source.end(), _PARTING_S)
            except RuntimeError as error:  # whatever ends the run is not to be hidden
                logger.error("%s", error)
            ledger = self._source.ledger
            logger.info("%s", ledger.text(draws=self.loader.draws, waiting=self.loader.draws - ledger.total))
        self._loop.close()

    def _take(self, step: int) -> list[Group]:
        """The step's groups; a wave of them that is scored together is scored while the replicas are closed."""

        self._loop.call(self._source.begin_step(step), self._patience_s)
        groups: list[Group] = []
        while not groups:
            groups = self._sample(self._source.take, self.how) or self._source.judge_wave()
        return groups

    def _answer(self, prompts: Sequence[Prompt], how: Answering) -> list[Group]:
        """The groups of all these prompts."""

        async def answer(collection: Collection) -> list[Group]:
            tasks = [asyncio.ensure_future(collection.group(prompt)) for prompt in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                await collection.end(tasks)

        return self._sample(answer, how) if prompts else []

    def _sample(self, collecting: Collecting[T], how: Answering) -> T:
        """Run it in the event loop, with the replicas open. The first requests are made before they open, so that what
        a step of an engine begins with does not depend on time."""

        def work(client: RolloutClient) -> Future[T]:
            first = threading.Event()

            async def run() -> T:
                task = asyncio.ensure_future(collecting(Collection(how, client, self.rewards, self._loop.arrivals)))
                for _ in range(4):  # the task itself, those of groups, of their episodes, and those that are timed
                    await asyncio.sleep(0)
                first.set()  # even where it waits for requests that end: they do when the replicas are open
                return await task

            future = self._loop.submit(run())
            future.add_done_callback(lambda _: first.set())
            first.wait()
            return future

        return self.replicas.sample(work)

    def _batch(self, groups: Sequence[Group], step: int, *, validation: bool = False) -> tuple[Rollouts, PendingBatch]:
        """The rows of these groups, in this order. In a validation all scores count, and all may be missing."""
        members = [group.sampled for group in groups]
        episodes = [[member.episode for member in each] for each in members]
        rollouts = assemble_rollouts([group.prompt for group in groups], episodes)
        known = [group.scores for group in groups if group.scores is not None]
        if known:
            pending = PendingBatch(Scores.concat(known))
        else:
            graded = all_graded(itertools.chain.from_iterable(members), self.rewards)
            pending = PendingBatch(self.rewards.gather(graded, step=step, may_all_fail=validation))
            if not validation:  # which reads none of the values that training does
                pending.then(partial(self._completed, [each.answer.row for each in graded], step))
        flat = list(itertools.chain.from_iterable(members))
        judge = self._with_outcomes if validation else partial(self._by_outcome, lost_in_races(groups))
        pending.then(partial(judge, flat))
        pending.then(partial(of_rows, episode_of_row=episode_of_rows(episodes)))
        return rollouts, pending

    def _completed(self, rows: Sequence[PromptRow], step: int, scores: Scores) -> Scores:
        """Rows without a value that training reads have failed. RewardError if that leaves too few."""
        found = completed(self.config, scores, rows)
        if new := [f for f, old in zip(found.failures, scores.failures, strict=True) if f is not None and f is not old]:
            what = "step %d: %d of %d rows lack a value that is read of each; their rewards failed: row %d, %s"
            logger.warning(what, step, len(new), len(rows), new[0].row, new[0].message)
        self.rewards.require_enough([found], step=step)
        return found

    def _by_outcome(self, in_races: Sequence[EpisodeFailure], members: Sequence[Member], scores: Scores) -> Scores:
        """After the policy of each episode's outcome. RunStopped where too many were lost."""
        episodes, retried = [member.episode for member in members], [name for m in members for name in m.retried]
        scores, outcomes = self.how.policies.apply(episodes, scores)
        self._metrics |= outcome_metrics(outcomes, retried, len(in_races))
        self.how.policies.require_few_lost(episodes, outcomes, retried, in_races)
        return scores.replace(outcomes=outcomes)

    def _with_outcomes(self, members: Sequence[Member], scores: Scores) -> Scores:
        return scores.replace(outcomes=self.how.policies.outcomes([member.episode for member in members], scores))

    def _add_baseline(self, groups: Sequence[Group], rollouts: Rollouts, pending: PendingBatch, step: int) -> None:
        """ReMax: the reward of each prompt's greedy episode."""
        greedy = [group.baseline for group in groups]
        episodes = [[member.episode] for member in greedy]
        answers, row_episode = assemble_rollouts([g.prompt for g in groups], episodes), episode_of_rows(episodes)
        grading = self.rewards.gather(all_graded(greedy, self.rewards), step=step, may_all_fail=True)
        whole = Episodes.of(answers).join(answers)
        self._metrics["remax/response_length/mean"] = whole.response_length_B.double().mean().item()

        def add(scores: Scores) -> Scores:
            greedy_scores = of_rows(grading.result(), row_episode)
            scores, num_failed = with_baseline(self.config, rollouts, scores, answers, greedy_scores)
            self._metrics["remax/failures"] = float(num_failed)
            return scores

        pending.wait_for(grading)
        pending.then(add)

    def _without_signal_masked(self, rollouts: Rollouts, step: int, scores: Scores) -> Scores:
        """Groups without a signal stay in the batch, and nothing of them is trained: the batch keeps its size and the
        step its cost (Colossal-RL's dynamic_batching=false)."""
        algorithm, limit = self.config.algorithm, self.config.data.max_response_length
        signal_B = has_signal_B(algorithm.filter_groups, self.config.reward_model, rollouts, scores, limit)
        num_dropped, drawn = len(rollouts.group_B[~signal_B].unique()), len(rollouts.group_B.unique())
        self._metrics |= filter_metrics(
            [whole_episodes(rollouts, scores)[1]], num_judged=drawn, num_dropped=num_dropped, per_draw=drawn
        )
        if not signal_B.any():
            logger.warning("step %d: no group has a signal (algorithm.filter_groups): nothing is learnt from it", step)
        return scores.replace(trained_B=trained_too(scores, signal_B))

    def _small_groups_masked(self, rollouts: Rollouts, scores: Scores) -> Scores:
        """Groups that lost too many members stay too, and are counted."""
        enough_B = large_enough_B(rollouts, scores, self.config.algorithm.min_group_size or 1)
        self._metrics["groups/too_small"] = float(len(rollouts.group_B[~enough_B].unique()))
        return scores.replace(trained_B=trained_too(scores, enough_B))

    def _check_versions(self, rollouts: Rollouts) -> None:
        """Check the versions of the weights that sampled the batch; in an asynchronous run, record its staleness.

        Raises RuntimeError where a synchronous run has tokens of other weights: they would be trained on as if the
        newest had sampled them.
        """
        version, found = self._source.version, rollouts.weight_version_T[rollouts.response_mask_T].unique().tolist()
        if version is not None and self._source.across_steps:
            self._metrics |= staleness_metrics(rollouts, version)
        elif version is not None and found not in ([], [version]):
            raise RuntimeError(f"the batch was sampled with weights of version {found}, not of {version} alone")


def with_baseline(
    config: PPOConfig, rollouts: Rollouts, scores: Scores, greedy: Rollouts, greedy_scores: Scores
) -> tuple[Scores, int]:
    """The batch's scores with baseline_B, and how many of `greedy`, one episode of each prompt, have no score.

    A row whose baseline could not be graded has no advantage: it is not valid.
    """
    limit = config.data.max_response_length
    greedy, greedy_scores = whole_episodes(greedy, greedy_scores)
    reward_G = baseline_rewards(config.algorithm, config.reward_model, greedy, greedy_scores, limit)
    place = {group: place for place, group in enumerate(greedy.group_B.tolist())}
    baseline_B = reward_G[torch.tensor([place[group] for group in rollouts.group_B.tolist()], dtype=torch.long)]
    known_B = ~baseline_B.isnan()
    scores = scores.replace(
        score_B=torch.where(known_B, scores.score_B, torch.full_like(scores.score_B, torch.nan)),
        valid_B=scores.valid_B & known_B,
        baseline_B=baseline_B,
    )
    return scores, int(reward_G.isnan().sum())
