"""Counts and metrics of what became of the prompts that were drawn: of one step, and of the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_like.batch import Scores
from verl_like.episodes.answering import Group
from verl_like.episodes.episode import Episode, EpisodeFailure

# What a conversation counts beside its calls, as far as it happened.
CONVERSATION_COUNTS = (
    *("failed_calls", "malformed_calls", "new_rows", "out_of_tokens", "out_of_turns"),
    *("cut_tokens", "unsampled_tokens"),  # of agent loops
    *("joined_requests", "uncalled_answers"),  # of the gateway
)
_SECONDS = "agent_loop_s/"


@dataclass(slots=True)
class Ledger:
    """Prompts by what became of them since the run began; all others that were drawn wait to be drawn again."""

    used: int = 0
    dropped: int = 0  # judged useless (algorithm.filter_groups)
    aborted: int = 0  # others were faster (rollout.scheduler.additional_prompts.aborted=drop)
    stale: int = 0  # too old to be trained (async_training.beyond=drop)

    @property
    def total(self) -> int:
        """Prompts that do not come again."""
        return self.used + self.dropped + self.aborted + self.stale

    def text(self, *, draws: int, waiting: int) -> str:
        """One line for the log. draws: of the run so far; waiting: to be drawn again, or under way."""
        return (
            f"prompts: {draws:,} drawn = {self.used:,} trained + {self.dropped:,} without a signal + {self.aborted:,} "
            f"aborted + {self.stale:,} too old + {waiting:,} not trained yet"
        )

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any] | None, num_gone: int) -> Ledger:
        """From a checkpoint; of one without a ledger, all prompts that are gone were used."""
        return cls(used=num_gone) if state is None else cls(**state)


def filter_metrics(judged: Sequence[Scores], *, num_judged: int, num_dropped: int, per_draw: int) -> dict[str, float]:
    """train/num_gen_batches (verl's name) and filter_groups/*, of the groups up to the one that filled the batch.

    judged: their scores. score_mean_drawn is over all their valid responses, so that the choice of groups does not bias
    it. per_draw: data.gen_batch_size.
    """
    scores = [each.score_B[each.valid_B].double() for each in judged]
    return {
        "train/num_gen_batches": num_judged / per_draw,
        "filter_groups/num_drawn": float(num_judged),
        "filter_groups/num_dropped": float(num_dropped),
        "filter_groups/signal_fraction": 1 - num_dropped / max(num_judged, 1),
        "filter_groups/score_mean_drawn": sum(each.sum().item() for each in scores) / max(sum(map(len, scores)), 1),
    }


def conversation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """num_turns/* (verl's names, and its way to count: the prompt and tool answers are turns too) and tools/*: what the
    episodes' `counts` say, in sum; calls for each episode in the mean. Nothing where no episode may have several turns.
    """
    turns = [episode.info["num_turns"] for episode in episodes if "num_turns" in episode.info]
    if not turns:
        return {}
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    return {
        "num_turns/min": float(min(turns)),
        "num_turns/max": float(max(turns)),
        "num_turns/mean": sum(turns) / len(turns),
        "tools/calls/mean": counts["calls"] / len(turns),
        "tools/lost_episodes": float(sum(episode.failure is not None for episode in episodes)),
        **{f"tools/{name}": float(counts[name]) for name in CONVERSATION_COUNTS},
        **{
            f"timing_s/agent_loop/{name.removeprefix(_SECONDS)}/mean": seconds / len(turns)
            for name, seconds in counts.items()
            if name.startswith(_SECONDS)
        },
        **_of_environments(counts),
    }


def race_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """redundancy/*, where more episodes were begun than are kept: how many were discarded, with how many tokens, and
    the mean length of those that are used and of all, aborted ones as far as they came: short ones win. How many of the
    discarded were lost: these count in outcomes/lost_fraction."""
    trails = [trail for group in groups for trail in group.discarded]
    if not trails:
        return {}
    last = {(trail.prompt.group, trail.sample): trail for trail in trails}  # not what was lost before in its place
    discarded = [trail.num_sampled() for trail in last.values()]
    used = [member.episode.num_sampled for group in groups for member in group.sampled]
    return {
        "redundancy/discarded_episodes": float(len(discarded)),
        "redundancy/discarded_tokens": float(sum(trail.num_sampled() for trail in trails)),
        "redundancy/lost_episodes": float(len(lost_in_races(groups))),
        "redundancy/episode_length/used": sum(used) / len(used),
        "redundancy/episode_length/begun": sum(used + discarded) / len(used + discarded),
    }


def lost_in_races(groups: Sequence[Group]) -> list[EpisodeFailure]:
    """List the failures of episodes that were lost, and whose place another one took without a second try."""
    return [trail.failure for group in groups for trail in group.discarded if trail.failure is not None]


def _of_environments(counts: Mapping[str, float]) -> dict[str, float]:
    """env/<tag>/{episodes, steps/mean, valid_moves, success}: of the episodes that ended, by what they played."""
    metrics: dict[str, float] = {}
    for name in [name for name in counts if name.startswith("env/") and name.endswith("/episodes")]:
        tag, episodes = name.removesuffix("/episodes"), counts[name]
        metrics |= {name: episodes, f"{tag}/steps/mean": counts[f"{tag}/steps"] / episodes}
        metrics[f"{tag}/valid_moves"] = counts[f"{tag}/valid"] / max(counts[f"{tag}/steps"], 1)
        if f"{tag}/success" in counts:
            metrics[f"{tag}/success"] = counts[f"{tag}/success"] / episodes
    return metrics
