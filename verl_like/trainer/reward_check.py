"""Check before training that the reference answers are graded as right: data.self_check_rows.

A grader that does not fit the data (a wrong data_source, answers in another form, a template that asks for one) gives
every response 0 and a run that learns nothing. Here a few rows of each data source are answered with what the data set
says is right, and once with an answer that cannot be right; the table says how many answers were told apart.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from verl_like.algorithms.completeness import of_reward_function
from verl_like.batch import PromptRow, Rollouts, Scores, pad_rows, usable_number
from verl_like.config import PPOConfig
from verl_like.config.errors import raise_if_any
from verl_like.config.roles import generates
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.rewards.grading import RewardError
from verl_like.rewards.manager import RewardManager
from verl_like.trainer.facts import Facts
from verl_like.user_code import is_reference

logger = logging.getLogger(__name__)

_SAMPLE, _SAMPLE_S = 64, 5.0  # rows that are graded without being asked for, and when no more are
_AT_ONCE = 4
_WRONG = "I do not know."
_REFERENCES = ("reference_response", "reference_solution", "canonical_solution", "solution", "answer")
_FORMS = ("{0}", "#### {0}", "\\boxed{{{0}}}", "<think> </think><answer> {0} </answer>", "Answer: {0}", "({0})")


class Scorer(Protocol):
    """Part of RewardManager that is needed here."""

    def score(self, rollouts: Rollouts, *, step: int) -> Scores: ...


@dataclass(slots=True)
class SourceReport:
    """Counts of one data source's rows, by what became of their reference answers."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    no_reference: int = 0
    numbers: set[str] = field(default_factory=set)  # returned for any of its answers
    example: str = ""  # of a row that was not graded as right

    @property
    def broken(self) -> bool:
        """True where there were reference answers, and not one was graded better than a wrong one."""
        return self.right == 0 and self.wrong + self.failed > 0

    @property
    def looked_at(self) -> int:
        """Number of rows with a reference answer."""
        return self.right + self.wrong + self.failed


@dataclass(slots=True)
class _Trial:
    row: PromptRow
    texts: list[str] = field(default_factory=list)  # the last one is wrong


def self_check(dataset: Dataset, rewards: Scorer, tokenizer: Any, rows_per_source: int) -> dict[str, SourceReport]:
    """Grade up to `rows_per_source` rows of each data source, and log the table.

    Raises ValueError if a data source has reference answers of which none is graded better than a wrong answer.
    """
    reports = grade_references(dataset, rewards, tokenizer, _chosen(dataset.domains(), rows_per_source))
    logger.info("self-check of the rewards (data.self_check_rows=%d)\n%s", rows_per_source, table(reports))
    broken = [f"{source}: {report.example}" for source, report in reports.items() if report.broken]
    if broken:
        raise ValueError(
            "data.self_check_rows: no reference answer is graded better than a wrong one, so nothing could be learned "
            f"from {'; '.join(broken)}. Choose the grader with reward_model.rule, reward_model.rule_by_source or "
            "custom_reward_function.path, or set data.self_check_rows=0"
        )
    return reports


def grade_sample(dataset: Dataset, rewards: RewardManager, tokenizer: Any) -> dict[str, SourceReport]:
    """Grade 64 reference answers, spread over the data sources and each one's rows; fewer where they take long.

    A judge, who may cost money, grades the first of each source alone. Logs a warning for references that are not
    graded better than a wrong answer, and for a source whose first row has none and cannot be graded at all. Raises
    ValueError when none could be graded. Nothing is graded where that is known already (`RewardManager.try_out`).
    """
    if rewards.fails:
        return {}
    domains, ends_s = dataset.domains(), time.monotonic() + _SAMPLE_S
    first = _chosen(domains, 1)
    reports = grade_references(dataset, rewards, tokenizer, first)
    rest = [] if rewards.asks_judge else [row for row in _spread(domains, _SAMPLE) if row not in set(first)]
    for start in range(0, len(rest), _AT_ONCE):
        if time.monotonic() < ends_s:
            grade_references(dataset, rewards, tokenizer, rest[start : start + _AT_ONCE], reports)
    for row in (dataset[index][1] for index in first):  # nothing is right for sure, but tests can be unreadable
        if not reference_answers(row) and (told := rewards.ungradable(row, _WRONG)):
            logger.warning(
                "%s: no response to row %d can be graded: %s. Mend the column that the grader reads "
                "(data.ground_truth_key), or choose another grader with reward_model.rule_by_source",
                *(row.data_source, row.index, told),
            )
    for source, report in reports.items():
        if report.wrong + report.failed:
            what = "%s: %d of %d reference answers looked at are not graded better than a wrong one; first %s"
            logger.warning(what, source, report.wrong + report.failed, report.looked_at, report.example)
    return reports


def grade_references(
    dataset: Dataset,
    rewards: Scorer,
    tokenizer: Any,
    rows: Sequence[int],
    reports: dict[str, SourceReport] | None = None,
) -> dict[str, SourceReport]:
    """Grade the reference answers of these rows; return the counts by data source, added to `reports`.

    Raises ValueError when not one answer could be graded.
    """
    reports = {} if reports is None else reports
    trials: list[_Trial] = []
    for index in rows:
        row = dataset[index][1]
        references = reference_answers(row)
        report = reports.setdefault(row.data_source, SourceReport())
        if references:
            trials.append(_Trial(row, [*references, _WRONG]))
        else:
            report.no_reference += 1
    if trials:
        try:
            scores = rewards.score(_rollouts(trials, tokenizer), step=0)
        except RewardError as error:
            raise ValueError(f"data.self_check_rows: no reference answer could be graded: {error}") from error
        _judge(trials, scores, reports)
    return reports


def check_rewards(facts: Facts) -> None:
    """Check that the graders can score the rows; raises ValueError, RewardFunctionError otherwise."""
    rewards, toolbox, train, val = facts.rewards, facts.toolbox, facts.known("train"), facts.known("val")
    if toolbox is not None and toolbox.gives_reward:
        if not rewards.rule_grades:
            raise ValueError(
                "the environment of actor_rollout_ref.rollout.multi_turn.environment_path scores episodes, but beside "
                "the reward model that counts nothing: set reward_model.rule_weight, or reward_model.enable=false"
            )
        return
    known: list[Dataset] = [dataset for dataset in (train, val) if dataset is not None]
    styles = [style for dataset in known for style in dataset.reward_styles()]
    rewards.check_rows(styles)
    for dataset in known:
        refuse_missing_answers(facts.config, dataset)
    if not {"train", "val"} & facts.failed.keys():
        rewards.warn_of_unknown_sources(source for source, _ in styles)
    if train is not None and not rewards.awaits_servers:
        try_rewards(facts.config, facts, rewards)


def try_rewards(config: PPOConfig, facts: Facts, rewards: RewardManager) -> None:
    """Grade a few responses before the first step, as soon as the graders can.

    Raises RewardFunctionError if a function of the user's gives no reward for the first row's answers.
    """
    row = facts.train[0][1]
    rewards.try_out(row, [*reference_answers(row)[:1], _WRONG])
    if config.data.self_check_rows and rewards.rule_grades:
        self_check(facts.train, rewards, facts.tokenizer, config.data.self_check_rows)


def refuse_unknown_numbers(config: PPOConfig, reports: dict[str, SourceReport]) -> None:
    """Refuse keys that name a number which no answer got of the graders (ValueError).

    Not where a reward model, a tool or an agent loop may add it, nor where reference answers say little: some rows have
    none, or a grader of one's own takes none of them as right. The curriculum, which passes over answers without
    its number, has a warning.
    """
    multi_turn, loops = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent
    if config.reward_model.enable or multi_turn.enable or loops.agent_loop_config_path is not None:
        return
    if any(each.no_reference for each in reports.values()) or not any(each.right for each in reports.values()):
        return
    named = of_reward_function(config.algorithm, config.reward_model)
    known = set[str]().union(*(report.numbers for report in reports.values()))
    returned = ", ".join(sorted(known - {"score"})) or "nothing but a score"
    told = f"%s=%s: the reward function returned {returned} for all reference answers"
    curriculum = config.data.curriculum
    if curriculum.enable and curriculum.metric not in (None, "score", *known):
        logger.warning(told, "data.curriculum.metric", curriculum.metric)
    raise_if_any([told % (key, name) for name, key in named.items() if name not in known])


def refuse_missing_answers(config: PPOConfig, dataset: Dataset) -> None:
    """Refuse a file without reference answers where built-in graders compare with them (ValueError).

    Warns of a file in which some rows have none.
    """
    reward = config.reward_model
    own = config.custom_reward_function.path is not None or reward.judge.url is not None
    parts = [name for table in reward.weights.values() for name in table]
    others = [reward.rule or "", *reward.rule_by_source.values(), reward.reward_manager, *parts]
    own = own or generates(reward, config.custom_reward_function)
    if own or (reward.enable and reward.rule_weight == 0) or any(map(is_reference, others)):
        return
    if type(dataset) is not PromptDataset:  # a class of the user's may know answers
        return
    for file, missing, used in dataset.without_ground_truth():
        rows = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        told = f"{file.path}: {len(missing):,} of {used:,} rows have no reference answer (null or empty): row {rows}"
        if len(missing) > reward.max_failure_fraction * used:
            raise ValueError(
                f"{told} (it has the columns {', '.join(file.rows.columns)}); set data.ground_truth_key to the column "
                "with the answers, or grade without them: custom_reward_function.path"
            )
        if missing:
            logger.warning("%s. Their responses get no reward: leave these rows out", told)


def _chosen(domains: Sequence[str], rows_per_source: int) -> list[int]:
    taken: dict[str, int] = {}
    chosen = []
    for index, source in enumerate(domains):
        taken[source] = taken.get(source, 0) + 1
        if taken[source] <= rows_per_source:
            chosen.append(index)
    return chosen


def _spread(domains: Sequence[str], most: int) -> list[int]:
    """Choose up to `most` rows, as many of each data source, from its first row to its last."""
    sources: dict[str, list[int]] = {}
    for index, source in enumerate(domains):
        sources.setdefault(source, []).append(index)
    counts = [(rows, min(len(rows), -(-most // len(sources)))) for rows in sources.values()]
    return [rows[place * len(rows) // count] for rows, count in counts for place in range(count)]


def reference_answers(row: PromptRow) -> list[str]:
    """List responses that a fitting grader takes as right: the row's solution, and its answer in the usual forms."""
    answers: list[str] = []
    for name in _REFERENCES:
        text = row.extra_info.get(name)
        if isinstance(text, str) and text.strip():
            answers += [text, f"```python\n{text}\n```"]
    truth = row.ground_truth
    truth = truth[0] if isinstance(truth, list) and truth else truth
    if isinstance(truth, str | int | float) and str(truth).strip() and not _is_structure(truth):
        answers += [form.format(truth) for form in _FORMS]
    return list(dict.fromkeys(answers))


def _is_structure(truth: Any) -> bool:
    """True for JSON text of tests or the like, which answers are graded with: it is no answer."""
    if not isinstance(truth, str) or not truth.lstrip().startswith(("{", "[{", '["')):
        return False
    try:
        return isinstance(json.loads(truth), dict | list)
    except json.JSONDecodeError:
        return False


def _rollouts(trials: Sequence[_Trial], tokenizer: Any) -> Rollouts:
    """Make rollouts of the answers as if they had been sampled; log-probs and weight versions mean nothing here."""
    rows = [trial.row for trial in trials for _ in trial.texts]
    texts = [text for trial in trials for text in trial.texts]
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    response_ids = pad_rows(ids, side="right", dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    return Rollouts(
        prompt_ids_BP=torch.zeros((len(rows), 1), dtype=torch.int32),
        prompt_length_B=torch.ones(len(rows), dtype=torch.int64),
        response_ids_BR=response_ids,
        response_length_B=lengths,
        response_mask_BR=torch.arange(response_ids.shape[1])[None, :] < lengths[:, None],
        group_B=torch.tensor([number for number, trial in enumerate(trials) for _ in trial.texts]),
        weight_version_BR=torch.zeros_like(response_ids),
        finish_reasons=["stop"] * len(rows),
        rows=rows,
    )


def _judge(trials: Sequence[_Trial], scores: Scores, reports: dict[str, SourceReport]) -> None:
    values, start = scores.score_B.tolist(), 0
    for trial in trials:
        end = start + len(trial.texts)
        # reward_model.failure_penalty gives failed rows a score too: it says nothing about an answer
        failed = [failure is not None for failure in scores.failures[start:end]]
        *graded, wrong = (math.nan if f else value for value, f in zip(values[start:end], failed, strict=True))
        report = reports[trial.row.data_source]
        values_by_name = (each for extra in scores.extras[start:end] for each in extra.items())
        report.numbers |= {name for name, value in values_by_name if usable_number(value) is not None}
        best = max((value for value in graded if not math.isnan(value)), default=math.nan)
        if math.isnan(best):
            report.failed += 1
            failure = next(f for f in scores.failures[start:end] if f is not None)
            report.example = report.example or f"row {trial.row.index}: {failure.kind}: {failure.message[:200]}"
        elif math.isnan(wrong) or best > wrong:
            report.right += 1
        else:
            report.wrong += 1
            shown = f"row {trial.row.index}, ground truth {trial.row.ground_truth!r:.80}: score {best:g} as if wrong"
            report.example = report.example or shown
        start = end


def table(reports: dict[str, SourceReport]) -> str:
    """Format the counts: one line a data source."""
    width = max([len("data source"), *(len(source) for source in reports)])
    lines = [f"{'data source':{width}}  right  wrong  failed  no reference  first row not graded as right"]
    for source, r in reports.items():
        lines.append(
            f"{source:{width}}  {r.right:5}  {r.wrong:5}  {r.failed:6}  {r.no_reference:12}  {r.example}".rstrip()
        )
    return "\n".join(lines)
