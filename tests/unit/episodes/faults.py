"""What tools, environments, engines and graders may do wrong: each by a real process, on demand of the model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.unit.episodes.test_tool_agent import END, TOKENIZER
from tests.unit.episodes.tools.rows import write
from verl_like.batch import Prompt, PromptRow
from verl_like.config import CustomRewardFunctionConfig, DataConfig, OutcomesConfig, PPOConfig, RewardModelConfig
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.episodes.outcomes import Policies
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.agents.tools.tool_call import ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import Occupancy, RolloutClient
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled, SamplingParams

T = TypeVar("T")
EPISODE_TIMEOUT_S = 1.0

FUNCTIONS = """
    import asyncio, os, signal, subprocess, sys, time
    from verl.tools.function_tool import function_tool
    from verl_like.plugins.agents.tools.tool_call import ToolUnavailable

    @function_tool
    async def act(what: str):
        '''Acts.

        Args:
            what: How.
        '''
        match what:
            case "raise": raise KeyError("no such key")
            case "shout": raise ValueError("y" * 30_000_000)
            case "exit": sys.exit(3)
            case "hang": time.sleep(1000)
            case "wait": await asyncio.sleep(1000)
            case "die": os._exit(3)
            case "kill": os.kill(os.getpid(), signal.SIGSEGV)
            case "leak":
                kept = []
                while True: kept.append(bytearray(10 ** 8))
            case "long": return "x" * 300_000_000
            case "print":
                while True: print("z" * 1000)
            case "program": subprocess.run("yes | head -c 30000000", shell=True)
            case "four": return 1, 2, 3, 4
            case "infinite": return "text", float("inf")
            case "sleep": await asyncio.sleep(0.6)
            case "unavailable": raise ToolUnavailable("the data base is down")
            case "once":
                path = os.path.join(os.path.dirname(__file__), "once")
                if not os.path.exists(path):
                    open(path, "w").close()
                    os._exit(3)
        return "done"
"""
NATIVE = """
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    class Native(BaseTool):
        async def create(self, instance_id=None, what="", **kwargs):
            if what == "create": raise RuntimeError("no place left")
            self.what = what
            return "1", ToolResponse()

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text="done"), None, {}

        async def calc_reward(self, instance_id, **kwargs):
            if self.what == "calc_reward": raise RuntimeError("no reward")
            return 1.0
"""
WORLD = """
    import os, time

    class World:
        def reset(self, ground_truth, **row):
            self.what = ground_truth
            match self.what:
                case "reset raises": raise RuntimeError("no world")
                case "reset hangs": time.sleep(1000)
                case "reset floods": return "x" * 5000

        def step(self, what: str) -> str:
            '''Steps.

            Args:
                what: How.
            '''
            if what == "die": os._exit(3)
            return "done"

        def get_reward(self):
            match self.what:
                case "reward raises": raise RuntimeError("no score")
                case "reward is nan": return float("nan")
                case "reward hangs": time.sleep(1000)
                case "reward dies": os._exit(3)
            return 1.0
"""
GRADER = """
    import os, sys, time

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        match ground_truth:
            case "raise": raise KeyError("no such key")
            case "exit": sys.exit(3)
            case "hang": time.sleep(1000)
            case "die": os._exit(3)
            case "nan": return float("nan")
            case "text": return "good"
            case "nothing": return None
            case "wrong": return 0.0
            case "leak":
                kept = []
                while True: kept.append(bytearray(10 ** 8))
        return 1.0
"""


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """told: what happens, for the table. says: the model's turns. where: which tools are there."""

    told: str
    says: tuple[str, ...] = ("Done.",)
    where: str = "tools"
    ground_truth: str = "right"
    tools_kwargs: dict[str, Any] | None = None
    policies: dict[str, Any] | None = None


def _act(what: str, told: str, **fields: Any) -> Fault:
    return Fault(told=f"a tool {told}", says=(called("act", what=what), "Done."), **fields)


def _mcp(what: str, told: str) -> Fault:
    return Fault(told=f"an MCP server {told}", says=(called("act", what=what), "Done."), where="mcp")


def _world(what: str, told: str, *says: str) -> Fault:
    return Fault(told=told, says=(*says, "Done."), where="world", ground_truth=what)


def _grader(what: str, told: str) -> Fault:
    return Fault(told=f"the grader {told}", ground_truth=what, where="grading")


FAULTS = (
    _act("raise", "raises an exception"),
    _act("shout", "raises one with a message of 30 MB"),
    _act("exit", "calls `sys.exit`"),
    _act("four", "returns what is no result"),
    _act("infinite", "returns an infinite reward"),
    _act("long", "returns 300 MB of text"),
    _act("program", "starts a program that prints 30 MB"),
    _act("wait", "awaits for ever", where="hanging"),
    _act("hang", "blocks for ever", where="hanging"),
    _act("print", "prints for ever", where="hanging"),
    _act("die", "ends its process"),
    _act("kill", "is killed by a signal"),
    _act("leak", "needs more memory than there is"),
    _act("unavailable", "raises `ToolUnavailable`"),
    Fault(told="an HTTP service says 404", says=(called("missing", q="x"), "Done.")),
    Fault(told="an HTTP service says 500", says=(called("broken", q="x"), "Done.")),
    Fault(told="an HTTP service is not there", says=(called("absent", q="x"), "Done.")),
    _mcp("raise", "says that its tool failed"),
    _mcp("die", "ends in a call"),
    _mcp("hang", "does not answer"),
    Fault(told="`create` of a tool raises", tools_kwargs={"note": {"create_kwargs": {"what": "create"}}}),
    Fault(told="`calc_reward` of a tool raises", tools_kwargs={"note": {"create_kwargs": {"what": "calc_reward"}}}),
    _world("reset raises", "`reset` raises"),
    _world("reset hangs", "`reset` hangs"),
    _world("reset floods", "`reset` says more than a prompt may have"),
    _world("right", "a method of the environment ends the process", called("step", what="die")),
    _world("reward raises", "`get_reward` raises"),
    _world("reward is nan", "`get_reward` gives NaN"),
    _world("reward hangs", "`get_reward` hangs"),
    _world("reward dies", "`get_reward` ends the process"),
    Fault(told="the model calls a tool that there is not", says=(called("fly"), "Done.")),
    Fault(told="the model leaves an argument out", says=(called("act"), "Done.")),
    Fault(told="the model writes a call that cannot be read", says=("<tool_call>{</tool_call>", "Done.")),
    Fault(told="the model calls tools without end", says=(called("act", what="ok"),) * 3, ground_truth="wrong"),
    Fault(told="the engine gives the request up", says=("aborted",)),
    Fault(
        told="the episode takes longer than `episode_timeout`",
        says=("never",),
        policies={"episode_timeout": EPISODE_TIMEOUT_S},
    ),
    _grader("raise", "raises an exception"),
    _grader("exit", "calls `sys.exit`"),
    _grader("hang", "hangs"),
    _grader("die", "ends its process"),
    _grader("leak", "needs more memory than there is"),
    _grader("nan", "gives NaN"),
    _grader("text", "gives text"),
    _grader("nothing", "gives nothing"),
)


class Model:
    """A client that says what the prompts' faults want; and replicas. clock: of the time in which replicas serve."""

    def __init__(self) -> None:
        self.says: dict[int, Sequence[str]] = {}
        self.asked: list[GenerationRequest] = []
        self.clock: Callable[[], float] = time.monotonic
        self._silent: dict[str, Future[Completion]] = {}

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        self.asked.append(request)
        future: Future[Completion] = Future()
        says = self.says[int(request.request_id.split("-")[1])]
        text = says[request.turn] if request.turn < len(says) else says[-1]
        if text == "never":
            self._silent[request.request_id] = future
            return future
        ids = [*TOKENIZER.encode(text), END][: request.sampling.max_tokens]
        reason = "abort" if text == "aborted" else "stop"
        sampled = Sampled.of(ids, [-0.5] * len(ids), 0)
        future.set_result(Completion(request_id=request.request_id, sampled=sampled, finish_reason=reason))
        return future

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for name in list(self._silent) if request_ids is None else request_ids:
            if (future := self._silent.pop(name, None)) is not None:
                sampled = Sampled.of([], [], 0)
                future.set_result(Completion(request_id=name, sampled=sampled, finish_reason="abort"))

    def serving_s(self) -> float:
        return self.clock()

    def snapshot(self) -> dict[str, Sampled]:
        return {}

    def occupancy(self) -> Occupancy:
        return Occupancy(1, 0, int(not self._silent), len(self._silent))

    def close(self) -> None:
        pass

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        return work(self).result(60)


@dataclass(kw_only=True)
class Bench:
    """One collector over a scripted model, with tools and graders in processes of their own."""

    model: Model
    collector: Collector
    rewards: RewardManager
    toolbox: Toolbox
    how: Answering
    prompts: list[Prompt]
    group: int = 0

    def step(self, *faults: Fault, n: int = 1, **policies: Any) -> Any:
        """One batch: these prompts, and one whose answer is right at once. (rollouts, scores, metrics) of it."""
        rows = [_row(fault) for fault in faults] + [_row(Fault(told="good"), agent="single_turn_agent")]
        says = [*(fault.says for fault in faults), ("Done.",)]
        self.prompts[:] = []
        for row, turns in zip(rows, says, strict=True):
            self.model.says[self.group] = turns
            ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(row.messages, add_generation_prompt=True))
            self.prompts.append(Prompt(ids=ids, row=row, group=self.group, position=0))
            self.group += 1
        settings = {key: value for fault in faults for key, value in (fault.policies or {}).items()} | policies
        made = Policies.from_config(OutcomesConfig(**settings), max_failure_fraction=0.5)
        self.collector.how = replace(self.how, policies=made, n=n)
        self.collector.config.data.train_batch_size = len(self.prompts)
        rollouts, pending = self.collector.next_batch(1)
        scores = pending.result()
        metrics = self.collector.metrics() | self.rewards.metrics(scores)
        return rollouts, scores, metrics


def _row(fault: Fault, agent: str = "tool_agent") -> PromptRow:
    extra = {} if fault.tools_kwargs is None else {"tools_kwargs": fault.tools_kwargs}
    messages = [{"role": "user", "content": "Act!"}]
    truth = {"ground_truth": fault.ground_truth, "extra_info": extra, "agent": agent}
    return PromptRow(index=0, data_source="x", messages=messages, **truth)


@contextmanager
def bench(folder: Path, spec: dict[str, Any], *, environment: bool = False) -> Iterator[Bench]:
    with ExitStack() as stack:
        limits = {"timeout": 20.0, "max_response_length": 60}
        toolbox = stack.enter_context(closing(Toolbox(ToolSpec(**limits | spec), num_workers=1)))
        grading = {"path": write(folder, "grader.py", GRADER), "timeout": 6, "memory_limit_mb": 600}
        settings = CustomRewardFunctionConfig(**grading)
        rewards = RewardManager(settings, RewardModelConfig(), DataConfig(), TOKENIZER)  # type: ignore[arg-type]
        stack.enter_context(rewards)
        agent = ToolAgent(
            PromptEncoder(TOKENIZER, {}),  # type: ignore[arg-type]
            toolbox,
            parser_of("hermes"),
            Bounds(prompt=400, response=1000, turns=3),
            end_ids=(END,),
            follow_template=False,
            environment=environment,
        )
        sampling = SamplingParams(max_tokens=1000)
        how = Answering(runner=agent, sampling=sampling, n=1, seed=1, purpose="train", tool_usage=toolbox.take_usage)
        prompts: list[Prompt] = []
        facts = {"draws": 0, "steps_per_epoch": 1, "learns": False, "give_back": lambda unused: None}
        loader, model = SimpleNamespace(draw=lambda count: list(prompts), **facts), Model()
        collector = Collector(loader, rewards, model, how, PPOConfig())  # type: ignore[arg-type]
        stack.callback(collector.close)
        yield Bench(model=model, collector=collector, rewards=rewards, toolbox=toolbox, how=how, prompts=prompts)


def service_tools(folder: Path, addresses: dict[str, str]) -> str:
    """A file of tools: one that asks each of these addresses, and one of verl's form."""
    schema = "{name: %s, description: x, parameters: {type: object, properties: {%s: {type: string}}, required: [%s]}}"
    entries = [
        f"{{class_name: http, config: {{url: '{url}', max_retries: 1, retry_delay: 0.01}}, "
        f"tool_schema: {{type: function, function: {schema % (name, 'q', 'q')}}}}}"
        for name, url in addresses.items()
    ]
    write(folder, "native_of_faults.py", NATIVE)
    native = f"{folder}/native_of_faults.py:Native"
    function = "{name: note, description: x, parameters: {type: object, properties: {}, required: []}}"
    entries.append(f"{{class_name: '{native}', config: {{}}, tool_schema: {{type: function, function: {function}}}}}")
    return write(folder, "tools.yaml", "tools:\n" + "".join(f"  - {entry}\n" for entry in entries))


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    """All at once: faults are mostly waiting. The first error is raised."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
