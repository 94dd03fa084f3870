"""A language model as judge, behind an OpenAI-compatible endpoint, or on servers of the run: rate-limited, with typed
failures.

Requests are made by threads of the trainer's process: they only wait for the network, and one process can keep one
limit. Each request is bounded by its time limit, so no thread can hang.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_like.config.reward_execution import JudgeConfig
from verl_like.plugins.http_json import Service, ServiceError, answer_of, chat_service
from verl_like.rewards.reward_call import RewardCall, RewardOutcome

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 3.0  # a careful guess, put right by what the endpoint reports
_SHOWN_CHARS = 500
# Where the server's template would read a special token: a response must not forge turns. By look: whose model it is,
# nobody here knows
_TOKEN_START = re.compile(
    r"<(?=[|\uff5c][^<>\s]{1,40}>|[^<>\s]{1,40}[|\uff5c]>|/?s>|(?:start|end)_of_turn>)|\[(?=/?INST\])"
)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class RateLimit:
    """Limit of `limit` units in any 60 seconds. None: no limit."""

    def __init__(
        self,
        limit: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        window_s: float = 60.0,
    ) -> None:
        self._limit, self._window_s, self._now, self._sleep = limit, window_s, now, sleep
        self._used: deque[list[float]] = deque()  # [time, units], oldest first
        self._turn = threading.Lock()  # who waits first is served first

    def take(self, units: float) -> list[float] | None:
        """Wait until `units` fit, and count them. A request larger than the whole limit goes alone."""
        if self._limit is None:
            return None
        with self._turn:
            while self._used and sum(u for _, u in self._used) + units > self._limit:
                wait_s = self._used[0][0] + self._window_s - self._now()
                if wait_s > 0:
                    self._sleep(wait_s)
                self._used.popleft()
            entry = [self._now(), units]
            self._used.append(entry)
            return entry


class Judge:
    """Grades calls through the endpoint. `close` drops what has not begun.

    parse: grades an answer in a reward process (reward_model.judge.parser); None: score_pattern reads it.
    """

    def __init__(self, config: JudgeConfig, parse: Callable[[RewardCall], Future[RewardOutcome]] | None = None) -> None:
        """Read the API key and the prompt file.

        Raises ValueError if the key's environment variable is named but not set, or prompt_file cannot be read.
        """
        self._config, self._parse = config, parse
        self._template = config.prompt
        if config.prompt_file is not None:
            try:
                self._template = Path(config.prompt_file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"reward_model.judge.prompt_file={config.prompt_file}: {error}") from error
        self._services: Iterator[Service] = itertools.cycle([chat_service(config, "reward_model.judge")])
        self._ends: dict[str, Any] = {}
        self._closing = threading.Event()
        sleep = self._closing.wait  # ends at once when the judge is closed
        self._requests, self._tokens = RateLimit(config.max_rpm, sleep=sleep), RateLimit(config.max_tpm, sleep=sleep)
        self._pattern = re.compile(config.score_pattern)
        self._threads = ThreadPoolExecutor(max_workers=config.max_concurrent, thread_name_prefix="judge")

    def use_servers(self, addresses: Sequence[str], model: str, end_ids: Sequence[int] = ()) -> None:
        """Ask these servers (host:port) of the run in turn, under that model's name.

        end_ids: tokens that end its answers; of its own accord a server may know a part of them only.
        """
        self._ends = {"stop_token_ids": list(end_ids)} if end_ids else {}
        endpoints = [dataclasses.replace(self._config, url=f"http://{address}/v1") for address in addresses]
        self._config = dataclasses.replace(self._config, model=model)
        services = [chat_service(each, "reward_model.judge") for each in endpoints]
        self._services = itertools.cycle([dataclasses.replace(each, is_ours=True) for each in services])

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[RewardOutcome]]:
        """One future per call; each gets a RewardOutcome."""
        return [self._threads.submit(self._outcome, call) for call in calls]

    def close(self) -> None:
        """Drop what has not been sent. Safe to call twice."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _outcome(self, call: RewardCall) -> RewardOutcome:
        try:
            return self._grade(call)
        except Exception as error:  # what a row or an endpoint holds may be anything: the failure is the row's
            return RewardOutcome(kind="exception", message=f"the judge: {type(error).__name__}: {error}"[:_SHOWN_CHARS])

    def _grade(self, call: RewardCall) -> RewardOutcome:
        text = self.prompt(call)
        started = time.perf_counter()
        try:
            answer = self._ask(text)
        except ServiceError as error:
            return RewardOutcome(kind="service", message=str(error), seconds=time.perf_counter() - started)
        seconds = time.perf_counter() - started
        shown = answer[-_SHOWN_CHARS:]
        if self._parse is not None:
            about = {**call.extra_info, "response": call.solution_str}
            outcome = self._parse(
                dataclasses.replace(call, solution_str=answer, extra_info=about, grader=self._config.parser)
            ).result()
            seconds = time.perf_counter() - started
            return dataclasses.replace(outcome, extras={"judge": shown, **outcome.extras}, seconds=seconds)
        score = self.read_score(answer)
        if score is None:
            message = f"no score in the judge's answer {shown!r}"
            return RewardOutcome(kind="bad_value", message=message, seconds=seconds)
        return RewardOutcome(score=score, extras={"judge": shown}, seconds=seconds)

    def _ask(self, text: str) -> str:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
            **self._ends,
        }
        estimate = len(text) / _CHARS_PER_TOKEN + self._config.max_tokens
        entry: list[float] | None = None

        def take() -> None:
            """Count every try against the rate limit: an endpoint that says 429 would only be asked more often."""
            nonlocal entry
            self._requests.take(1)
            entry = self._tokens.take(estimate)
            if self._closing.is_set():
                raise ServiceError("the judge was closed")

        def read(reply: Any) -> str:
            answer, _, used = answer_of(reply)
            if entry is not None and used is not None:
                entry[1] = used
            return answer

        return next(self._services).post(body, read, before_each=take)

    def prompt(self, call: RewardCall) -> str:
        """Fill in reward_model.judge.prompt, or its file, with texts whose special tokens are broken by a space."""
        fields = {"question": call.question, "response": call.solution_str, "reference": str(call.ground_truth)}
        fields = {name: _TOKEN_START.sub(lambda start: f"{start[0]} ", text) for name, text in fields.items()}
        pattern = re.compile("|".join(re.escape("{" + name + "}") for name in fields))
        return pattern.sub(lambda found: fields[found.group()[1:-1]], self._template)

    def read_score(self, answer: str) -> float | None:
        """The last match of score_pattern over score_scale; else the last yes (1) or no (0); else None."""
        if found := self._pattern.findall(answer):
            try:
                value = float(found[-1]) / self._config.score_scale
            except (TypeError, ValueError):
                return None
            return value if math.isfinite(value) else None
        words = _WORD.findall(answer)
        return float(words[-1].lower() == "yes") if words else None
