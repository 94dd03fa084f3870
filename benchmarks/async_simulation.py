"""What the driver's side of asynchronous training costs, and how well it keeps many replicas busy: a simulation.

    python benchmarks/async_simulation.py --replicas 256 --prompts 1024 --steps 6

The replicas have fake time (verl_like/kit/bench/fake_time.py); the groups, their bookkeeping, the router and the ledger
are the real ones. Responses are log-normal, the longest 8 times the mean. Printed are, per step: simulated seconds; the
CPU seconds that everything but the fake engines took; the share of the replicas' time in which nothing ran; and the
ideal: the sampled tokens at the rate of full replicas, which is what known lengths could be packed to at best.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_like.batch import Prompt, PromptRow
from verl_like.config import DataConfig, PPOConfig
from verl_like.config.batch_plan import prompts_in_flight
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.episodes.answering import Answering, Collection
from verl_like.episodes.episode import SingleTurn
from verl_like.episodes.loop import Arrivals
from verl_like.episodes.source import Source
from verl_like.gc_settings import settle
from verl_like.kit.bench.fake_time import DECODE_S, FakeTimeEngine, SimulatedLink, VirtualClock, seed_of
from verl_like.rewards.grading import Graded
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams
from verl_like.rollout.router import Router


class Engine(FakeTimeEngine):
    """Counts its own CPU seconds, and its simulated ones."""

    cpu_s = busy_s = 0.0

    def step(self) -> list[Completion]:
        began, before = time.process_time(), self.now
        done = super().step()
        self.busy_s += self.now - before
        Engine.cpu_s += time.process_time() - began
        return done

    def add(self, request: GenerationRequest) -> None:
        began = time.process_time()
        super().add(request)
        Engine.cpu_s += time.process_time() - began

    def load(self, version: int) -> None:
        began = time.process_time()
        super().load(version)
        Engine.cpu_s += time.process_time() - began


class Loader:
    """Endless prompts."""

    steps_per_epoch, learns = 1, False

    def __init__(self, length: int) -> None:
        self._ids, self._numbers = list(range(length)), itertools.count()
        self.draws = 0

    def draw(self, count: int) -> list[Prompt]:
        row = PromptRow(index=0, data_source="simulated", messages=[])
        self.draws += count
        return [
            Prompt(ids=self._ids, row=row, group=number, position=number)
            for number in itertools.islice(self._numbers, count)
        ]


class Rewards:
    """Every response has its score at once."""

    grades_alone = True

    def grade(self, answers: Sequence[Any], known: Sequence[Any]) -> list[Graded]:
        return [Graded(answer=answer, text="") for answer in answers]


def drawn_length(mean: int, longest: int) -> Any:
    scale = mean / np.exp(0.5)

    def length(request: GenerationRequest) -> int:
        return max(1, min(longest, int(random.Random(seed_of(request)).lognormvariate(0, 1) * scale)))

    return length


class Simulation:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.clock, self.loop = options, VirtualClock(), asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        longest = options.mean * 8
        self.length_of = length_of = drawn_length(options.mean, longest)
        self.engines = [
            Engine(max_num_seqs=256, length_of=length_of, steps_per_call=options.steps_per_call)
            for _ in range(options.replicas)
        ]
        self.links = [SimulatedLink(f"replica {i}", engine, self.clock) for i, engine in enumerate(self.engines)]
        self.router = Router(self.links, max_running_requests=None, requeue=True)
        config = PPOConfig(data=DataConfig(train_batch_size=options.prompts, max_response_length=longest))
        config.trainer.mode = "separate_async"
        config.async_training = AsyncTrainingConfig(
            over_sample_rate=options.over_sample_rate, max_staleness=options.max_staleness, beyond=options.beyond
        )
        self.running = prompts_in_flight(config) * options.n  # responses
        self.loader = Loader(options.prompt)
        sampling = SamplingParams(max_tokens=longest)
        how = Answering(runner=SingleTurn(), sampling=sampling, n=options.n, seed=1, purpose="train", spread=True)
        rewards: Any = Rewards()
        self.collection = Collection(how, self.router, rewards, Arrivals(self.loop))
        self.source = Source(config, self.loader, rewards, how)  # type: ignore[arg-type]

    async def pump(self) -> None:
        """Let the event loop, which runs all the time as in a run, do what is ready."""
        while self.loop._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    def mean_drawn(self) -> float:
        """[tokens] Of the responses that are prescribed, not only those that get trained."""
        asked = (
            GenerationRequest(request_id=f"drawn-{i}", prompt_ids=[1], sampling=SamplingParams(max_tokens=1))
            for i in range(20_000)
        )
        return float(np.mean([self.length_of(request) for request in asked]))

    async def step(self, number: int) -> dict[str, float]:
        began, cpu, engine_cpu = self.clock.now, time.process_time(), Engine.cpu_s
        busy = sum(engine.busy_s for engine in self.engines)
        await self.source.begin_step(number)
        task = self.loop.create_task(self.source.take(self.collection))
        await self.pump()
        while not task.done():
            assert self.clock.step(), "nothing is left to happen"
            await self.pump()
        waited, groups = self.clock.now - began, task.result()
        end = self.clock.now + self.options.train_s
        while self.clock._events and self.clock._events[0][0] <= end:
            self.clock.step()
            await self.pump()
        self.clock.now = max(self.clock.now, end)
        await self.source.trained()
        for link in self.links:
            link.pause()
            link.engine.load(number)
        await self.source.weights_changed(number)
        for link in self.links:
            link.open()
        tokens = sum(member.episode.num_sampled for group in groups for member in group.sampled)
        ages = [
            number - 1 - int(m.episode.turns[0].sampled.weight_versions[0]) for group in groups for m in group.sampled
        ]
        took = self.clock.now - began
        full = self.running
        rate = np.interp(min(256, full / len(self.engines)), *zip(*sorted(DECODE_S.items()), strict=True))
        return {
            "step_s": took,
            "waited_s": waited,
            "ideal_s": max(self.options.train_s, tokens * float(rate) / full),
            "driver_cpu_s": time.process_time() - cpu - (Engine.cpu_s - engine_cpu),
            "idle": 1 - (sum(engine.busy_s for engine in self.engines) - busy) / took / len(self.engines),
            "tokens": tokens,
            "length": tokens / sum(len(group.sampled) for group in groups),
            "staleness_max": max(ages),
            "staleness_mean": sum(ages) / len(ages),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("replicas", 256), ("prompts", 1024), ("n", 8), ("prompt", 200), ("mean", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--steps-per-call", type=int, default=64)
    parser.add_argument("--train-s", type=float, default=10.0, help="[s] of an update")
    parser.add_argument("--over-sample-rate", type=float, default=0.5)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--beyond", default="wait")
    simulation = Simulation(parser.parse_args())
    settle(seldom=True)  # as a run does
    total: dict[str, float] = {}
    for number in range(1, simulation.options.steps + 1):
        found = simulation.loop.run_until_complete(simulation.step(number))
        print(number, {name: round(value, 3) for name, value in found.items()}, flush=True)
        if number > 3:
            total = {name: total.get(name, 0.0) + value for name, value in found.items()}
    count = max(1, simulation.options.steps - 3)
    mean = {name: value / count for name, value in total.items()}
    print(
        f"mean of {count}: step {mean['step_s']:.1f} s, {mean['step_s'] / mean['ideal_s']:.2f} x ideal; idle "
        f"{mean['idle']:.1%}; driver {mean['driver_cpu_s'] / mean['step_s']:.2%} of a step; trained responses have "
        f"{mean['length']:.0f} tokens on average, drawn ones {simulation.mean_drawn():.0f}"
    )
    state, loader = simulation.source.ledger, simulation.loader
    under_way = len(simulation.source.under_way())
    assert state.total + under_way == loader.draws, "the ledger has lost a prompt"
    print(state.text(draws=loader.draws, waiting=under_way), flush=True)
    os._exit(0)  # thousands of coroutines are under way, and nobody wants to see them end


if __name__ == "__main__":
    main()
