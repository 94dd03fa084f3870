"""Conversations with a slow tool: what a batch of them takes, beside the longest one alone.

    verl-like bench agents                                   # simulated: no model, no waiting
    verl-like bench agents --engine vllm --model cpu         # a real engine with random weights, real tool processes

Nothing in the sampling side may wait for a whole batch: while one episode's tool works, the engine works on others.
Simulated, every decode step takes the same time and the replicas have places for all episodes, so that the batch should
take as long as its longest chain. On a real engine it should take as long as that, or as the engine needs for the same
tokens without tools, whichever is longer.

Turns, parsing, templates, routing and tool calls are those of training; lengths are drawn, and every turn calls the
tool, whatever the random model writes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import random
import selectors
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from verl_like.batch import Prompt, PromptRow
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.answering import Answering, Asker, Collection, Trail
from verl_like.episodes.episode import Ask, Episode, EpisodeRunner, Turn
from verl_like.episodes.loop import Arrivals
from verl_like.kit.bench.bars import bar
from verl_like.kit.bench.fake_time import VOCAB_SIZE, FakeTimeEngine, SimulatedLink, VirtualClock
from verl_like.kit.bench.inputs import word_tokenizer
from verl_like.kit.bench.phase import POLICY, Job, build_job, measure_on_ranks
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.kit.bench.rollout import random_weights
from verl_like.kit.bench.shapes import MODELS, Workload
from verl_like.parallel.dist import ProcessInfo
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.call import Parsed, ToolCall
from verl_like.plugins.agents.tools.tool_call import ToolOutcome, ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import LocalLink, RolloutClient
from verl_like.rollout.rollout_engine import Completion, SamplingParams
from verl_like.rollout.router import Router
from verl_like.workers.rollout import rollout_engine

FAKE_BAR, REAL_BAR = 1.3, 1.25
_PROMPT_TOKENS, _DECODE_S, _PREFILL_S = 16, 0.01, 2e-5
_OBSERVED = "t3 t4 t5 t6 t7 t8 t9 t10"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} <eos> {% endfor %}"
_CALLS_IN_ONE_WORKER, _WORKERS = 128, 4

_TOOL = '''import asyncio

from verl.tools.function_tool import function_tool


@function_tool
async def wait() -> str:
    """Answer after a while."""
    await asyncio.sleep({seconds})
    return "{observed}"
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Episodes to play.

    lengths: tokens of each turn of each episode; every turn but the last is followed by a tool call.
    tool_s: seconds that a tool call takes.
    """

    lengths: tuple[tuple[int, ...], ...]
    tool_s: float

    @classmethod
    def drawn(cls, episodes: int, turns: int, mean_tokens: int, tool_s: float) -> Work:
        """Lengths log-normal with this mean (standard deviation of their logarithm: 0.5)."""
        source, centre = random.Random(1), math.log(mean_tokens) - 0.125
        lengths = [[max(1, round(source.lognormvariate(centre, 0.5))) for _ in range(turns)] for _ in range(episodes)]
        return cls(lengths=tuple(map(tuple, lengths)), tool_s=tool_s)

    @property
    def longest(self) -> int:
        """The episode with the most tokens."""
        return max(range(len(self.lengths)), key=lambda number: sum(self.lengths[number]))

    @property
    def max_length(self) -> int:
        """Tokens of the longest context, tool text included."""
        turns = len(self.lengths[0])
        return _PROMPT_TOKENS + sum(self.lengths[self.longest]) + turns * (len(_OBSERVED.split()) + 4)


def main(arguments: argparse.Namespace) -> Report:
    """Play the episodes, print the table."""
    work = Work.drawn(arguments.episodes, arguments.turns, arguments.tokens, arguments.tool_ms / 1000)
    play = _simulated if arguments.engine == "fake" else _measured
    return finish(play(arguments, work), arguments.json, arguments.compare)


def _simulated(arguments: argparse.Namespace, work: Work) -> Report:
    began = time.process_time()
    seconds = simulate(work, range(len(work.lengths)), arguments.replicas)
    cpu = time.process_time() - began
    alone = simulate(work, [work.longest], arguments.replicas)
    turns = sum(map(len, work.lengths))
    rows = [Row(name="the longest alone", seconds=alone), Row(name="all", seconds=seconds, floor_seconds=alone)]
    notes = [
        f"Simulated seconds: {arguments.replicas} replicas, {1000 * _DECODE_S:g} ms a decode step at any load. The "
        f"driver itself took {1000 * cpu / turns:.2f} ms of CPU a turn.",
        bar("all by the longest chain", seconds / alone, FAKE_BAR),
    ]
    figures = {"driver_ms_a_turn": 1000 * cpu / turns, "to_longest_chain": seconds / alone}
    return Report(bench="agents", work=_work(arguments), rows=rows, figures=figures, notes=notes)


def _measured(arguments: argparse.Namespace, work: Work) -> Report:
    load = Workload(
        num_prompts=len(work.lengths), responses_per_prompt=1, prompt_length=_PROMPT_TOKENS,
        mean_response=None, max_response=work.max_length - _PROMPT_TOKENS,
    )  # fmt: skip
    keys = [f"{POLICY}.rollout.name={arguments.engine}", f"{POLICY}.rollout.ignore_eos=True", *arguments.overrides]
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(Path(folder), MODELS[arguments.model], load, keys, ranks=1)
        given, (found,) = measure_on_ranks("agents", measure, arguments, job, work, **_work(arguments))
    alone, plain, seconds = (median(column) for column in zip(*found[1:], strict=True))
    floor = max(alone, plain)
    ratio = median(row[2] / max(row[:2]) for row in found[1:])
    rows = [
        Row(name="the longest alone", seconds=alone),
        Row(name="the same tokens without tools", seconds=plain),
        Row(name="all", seconds=seconds, floor_seconds=floor),
    ]
    notes = [
        f"Medians of {len(found) - 1} rounds, after one that warms up; {sum(map(sum, work.lengths)):,} sampled tokens; "
        f"{_WORKERS} tool processes with {_CALLS_IN_ONE_WORKER} calls at a time.",
        bar("all by the longer of both", ratio, REAL_BAR),
    ]
    return Report(bench="agents", work=given, rows=rows, figures={"to_floor": ratio}, notes=notes)


def _work(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("engine", "episodes", "turns", "tokens", "tool_ms", "replicas")
    return {name: getattr(arguments, name) for name in names}


def simulate(work: Work, episodes: Sequence[int], num_replicas: int) -> float:
    """Seconds by the simulation's clock until these episodes have ended."""
    clock = VirtualClock()
    places = -(-len(work.lengths) // num_replicas)
    engines = [
        FakeTimeEngine(
            max_num_seqs=places, decode_s={1: _DECODE_S}, prefill_s=_PREFILL_S, length_of=lambda r: 2**20,
        )
        for _ in range(num_replicas)
    ]  # fmt: skip
    links = [SimulatedLink(f"replica {i}", engine, clock) for i, engine in enumerate(engines)]
    router = Router(links, max_running_requests=None)
    encoder = _encoder(VOCAB_SIZE)
    loop = asyncio.SelectorEventLoop(_ClockSelector(clock))
    toolbox = cast(Toolbox, _TimedToolbox(clock, work.tool_s))
    try:
        loop.run_until_complete(play(work, episodes, _agent(work, encoder, toolbox), encoder, router, "simulated"))
        return clock.now
    finally:
        router.close()
        loop.close()


def measure(
    process: ProcessInfo, run_id: str, job: Job, work: Work, num_rounds: int
) -> list[tuple[float, float, float]]:
    """Seconds of each round: the longest alone, all without tools, all with them."""
    engine = rollout_engine(job.spec, process, run_id)
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        engine.load_weights(random_weights(job, engine.dtype, process.device), 0)
        stack.enter_context(engine.opened())
        link = LocalLink("replica 0", engine, interval_s=0.002)
        router = stack.enter_context(closing(Router([link], max_running_requests=None)))
        stack.callback(link.close)
        encoder = _encoder(job.spec.tokenizer_size)
        with_tools = _agent(work, encoder, stack.enter_context(closing(_tool_processes(work.tool_s, stack))))
        every, rounds = range(len(work.lengths)), []

        def seconds(episodes: Sequence[int], runner: EpisodeRunner, name: str) -> float:
            began = time.perf_counter()
            asyncio.run(play(work, episodes, runner, encoder, router, name))
            return time.perf_counter() - began

        for number in range(num_rounds + 1):  # other prompts each time: nothing is cached from before
            alone = seconds([work.longest], with_tools, f"alone-{number}")
            plain = seconds(every, _WithoutTools(work, encoder), f"plain-{number}")
            rounds.append((alone, plain, seconds(every, with_tools, f"all-{number}")))
        return rounds


async def play(
    work: Work, episodes: Sequence[int], runner: EpisodeRunner, encoder: PromptEncoder, client: RolloutClient, name: str
) -> None:
    """Run these episodes at once. Raises RuntimeError where one does not have the turns that it should have."""
    sampling = SamplingParams(max_tokens=work.max_length)
    how = Answering(runner=runner, sampling=sampling, n=1, seed=1, purpose=name)
    arrivals = Arrivals(asyncio.get_running_loop())
    collection = Collection(how, client, cast(RewardManager, None), arrivals)  # nothing is graded

    async def run(number: int) -> Episode:
        prompt = _prompt(encoder, number, name)
        ask = Asker(collection, Trail(prompt, 0), sampling)
        return await runner.run(prompt, 0, _Timed(ask, work.lengths[number]))

    ended = await asyncio.gather(*map(run, episodes))
    for number, episode in zip(episodes, ended, strict=True):
        lengths = tuple(len(turn.sampled) for turn in episode.turns)
        if lengths != work.lengths[number] or episode.failure:
            raise RuntimeError(f"episode {number} has turns of {lengths}, not {work.lengths[number]}: {episode}")


def _prompt(encoder: PromptEncoder, number: int, name: str) -> Prompt:
    source, vocabulary = random.Random(f"{name}-{number}"), len(encoder.tokenizer)
    text = " ".join(f"t{source.randrange(3, vocabulary)}" for _ in range(_PROMPT_TOKENS - 1))
    row = PromptRow(index=number, data_source="bench/agents", messages=[{"role": "user", "content": text}])
    return Prompt(ids=encoder.encode([(row.messages, None)])[0], row=row, group=number, position=number)


def _encoder(vocab_size: int) -> PromptEncoder:
    return PromptEncoder(word_tokenizer(vocab_size), {}, _TEMPLATE)


def _agent(work: Work, encoder: PromptEncoder, toolbox: Toolbox) -> ToolAgent:
    bounds = Bounds(prompt=_PROMPT_TOKENS, response=work.max_length, turns=len(work.lengths[0]))
    return ToolAgent(encoder, toolbox, _EveryTurnCalls(), bounds, end_ids=(), follow_template=False)


def _tool_processes(tool_s: float, stack: ExitStack) -> Toolbox:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "wait.py").write_text(_TOOL.format(seconds=tool_s, observed=_OBSERVED))
    spec = ToolSpec(function_tool_path=str(folder / "wait.py"), concurrency=_CALLS_IN_ONE_WORKER)
    return Toolbox(spec, num_workers=_WORKERS)


class _EveryTurnCalls:
    """A parser for which every response asks for the tool once."""

    def parse(self, text: str) -> Parsed:
        return Parsed(content=text, calls=(ToolCall(name="wait", arguments={}),))


@dataclass(slots=True)
class _Timed:
    """Replacement of `Ask` whose turns have the drawn lengths, and end as if by themselves."""

    ask: Ask
    lengths: Sequence[int]
    turn: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return self.ask.sampling

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Any = None,
    ) -> Completion:
        wanted = self.lengths[self.turn]
        self.turn += 1
        completion = await self.ask(context_ids, sampling, max_tokens=wanted, media=media)
        return dataclasses.replace(completion, finish_reason="stop")


@dataclass(slots=True)
class _WithoutTools:
    """The runner of the floor: the same requests, with no template, parser or tool between them."""

    work: Work
    encoder: PromptEncoder

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        context, turns = prompt.ids, []
        observed = self.encoder.encode_text(f" <eos> {_OBSERVED} <eos> ")
        for _ in self.work.lengths[prompt.group]:
            completion = await ask(context)
            turns.append(Turn.of(observed, completion))
            context = [*context, *completion.sampled.token_ids.tolist(), *observed]
        return Episode(turns=tuple(turns))


class _TimedToolbox:
    """A Toolbox with one tool, which answers when the clock says so."""

    acts = False

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def begin(self, session: str, row: PromptRow) -> Future[ToolOutcome]:
        return self._answer("", 0.0)

    def has_user(self, row: PromptRow) -> bool:
        return False

    def call(self, session: str, name: str, arguments: dict[str, Any]) -> Future[ToolOutcome]:
        return self._answer(_OBSERVED, self._seconds)

    def end(self, session: str, label: str = "") -> Future[ToolOutcome]:
        return self._answer("", 0.0)

    def _answer(self, text: str, seconds: float) -> Future[ToolOutcome]:
        future: Future[ToolOutcome] = Future()
        self._clock.at(self._clock.now + seconds, lambda: future.set_result(ToolOutcome(text=text)))
        return future


class _ClockSelector(selectors.DefaultSelector):
    """Selector for an event loop on a VirtualClock's time: where it would wait, the clock's next event happens."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None and not self._clock.step():
            raise RuntimeError("the episodes wait, and nothing is left to happen")
        return super().select(0)
