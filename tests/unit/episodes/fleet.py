"""Replicas with fake time behind a real router and real links, graders that are scripted, and a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.unit.data.factory import CharTokenizer, write_prompts
from verl_like.batch import Scores
from verl_like.config import AlgorithmConfig, DataConfig, PPOConfig
from verl_like.config.batch_plan import draws_until_full
from verl_like.config.data import CurriculumConfig
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.sampler import ResumableSampler
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.episodes.episode import EpisodeRunner, SingleTurn
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout
from verl_like.plugins.samplers.difficulty import CurriculumSampler
from verl_like.rewards.grading import Answer, Graded, Grading, Scorer, require_enough
from verl_like.rewards.parts import Part
from verl_like.rewards.reward_call import RewardCall, RewardOutcome
from verl_like.rollout.client import LocalLink, RolloutClient
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, Sampled, SamplingParams
from verl_like.rollout.router import Router

T = TypeVar("T")
N = 2
Verdict = Callable[[int, int], float | RewardOutcome | None]  # position and number of the response -> what it gets


def teaches(position: int, nth: int) -> float:
    """Two prompts of three have a signal: the first response to end scores, the others do not."""
    return 1.0 if position % 3 == 0 else float(position) * (nth == 0)


class Fleet:
    """What the collector samples with."""

    def __init__(self, *engines: FakeTimeEngine, by_rounds: bool = True, requeue: bool = False) -> None:
        self.engines = [FakeTimeRollout(engine) for engine in engines or (FakeTimeEngine(),)]
        links = [LocalLink(f"replica {i}", engine, interval_s=0.001) for i, engine in enumerate(self.engines)]
        self.router = Router(links, max_running_requests=None, deterministic=by_rounds, requeue=requeue)
        self.router.hold()
        self.requeue = requeue
        self.asked: list[GenerationRequest] = []
        self.left: dict[str, Sampled] = {}  # what was pending when the last call ended
        self._submit, self.router.submit = self.router.submit, self._seen  # type: ignore[method-assign]

    def _seen(self, request: GenerationRequest) -> Any:
        self.asked.append(request)
        return self._submit(request)

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        future = work(self.router)
        self.router.release()
        self._tell(FakeTimeRollout.open)
        try:
            return future.result(60)
        finally:
            self.router.hold()
            self.left = self.router.snapshot()
            self._tell(FakeTimeRollout.pause)

    def load(self, version: int) -> None:
        """Other weights, which what is under way goes on with."""
        self._tell(lambda engine: engine.load_weights(iter(()), version))

    def _tell(self, what: Callable[[FakeTimeRollout], None]) -> None:
        """All that live; the death of one that may die is the router's business."""
        for engine in self.engines:
            try:
                what(engine)
            except RolloutError:
                if not self.requeue:
                    raise

    def close(self) -> None:
        self.router.close()
        for engine in self.engines:
            engine.shutdown()


class Rewards:
    """Scores by position; None is a failure. `alone` False: as a batch manager does."""

    graded_by = "the test"
    most_failures = 1.0

    def __init__(self, verdict: Verdict, *, alone: bool = True) -> None:
        self.verdict, self.grades_alone = verdict, alone
        self.seen: dict[int, int] = {}

    def grade(self, answers: Sequence[Answer], known: Sequence[RewardOutcome | None]) -> list[Graded]:
        found = []
        for answer, outcome in zip(answers, known, strict=True):
            graded = Graded(answer=answer, text="", scorers=(Scorer(Part("custom"), self.submit),))
            futures = self.submit([graded.call(graded.scorers[0])])
            if outcome is not None:
                futures[0] = Future()
                futures[0].set_result(outcome)
            graded.futures = futures if self.grades_alone or outcome is not None else ()
            found.append(graded)
        return found

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[RewardOutcome]]:
        return [self._outcome(int(call.ground_truth)) for call in calls]

    def _outcome(self, position: int) -> Future[RewardOutcome]:
        nth = self.seen[position] = self.seen.get(position, -1) + 1
        score, future = self.verdict(position, nth % N), Future[RewardOutcome]()
        failure = RewardOutcome(kind="timeout", message="too slow")
        outcome = score if isinstance(score, RewardOutcome) else RewardOutcome(score=score)
        future.set_result(failure if score is None else outcome)
        return future

    def gather(self, graded: Sequence[Graded], **options: Any) -> Grading:
        return Grading(graded, graded_by=self.graded_by, **options)

    def report(self, scores: Scores, graded: Sequence[Graded], *, step: int) -> None:
        assert len(scores) == len(graded)

    def require_enough(self, batches: Any, *, step: int) -> None:
        require_enough(batches, step=step, most=self.most_failures, graded_by=self.graded_by)

    def require_any(self, batches: Any, *, step: int) -> None:
        require_enough(batches, step=step, graded_by=self.graded_by)


def dataset(folder: Path, count: int = 12) -> PromptDataset:
    """Prompt i has i % 5 + 1 characters, and the ground truth i."""
    files = write_prompts(folder / "a.parquet", ["x" * (i % 5 + 1) for i in range(count)])
    return PromptDataset(DataConfig(), files, CharTokenizer(template=False), split="train")


@contextmanager
def collector(
    data: PromptDataset,
    *,
    batch: int = 4,
    draw: int | None = None,
    verdict: Verdict = teaches,
    alone: bool = True,
    runner: EpisodeRunner | None = None,
    engines: Sequence[FakeTimeEngine] = (),
    additional: int = 0,
    aborted: str = "wait",
    algorithm: AlgorithmConfig | None = None,
    asynchronous: AsyncTrainingConfig | None = None,
    total_steps: int | None = None,
    requeue: bool = False,
    curriculum: CurriculumConfig | None = None,
    **how: Any,
) -> Iterator[tuple[Collector, Fleet]]:
    """A collector of N responses to each of `batch` prompts a step."""
    config = PPOConfig(data=DataConfig(train_batch_size=batch, gen_batch_size=draw))
    config.algorithm = algorithm or AlgorithmConfig()
    extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
    extra.enable, extra.max, extra.aborted = additional > 0, max(additional, 1), aborted
    if asynchronous is not None:
        config.trainer.mode, config.async_training = "colocate_async", asynchronous
    chooses = draws_until_full(config)
    order: dict[str, Any] = {"shuffle": False, "seed": 1, "identity": data.identity()}
    sampler = ResumableSampler(len(data), **order)
    if curriculum is not None:
        sampler = CurriculumSampler(curriculum, len(data), N, **order)
    loader = PromptLoader(data, sampler, draw or batch, drop_last=not chooses)
    fleet = Fleet(*engines, by_rounds=asynchronous is None, requeue=requeue)
    answering = Answering(
        **{"n": N, "seed": 1, "purpose": "train", "sampling": SamplingParams(max_tokens=4096), **how},
        runner=runner or SingleTurn(),
    )
    made = Collector(loader, Rewards(verdict, alone=alone), fleet, answering, config, total_steps)  # type: ignore[arg-type]
    try:
        yield made, fleet
    finally:
        fleet.close()
        made.close()
