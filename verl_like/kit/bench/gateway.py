"""Cost of a request over the gateway for the driver: many sessions at once, against the same tokens asked directly.

    verl-like bench gateway --sessions 200

An engine with fake time answers at once, so that nothing but the driver's own work is left: HTTP, JSON, the chat
template, tokens, routing. A client in another process talks OpenAI's protocol; each session asks, appends the answer
and a message, and asks again. The overhead is the driver's CPU time a request beyond that of the direct questions.

Then 64 sessions ask while another process sends what no client should (hostile.py): the longest time for which the
driver's event loop did nothing else, and the most memory beyond that before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from verl_like.batch import Prompt, PromptRow
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.answering import Answering, Asker, Collection, Trail
from verl_like.episodes.episode import SingleTurn
from verl_like.episodes.loop import Arrivals
from verl_like.gc_settings import settle
from verl_like.kit.bench.bars import bar
from verl_like.kit.bench.fake_time import VOCAB_SIZE, FakeTimeEngine, FakeTimeRollout
from verl_like.kit.bench.inputs import word_tokenizer
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.observe.memory import peak_bytes, reset_peak
from verl_like.plugins.agents.gateway.server import GatewayServer
from verl_like.plugins.agents.gateway.session import Rules, Session
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import LocalLink
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.rollout.router import Router

BAR_MS, BAR_STALL_S, BAR_MB = 5.0, 0.25, 200.0
_ATTACKED, _LONGER, _LOOK_S = 64, 10, 0.005  # sessions, of so many times the turns; seconds between two looks
_TOKENS, _TOTAL = 32, 1 << 16
_TEMPLATE = (
    "{% for m in messages %}t7 {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}t7 assistant {% endif %}"
)
_CLIENT = """
import asyncio, json, sys
import aiohttp

async def talk(http, url, key, turns):
    messages = [{"role": "user", "content": "t8 t9 t10 t11"}]
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        async with http.post(url, json=body, headers={"Authorization": "Bearer " + key}) as response:
            answer = await response.json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "t12 t13 t14 t15"})

async def main():
    url, keys, turns = json.loads(sys.argv[1])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(talk(http, url, key, turns) for key in keys))

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine that answers at once, and a way to ask it."""

    router: Router
    encoder: PromptEncoder

    def asker(self, number: int) -> Asker:
        sampling = SamplingParams(max_tokens=_TOKENS)
        how = Answering(runner=SingleTurn(), sampling=sampling, n=1, seed=1, purpose="gateway")
        arrivals = Arrivals(asyncio.get_running_loop())
        collection = Collection(how, self.router, cast(RewardManager, None), arrivals)  # nothing is graded
        row = PromptRow(index=number, data_source="bench/gateway", messages=[])
        return Asker(collection, Trail(Prompt(ids=[7], row=row, group=number, position=number), 0), sampling)


def main(arguments: argparse.Namespace) -> Report:
    """Ask in both ways, print the table."""
    requests = arguments.sessions * arguments.turns
    with ExitStack() as stack:
        fake = FakeTimeEngine(max_num_seqs=1024, length_of=lambda request: _TOKENS, steps_per_call=_TOKENS)
        engine = FakeTimeRollout(fake)
        stack.callback(engine.shutdown)
        stack.enter_context(engine.opened())
        link = LocalLink("replica 0", engine, interval_s=0.002)
        router = stack.enter_context(closing(Router([link], max_running_requests=None)))
        stack.callback(link.close)
        bench = Bench(router, PromptEncoder(word_tokenizer(VOCAB_SIZE), {}, _TEMPLATE))
        direct = _cpu(_direct(bench, arguments.sessions, arguments.turns))
        through = _cpu(_through(bench, arguments.sessions, arguments.turns))
        stack.callback(settle(seldom=True))  # as a run does
        found: dict[str, Any] = {}
        asyncio.run(_through(bench, _ATTACKED, _LONGER * arguments.turns, partial(_attack, found, arguments.hostile_s)))
    rows = [
        Row(name="asked directly", seconds=direct[1]),
        Row(name="over the gateway", seconds=through[1], floor_seconds=direct[1]),
    ]
    each, plain = (1000 * cpu / requests for cpu, _ in (through, direct))
    notes = [
        f"{requests} requests of {arguments.sessions} sessions at once. The driver took {each:.2f} ms of CPU a request "
        f"over the gateway, {plain:.2f} directly.",
        bar("overhead of a request [ms]", each - plain, BAR_MS),
        f"{len(found['hostile'])} kinds of hostile requests beside {_ATTACKED} sessions: every request of the sessions "
        "was answered, the others were refused or cut.",
        bar("longest stall of the driver's loop [s]", found["stall_s"], BAR_STALL_S),
        bar("memory above idle [MB]", found["above_idle_mb"], BAR_MB),
    ]
    work = {"sessions": arguments.sessions, "turns": arguments.turns, "tokens": _TOKENS}
    report = Report(bench="gateway", work=work, rows=rows, figures={"overhead_ms": each - plain, **found}, notes=notes)
    return finish(report, arguments.json, arguments.compare)


def _cpu(work: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Seconds of CPU of this process, and by the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(work)
    return time.process_time() - cpu, time.perf_counter() - wall


async def _direct(bench: Bench, sessions: int, turns: int) -> None:
    async def talk(number: int) -> None:
        ask, context = bench.asker(number), bench.encoder.encode_text("t8 t9 t10 t11")
        observed = bench.encoder.encode_text("t12 t13 t14 t15")
        for _ in range(turns):
            context = [*context, *(await ask(context)).sampled.token_ids.tolist(), *observed]

    await asyncio.gather(*map(talk, range(sessions)))


async def _through(bench: Bench, sessions: int, turns: int, beside: Callable[[str, str], Any] | None = None) -> None:
    plain = Rules(
        encoder=bench.encoder, parser=parser_of("hermes"), end_ids=frozenset(), response=_TOKENS, total=_TOTAL
    )
    with closing(GatewayServer()) as server:
        await server.start()
        opened = [Session(plain, bench.asker(10_000 + number)) for number in range(sessions)]
        keys = [server.open(session) for session in opened]
        other = (
            asyncio.ensure_future(beside(server.url, server.open(Session(plain, bench.asker(1))))) if beside else None
        )
        told = json.dumps([f"{server.url}/v1/chat/completions", keys, turns])
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", _CLIENT, told)
        if await client.wait() != 0:
            raise RuntimeError(f"the client ended with {client.returncode}")
        for session, key in zip(opened, keys, strict=True):
            server.end(key)
            sampled = sum(len(turn.sampled) for turn in session.turns())
            if sampled != turns * _TOKENS or session.counts["new_rows"]:
                raise RuntimeError(f"a session has {sampled} tokens in {session.counts['new_rows'] + 1} rows")
        if other is not None:
            await other


async def _attack(found: dict[str, Any], wait_s: float, url: str, key: str) -> None:
    """Send what is hostile; found: stall_s, the longest of this loop, above_idle_mb of memory, the kinds' statuses."""
    cpu, stall_s = torch.device("cpu"), 0.0
    idle = reset_peak(cpu) or 0
    place = json.dumps(["127.0.0.1", int(url.rpartition(":")[2]), key, wait_s])
    command = (sys.executable, "-m", "verl_like.kit.bench.hostile", place)
    attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told = asyncio.ensure_future(attacker.communicate())
    while not told.done():
        begun = time.perf_counter()
        await asyncio.sleep(_LOOK_S)
        stall_s = max(stall_s, time.perf_counter() - begun - _LOOK_S)
    kinds = json.loads(told.result()[0])
    found |= {"stall_s": stall_s, "above_idle_mb": ((peak_bytes(cpu) or 0) - idle) / 1e6, "hostile": kinds}
    if any(200 <= status < 300 or status >= 500 for statuses in kinds.values() for status in statuses):
        raise RuntimeError(f"a hostile request was not refused: {kinds}")
