"""Manager of rewards: decodes responses, scores them in worker processes, counts what failed.

One path for everything: built-in graders and the user's reward function run in the same killable processes
(`services`). A row whose reward could not be computed gets NaN and valid_B false: it is left out of training, never
scored 0.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from fnmatch import fnmatchcase
from typing import Any

from verl_like.batch import PromptRow, Rollouts, Scores, numeric_extras, unusable_extras
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.config.reward import REWARD_MANAGERS
from verl_like.config.roles import classifies, generates
from verl_like.registry import part
from verl_like.remote_storage import local_folder
from verl_like.rewards import graders
from verl_like.rewards.grading import (
    Answer,
    Graded,
    Grading,
    ModelScores,
    Scorer,
    ServedModel,
    Submit,
    report,
    require_enough,
    tell_of_deaths,
)
from verl_like.rewards.parts import CUSTOM, JUDGE, Part, Weights
from verl_like.rewards.reward_call import RewardCall, RewardFunctionError, RewardOutcome, ScorerSpec
from verl_like.services.pool import WorkerPool
from verl_like.user_code import is_reference, resolve_path

logger = logging.getLogger(__name__)

_MOST_WORKERS = 64
_KNOWN = Scorer(Part("environment"), lambda calls: [])  # nothing is submitted to it


class RewardManager:
    """Scores rollouts with custom_reward_function.path, or with the built-in grader of each row's data source.

    The constructor starts custom_reward_function.num_workers processes and waits until they have loaded the function,
    so that a missing file or a wrong signature is found before the first step. Call `close`, or use it in a `with`.
    """

    def __init__(
        self, custom: CustomRewardFunctionConfig, reward_model: RewardModelConfig, data: DataConfig, tokenizer: Any
    ) -> None:
        _check_supported(custom, reward_model)
        self._model: ModelScores | None = None
        self._served: ServedModel | None = None
        self.awaits_servers = generates(reward_model, custom)
        """Whether `use_servers` must come before anything is graded."""
        self.rule_grades = not classifies(reward_model, custom) or reward_model.rule_weight != 0
        self._choice = graders.choose(reward_model.rule, reward_model.rule_by_source, reward_model.rule_kwargs)
        self._tokenizer = tokenizer
        self.fails = False  # tried before training, the user's function failed each time, which is told
        self._custom = custom.path is not None
        self._manager = reward_model.reward_manager
        self._failure_penalty = reward_model.failure_penalty
        self._max_failure_fraction = reward_model.max_failure_fraction
        self.graded_by = _graded_by(custom, reward_model)
        self._known_scorers: dict[tuple[str, str], tuple[Scorer, ...]] = {}  # of a (data source, style)
        has_judge = reward_model.judge.url is not None or self.awaits_servers
        self._weights = Weights(reward_model.weights, has_custom=self._custom, has_judge=has_judge)
        num_workers = _num_workers(custom, self._manager)
        sizes = {"num_workers": num_workers, "call_timeout": custom.timeout}
        self._execution = part("execution", "sandbox")(reward_model, **sizes)
        parser = reward_model.judge.parser
        if parser is not None and not graders.is_grader(parser):
            raise ValueError(
                f"reward_model.judge.parser={parser}: there is no such grader; name a built-in one, or your own, "
                "file.py:name"
            )
        parse = None if parser is None else lambda call: self._pool.submit([call])[0]
        self._judge = part("reward_model", "judge")(reward_model.judge, parse) if has_judge else None
        self._pool: WorkerPool[RewardCall, RewardOutcome] = WorkerPool(
            self._spec(custom, reward_model), num_workers=num_workers, max_pending=custom.max_pending
        )
        try:
            self._pool.start()
        except BaseException:
            self.close()
            raise

    def _spec(self, custom: CustomRewardFunctionConfig, reward_model: RewardModelConfig) -> ScorerSpec:
        own = self._manager not in REWARD_MANAGERS
        served = reward_model.model.path if self.awaits_servers else None
        return ScorerSpec(
            path=None if custom.path is None else resolve_path(custom.path, "custom_reward_function.path"),
            name=custom.name,
            kwargs=dict(custom.reward_kwargs) if self._custom else {},
            options=self._execution.add_to(self._choice.options),
            choice=self._choice,
            manager=self._manager if own else None,
            manager_kwargs=dict(reward_model.reward_kwargs) if own else {},
            own_graders=self._own_graders(reward_model),
            batch=self._manager == "batch",
            served_path=served,
            served_folder=None if served is None else local_folder(served, "reward_model.model.path"),
            served_trust=reward_model.model.trust_remote_code,
            timeout=float(custom.timeout),
            memory_limit_mb=custom.memory_limit_mb,
        )

    def _own_graders(self, reward_model: RewardModelConfig) -> dict[str, str]:
        """Graders that the configuration names by reference, by the key that does."""
        named = {"reward_model.rule": reward_model.rule or ""}
        named |= {"reward_model.judge.parser": reward_model.judge.parser or ""} if self._judge is not None else {}
        named |= {f"reward_model.rule_by_source.{source}": name for source, name in self._choice.by_source.items()}
        named |= {f"reward_model.weights.*.{name}": name for name in self._weights.names()}
        return {key: name for key, name in named.items() if is_reference(name)}

    def use_model(self, model: ModelScores) -> None:
        """Score with a reward model too, once its workers are there (reward_model.enable)."""
        self._model = model

    def use_servers(self, served: ServedModel) -> None:
        """Tell the graders the addresses of the served reward model, once it is served and after each restart."""
        self._served = served
        if self._judge is not None:
            self._judge.use_servers(served.addresses, served.path, served.end_ids)

    def check_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Raise ValueError for a (data_source, style) without a reward. Call it with the data set's before training."""
        if not self.rule_grades:
            return
        graders_used = self._weights.names()
        rows = [(source, style) for source, style in rows if not self._weights.parts_of(source)]
        if not self._custom:
            if rows and self._judge is not None and not self._weights.names():
                return  # the judge grades all rows
            self._choice.check_rows(rows)
            graders_used |= {self._choice.grader_of_row(source, style) or "" for source, style in rows}
        if any(name in graders.GRADERS and graders.GRADERS[name].runs_programs for name in graders_used):
            self._execution.require()

    def try_out(self, row: PromptRow, responses: Sequence[str]) -> None:
        """Call the user's function with responses to a row, before training.

        Raises RewardFunctionError if it gives no reward for any of them (None, text, a dict without "score", nothing
        until its time limit); what it raises is logged.
        """
        if not self.rule_grades:
            return
        parts = self._scorers_of(row)
        scorers = [s for s in parts if s.grader not in graders.GRADERS and s.part.name != JUDGE]
        if not scorers:
            return
        answer = Answer(row=row, prompt_ids=(), response_ids=())
        outcomes: list[RewardOutcome] = []
        while len(outcomes) < len(responses) and not (outcomes and outcomes[-1].kind == "timeout"):  # once is enough
            call = Graded(answer=answer, text=responses[len(outcomes)]).call(scorers[0], self._server())
            outcomes += [future.result() for future in scorers[0].submit([call])]
        tell_of_deaths(outcomes, self.graded_by)
        failed: dict[str, list[str]] = {}
        for response, outcome in ((r, o) for r, o in zip(responses, outcomes, strict=False) if o.kind):
            message = outcome.message + "; return sooner, or raise it" * (outcome.kind == "timeout")
            failed[message] = [*failed.get(message, []), repr(response[:60])]
        if failed:
            what = f"{self.graded_by}: tried with row {row.index} of data_source {row.data_source}, "
            what += f"{sum(map(len, failed.values()))} of {len(outcomes)} calls failed:"
            text = "\n  ".join([what, *(f"response {', '.join(texts)}: {told}" for told, texts in failed.items())])
            if all(outcome.kind in ("bad_value", "timeout") for outcome in outcomes):
                raise RewardFunctionError(text)
            self.fails = all(outcome.kind for outcome in outcomes)
            logger.warning("%s", text)

    def ungradable(self, row: PromptRow, response: str) -> str:
        """Tell why a built-in grader cannot grade a response to a row; empty where it can, or where none is asked."""
        asked = Graded(answer=Answer(row=row, prompt_ids=(), response_ids=()), text=response)
        built_in = [scorer for scorer in self._scorers_of(row) if scorer.grader in graders.GRADERS]
        futures = [each for scorer in built_in for each in scorer.submit([asked.call(scorer, self._server())])]
        outcomes = [future.result() for future in futures]
        return next((f"{o.kind}: {(o.message.splitlines() or [''])[-1]}" for o in outcomes if o.kind), "")

    def warn_of_unknown_sources(self, data_sources: Iterable[str]) -> None:
        """Log names in reward_model.weights and rule_by_source that fit none: a misspelt one changes rewards silently.

        Call it with all data sources of the run.
        """
        sources = set(data_sources)
        tables = {"weights": self._weights.sources(), "rule_by_source": self._choice.by_source}
        for key, names in tables.items():
            for name in names:
                if not any(source == name or fnmatchcase(source, name) for source in sources):
                    logger.warning(
                        "reward_model.%s.%s has no effect: no row has such a data source (there are: %s)",
                        *(key, name, ", ".join(sorted(sources))),
                    )

    @property
    def asks_judge(self) -> bool:
        """True where a judge grades some rows."""
        return self._judge is not None

    @property
    def grades_alone(self) -> bool:
        """True where each response has its score as soon as it is graded; otherwise a batch is scored as a whole."""
        return self._model is None and self._manager != "batch"

    def grade(self, answers: Sequence[Answer], known: Sequence[RewardOutcome | None] | None = None) -> list[Graded]:
        """Start to grade these responses; from any thread. Raises ValueError for a data source without a grader.

        known: outcomes of responses that need no grader (an environment has scored them, or nothing can). A batch
        manager and a reward model score all responses of a batch at once, in `gather` and its result.
        """
        outcomes = known or [None] * len(answers)
        graded = [self._ungraded(answer, outcome) for answer, outcome in zip(answers, outcomes, strict=True)]
        if self._manager == "batch":
            return graded
        calls: dict[Submit, list[tuple[Graded, RewardCall]]] = {}  # one message for all that goes the same way
        for each in graded:
            for scorer in () if each.futures else each.scorers:
                calls.setdefault(scorer.submit, []).append((each, each.call(scorer, self._server())))
        futures = {submit: iter(submit([call for _, call in of])) for submit, of in calls.items()}
        for each in (each for each in graded if not each.futures):
            each.futures = [next(futures[scorer.submit]) for scorer in each.scorers]
        return graded

    def _ungraded(self, answer: Answer, known: RewardOutcome | None) -> Graded:
        row, text = answer.row, answer.text(self._tokenizer)
        if known is not None:
            done: Future[RewardOutcome] = Future()
            done.set_result(known)
            return Graded(answer=answer, text=text, scorers=(_KNOWN,), futures=(done,))
        if self._model is not None and not self._model.needs_rule:
            return Graded(answer=answer, text=text)
        if (kind := (row.data_source, row.style)) not in self._known_scorers:
            self.check_rows([kind])
            self._known_scorers[kind] = tuple(self._scorers_of(row))
        return Graded(answer=answer, text=text, scorers=self._known_scorers[kind])

    def gather(
        self, graded: Sequence[Graded], *, step: int, may_all_fail: bool = False, quiet: bool = False
    ) -> Grading:
        """Gather the scores of responses that are being graded, in this order.

        may_all_fail: this is one batch of several, so that its `result` need not hold a score.
        quiet: moreover, its failures are logged with the others', by `report`.
        """
        return Grading(
            graded,
            step=step,
            may_all_fail=may_all_fail,
            quiet=quiet,
            model=self._model,
            failure_penalty=self._failure_penalty,
            max_failure_fraction=self._max_failure_fraction,
            graded_by=self.graded_by,
            server=self._server(),
            check=self._require_servers,
        )

    def _server(self) -> str:
        return "" if self._served is None else self._served.next_address()

    def score(self, rollouts: Rollouts, *, step: int) -> Scores:
        """One reward per response of rollouts that are complete: `grade` and `gather` in one."""
        responses = rollouts.response_ids_T.split(rollouts.response_length_B.tolist())
        answers = [
            Answer(row=row, prompt_ids=prompt, response_ids=ids.tolist())
            for row, prompt, ids in zip(rollouts.rows, rollouts.prompt_lists(), responses, strict=True)
        ]
        return self.gather(self.grade(answers), step=step).result()

    def report(self, scores: Scores, graded: Sequence[Graded], *, step: int) -> None:
        """Log the failures among these scores. Raises what ends the run where a server that graded them is gone."""
        self._require_servers()
        report(scores, graded, step=step, failure_penalty=self._failure_penalty)

    def require_enough(self, batches: Sequence[Scores], *, step: int) -> None:
        """Raise RewardError if too few of the rewards of these batches, taken together, could be computed."""
        most = self._max_failure_fraction if self._failure_penalty is None else 1.0
        self._require_servers()  # first: their loss explains what is missing, and is a reason to begin again
        require_enough(batches, step=step, most=most, graded_by=self.graded_by)

    def require_any(self, batches: Sequence[Scores], *, step: int) -> None:
        """Raise RewardError if no reward of these batches could be computed."""
        self._require_servers()
        require_enough(batches, step=step, graded_by=self.graded_by)

    def _require_servers(self) -> None:
        if self._served is not None:
            self._served.require_alive()

    def _scorers_of(self, row: PromptRow) -> list[Scorer]:
        """The parts that reward_model.weights names, or the one way that grades the row."""
        return [self._scorer(part, row) for part in self._weights.parts_of(row.data_source)] or [
            self._scorer(Part(self._default_part(row)), row)
        ]

    def _default_part(self, row: PromptRow) -> str:
        if self._custom:
            return CUSTOM
        if self._judge is not None and not self._weights.names():
            return JUDGE
        name = self._choice.grader_of_row(row.data_source, row.style)
        assert name is not None, "check_rows lets no such row pass"
        return name

    def _scorer(self, part: Part, row: PromptRow) -> Scorer:
        if part.name == JUDGE and self._judge is not None:
            return Scorer(part, self._judge.submit)
        own_manager = self._manager not in REWARD_MANAGERS and not self._weights.names()
        return Scorer(part, self._pool.submit, None if part.name == CUSTOM or own_manager else part.name)

    @staticmethod
    def metrics(scores: Scores, rows: Sequence[PromptRow] | None = None) -> dict[str, float]:
        """Compute reward/failures, reward/timeouts, reward/failure_fraction and the mean of each further numeric value.

        With `rows`, and more than one data source among them, also reward/<data_source>/score/mean.
        """
        failures = [failure for failure in scores.failures if failure is not None]
        metrics = {
            "reward/failures": float(len(failures)),
            "reward/timeouts": float(sum(failure.kind == "timeout" for failure in failures)),
            "reward/failure_fraction": len(failures) / max(1, len(scores)),
        }
        for kind, count in Counter(failure.kind for failure in failures).items():
            metrics[f"reward/failures/{kind}"] = float(count)
        if scores.seconds_B is not None and len(scores):
            metrics["reward/seconds/mean"] = float(scores.seconds_B.mean())
            metrics["reward/seconds/max"] = float(scores.seconds_B.max())
        metrics |= {f"reward/{key}/left_out": float(len(rows)) for key, rows in unusable_extras(scores.extras).items()}
        collected: dict[str, list[float]] = {}
        for extras in scores.extras:
            for key, value in numeric_extras(extras).items():
                collected.setdefault(f"reward/{key}/mean", []).append(value)
        sources = [row.data_source for row in rows] if rows is not None else []
        if len(set(sources)) > 1:
            for source, value, valid in zip(sources, scores.score_B.tolist(), scores.valid_B.tolist(), strict=True):
                if valid:
                    collected.setdefault(f"reward/{source}/score/mean", []).append(value)
        # what a reward function calls "seconds" does not take the place of ours
        return {name: sum(values) / len(values) for name, values in collected.items()} | metrics

    def worker_pids(self) -> list[int]:
        """Process ids of the live reward workers."""
        return self._pool.worker_pids()

    def close(self) -> None:
        """Kill the worker processes. Safe to call twice."""
        if self._judge is not None:
            self._judge.close()
        self._pool.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _num_workers(custom: CustomRewardFunctionConfig, manager: str) -> int:
    """Count the workers. prime: as many as there are cores to run on, unless the user says how many."""
    if manager == "prime" and custom.num_workers == 1:
        return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    return custom.num_workers


def _graded_by(custom: CustomRewardFunctionConfig, reward_model: RewardModelConfig) -> str:
    """Name the origin of the scores, for messages."""
    if reward_model.reward_manager not in REWARD_MANAGERS:
        return f"reward_model.reward_manager={reward_model.reward_manager}"
    if custom.path is not None:
        return f"custom_reward_function.path={custom.path}, name={custom.name}"
    if generates(reward_model, custom):
        return f"the reward model {reward_model.model.path}"
    return "the built-in graders" if reward_model.judge.url is None else f"the judge {reward_model.judge.url}"


def _check_supported(custom: CustomRewardFunctionConfig, reward_model: RewardModelConfig) -> None:
    if custom.path is None and custom.reward_kwargs:
        logger.warning(
            "custom_reward_function.reward_kwargs has no effect: custom_reward_function.path is not set; options of "
            "built-in graders go to reward_model.rule_kwargs"
        )
    if reward_model.reward_manager == "batch":
        if custom.path is None:
            raise ValueError(
                "reward_model.reward_manager=batch calls a function of yours with lists, but "
                "custom_reward_function.path is not set; set it, or use naive"
            )
        if reward_model.weights:
            raise ValueError("reward_model.weights with reward_manager=batch: use naive, which grades row by row")
