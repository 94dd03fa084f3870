"""Filter of ended groups (algorithm.filter_groups): their scores, and the verdict whether each is of use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl_like.algorithms.completeness import complete
from verl_like.algorithms.reward_shaping import has_signal_B, large_enough_B
from verl_like.batch import PromptRow, Scores
from verl_like.config import PPOConfig
from verl_like.episodes.answering import Collection, Group, all_graded
from verl_like.episodes.outcomes import Policies
from verl_like.episodes.pending_scores import of_rows, renumbered
from verl_like.episodes.rows import assemble_rollouts, episode_of_rows
from verl_like.rewards.manager import RewardManager


def completed(config: PPOConfig, scores: Scores, rows: Sequence[PromptRow]) -> Scores:
    """The scores, where rows have failed that lack a value which this configuration reads of each."""
    actor = config.actor_rollout_ref.actor
    return complete(scores, rows, config.algorithm, reward_model=config.reward_model, actor=actor)


class Judge:
    """Scores groups and judges them, and remembers what it saw. step: for messages."""

    def __init__(self, config: PPOConfig, rewards: RewardManager, policies: Policies) -> None:
        self._config, self._rewards, self._policies = config, rewards, policies
        self.rules = config.algorithm.filter_groups
        self.seen: list[Scores] = []  # of the groups that were judged, in that order; `begin` forgets them
        self.num_kept = 0
        self.step = 0

    @property
    def per_draw(self) -> int:
        """Prompts that one draw of rounds would take."""
        return self._config.data.gen_batch_size or self._config.data.train_batch_size

    def begin(self, step: int) -> None:
        """The groups of this step come."""
        self.step, self.seen, self.num_kept = step, [], 0

    async def graded(self, collection: Collection, group: Group) -> None:
        """Give the group its scores, when the graders have them."""
        for each in all_graded(group.sampled, self._rewards):
            for future in each.futures:
                await collection.arrivals.wait_for(future)
        self.score([group])

    def score(self, groups: Sequence[Group]) -> None:
        """Give the groups their scores, now."""
        graded = all_graded((member for group in groups for member in group.sampled), self._rewards)
        scores = self._rewards.gather(graded, step=self.step, may_all_fail=True, quiet=True).result()
        scores = completed(self._config, scores, [each.answer.row for each in graded])
        for group, part in zip(groups, scores.split([len(group.sampled) for group in groups]), strict=True):
            group.scores = part

    def keeps(self, group: Group) -> bool:
        """Return True where the group has a signal, and members enough.

        Raises RewardError where a whole draw could not be scored.
        """
        assert group.scores is not None
        self.seen.append(group.scores)
        if len(self.seen) % self.per_draw == 0:  # a grader that always fails is no lack of signals
            self._rewards.require_any(self.seen[-self.per_draw :], step=self.step)
        episodes = [[member.episode for member in group.sampled]]
        rollouts = assemble_rollouts([group.prompt], episodes)
        judged, _ = self._policies.apply(episodes[0], group.scores, keep=False)
        scores = of_rows(judged, episode_of_rows(episodes))
        limit, least = self._config.data.max_response_length, self._config.algorithm.min_group_size
        signal_B = has_signal_B(self.rules, self._config.reward_model, rollouts, scores, limit)
        enough_B = signal_B if least is None else signal_B & large_enough_B(rollouts, scores, least)
        self.num_kept += (kept := bool(enough_B.any()))
        return kept

    def require_enough(self) -> None:
        """RewardError if too many of all that was judged could not be scored."""
        self._rewards.require_enough(self.seen, step=self.step)

    def report(self, groups: Sequence[Group]) -> None:
        """Warn about the failed scores of these groups, and RewardError where they are too many."""
        graded = all_graded((member for group in groups for member in group.sampled), self._rewards)
        scores = renumbered(Scores.concat([group.scores for group in groups if group.scores is not None]))
        self._rewards.report(scores, graded, step=self.step)
        self._rewards.require_enough([scores], step=self.step)

    def gave_up(self) -> str:
        """Say why the batch cannot be filled, and which values would help."""
        data, rules, judged, n = self._config.data, self.rules, self.seen, self._config.actor_rollout_ref.rollout.n
        values = [value for scores in judged for value in scores.score_B[scores.valid_B].tolist()]
        draws, most = math.ceil(len(judged) / self.per_draw), rules.max_num_gen_batches
        enough = math.ceil(draws * data.train_batch_size / max(self.num_kept, 1))  # at the rate so far
        more = f"algorithm.filter_groups.max_num_gen_batches={enough} (now {most}) or " if most else ""
        return (
            f"step {self.step}: {draws} draws ({len(judged)} prompts, mean score "
            f"{sum(values) / max(len(values), 1):.3g}) gave {self.num_kept} groups with a signal, but "
            f"data.train_batch_size={data.train_batch_size} are needed. The prompts are too easy or too hard for this "
            f"model, or algorithm.filter_groups asks for too much (metric={rules.metric}, range={rules.range}, "
            f"std_threshold={rules.std_threshold}). Set {more}actor_rollout_ref.rollout.n={2 * n} (now {n}), or keep "
            "and mask such groups: algorithm.filter_groups.resample=false"
        )
