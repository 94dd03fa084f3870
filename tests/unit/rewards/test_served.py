"""A reward model on servers of the run: who asks it, what its answers count, and what becomes of one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from tests.unit.rewards.test_judge import Endpoint
from verl_like.batch import RewardFailure
from verl_like.config import CustomRewardFunctionConfig, DataConfig, JudgeConfig, RewardModelConfig
from verl_like.config.reward import RewardRolloutConfig
from verl_like.rewards import served as served_module
from verl_like.rewards.grading import Answer, ServedModel
from verl_like.rewards.manager import RewardManager

pytestmark = pytest.mark.timeout(60)

# verl's way: an OpenAI-compatible request to the address that it is told. Its own errors count 0, as many users write.
ASKING = """
import json, urllib.request

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_path):
    body = {"model": reward_model_path, "messages": [{"role": "user", "content": solution_str}]}
    url = f"http://{reward_router_address}/v1/chat/completions"
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
    except OSError:
        return 0.0
    return {"score": float(text), "asked": reward_router_address}
"""
PARSER = """
def stars(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    if "?" in solution_str:
        return None
    return {"score": scale * solution_str.count("*"), "length": len(extra_info["response"])}
"""


class Healthy(Endpoint):
    """An endpoint that also says that it is there."""

    def __init__(self) -> None:
        super().__init__()

        def health(handler: object) -> None:
            handler.send_response(200)  # pyright: ignore[reportAttributeAccessIssue]
            handler.end_headers()  # pyright: ignore[reportAttributeAccessIssue]

        self.RequestHandlerClass = type("Handler", (self.RequestHandlerClass,), {"do_GET": health})  # pyright: ignore


@pytest.fixture
def endpoints() -> Iterator[list[Healthy]]:
    made = [Healthy(), Healthy()]
    for each in made:
        threading.Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    for each in made:
        each.shutdown()
        each.server_close()


def served(endpoints: list[Healthy]) -> ServedModel:
    places = [(each.url.split("/")[2], f"server {number}") for number, each in enumerate(endpoints)]
    return ServedModel(path="/models/judge", places=places, lost=ConnectionError)


def manager(custom: str | None = None, judge: JudgeConfig | None = None, **settings: object) -> RewardManager:
    reward = RewardModelConfig(
        enable=True,
        model_type="generative",
        rollout=RewardRolloutConfig(name="vllm"),
        judge=judge or JudgeConfig(retry_delay=0.01, max_retries=1),
        **settings,  # pyright: ignore[reportArgumentType]
    )
    reward.model.path = "/models/judge"
    return RewardManager(CustomRewardFunctionConfig(path=custom), reward, DataConfig(), CharTokenizer())


def test_a_function_is_told_where_the_model_is(endpoints: list[Healthy], tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    for number, each in enumerate(endpoints):
        each.answer = lambda prompt, number=number: str(number + len(prompt))
    with manager(str(tmp_path / "asking.py")) as rewards:
        rewards.use_servers(served(endpoints))
        scores = rewards.score(make_rollouts(["a", "bb", "ccc", "dddd"]), step=1)
    assert scores.score_B.tolist() == [1, 3, 3, 5]  # the servers take turns
    assert {extras["asked"] for extras in scores.extras} == set(served(endpoints).addresses)
    assert [body["model"] for each in endpoints for body in each.bodies] == ["/models/judge"] * 4


def test_without_a_function_the_judge_asks_and_a_parser_reads(endpoints: list[Healthy], tmp_path: Path) -> None:
    (tmp_path / "parser.py").write_text(PARSER)
    (tmp_path / "prompt.txt").write_text("stars for {response}?")
    judge = JudgeConfig(prompt_file=str(tmp_path / "prompt.txt"), parser=f"{tmp_path / 'parser.py'}:stars")
    for each in endpoints:
        each.answer = lambda prompt: {"stars for ab?": "**", "stars for c?": "?"}[prompt]
    with manager(judge=judge, rule_kwargs={judge.parser: {"scale": 0.5}}) as rewards:
        rewards.use_servers(served(endpoints))
        rewards.check_rows([("unknown source", "rule")])
        scores = rewards.score(make_rollouts(["ab", "c"]), step=1)
    assert scores.score_B[0] == 1.0 and scores.extras[0] == {"judge": "**", "length": 2}
    failure = scores.failures[1]
    assert not scores.valid_B[1] and failure is not None and failure.kind == "bad_value"
    assert {body["model"] for each in endpoints for body in each.bodies} == {"/models/judge"}


def test_a_server_that_is_gone_is_named_and_no_zero_is_used(endpoints: list[Healthy], tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    for each in endpoints:
        each.answer = lambda prompt: "1"
    with manager(str(tmp_path / "asking.py")) as rewards:
        rewards.use_servers(served(endpoints))
        assert rewards.score(make_rollouts(["a"] * 4), step=1).score_B.tolist() == [1] * 4
        endpoints[1].shutdown()
        endpoints[1].server_close()
        with pytest.raises(ConnectionError, match=r"^server 1 does not answer; what was graded since may be wrong"):
            rewards.score(make_rollouts(["a"] * 4), step=2)


def test_groups_that_are_judged_one_by_one_ask_no_server_for_its_health(
    endpoints: list[Healthy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dynamic sampling, in the event loop of the episodes: once for all groups of a batch."""
    asked, there = [], [True]
    monkeypatch.setattr(served_module, "answers", lambda url, seconds: asked.append(url) or there[0])
    for name in ("http_proxy", "HTTP_PROXY"):  # no way to a server of the run
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for each in endpoints:
        each.answer = lambda prompt: "Score: 8"
    with manager() as rewards:
        rewards.use_servers(served(endpoints))
        for _ in range(3):
            answers = [Answer(row=row, prompt_ids=[1], response_ids=[97]) for row in make_rollouts(["a", "b"]).rows]
            graded = rewards.grade(answers)
            scores = rewards.gather(graded, step=1, may_all_fail=True, quiet=True).result()
        assert asked == [] and scores.valid_B.all()
        rewards.report(scores, graded, step=1)
        assert len(asked) == 2
        there[0] = False
        with pytest.raises(ConnectionError, match=r"^server 0 does not answer"):
            rewards.report(scores, graded, step=1)
        with pytest.raises(ConnectionError, match=r"^server 0 does not answer"):  # a function may give 0 for it
            rewards.require_any([scores], step=1)
        failures = [RewardFailure(row=row, data_source="", kind="service", message="") for row in range(2)]
        lost = scores.replace(valid_B=~scores.valid_B, failures=failures)
        with pytest.raises(ConnectionError, match=r"^server 0 does not answer"):  # not: no reward could be computed
            rewards.require_any([lost], step=1)


def test_what_is_wrong_with_prompt_and_parser_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward_model.judge.prompt_file=/nowhere: .*No such file"):
        manager(judge=JudgeConfig(prompt_file="/nowhere"))
    with pytest.raises(ValueError, match=r"reward_model.judge.parser=starz: there is no such grader"):
        manager(judge=JudgeConfig(parser="starz"))
    (tmp_path / "parser.py").write_text("def stars(text): return 1")
    with pytest.raises(ValueError, match=r"reward_model.judge.parser=.*stars"):
        manager(judge=JudgeConfig(parser=f"{tmp_path / 'parser.py'}:stars"))
