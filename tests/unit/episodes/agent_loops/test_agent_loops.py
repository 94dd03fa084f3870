"""Agent loops: what a user's coroutine asks for and returns, what of it is trained on, and what goes wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.episodes.agent_loops.letters import END, Letters
from tests.unit.episodes.agent_loops.loops import Policy, agent_loops, context_of, prompt, run, said
from verl_like.episodes.answering import Member
from verl_like.episodes.ledger import conversation_metrics
from verl_like.episodes.rows import assemble_rollouts
from verl_like.plugins.verl_agents.loading import read_loops
from verl_like.plugins.verl_agents.messages import AgentLoopError
from verl_like.plugins.verl_agents.runner import AgentLoops
from verl_like.user_code import UserCodeError

SOURCE = """
    import asyncio, os, time
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

    class Base(AgentLoopBase):
        async def ask(self, ids, **sampling):
            out = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling)
            return out.token_ids

        def output(self, prompt_ids, response_ids, mask=None, **fields):
            mask = [1] * len(response_ids) if mask is None else mask
            return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask, **fields)

    class Twice(Base):
        async def run(self, sampling_params, **row):
            ids = await self.apply_chat_template(row["raw_prompt"])
            first = await self.ask(ids, **sampling_params)
            said = self.tokenizer.encode("Sure?")
            second = await self.ask([*ids, *first, *said], **sampling_params)
            return self.output(
                ids, [*first, *said, *second], [1] * len(first) + [0] * len(said) + [1] * len(second),
                reward_score=0.5, num_turns=4, extra_fields={"turn_scores": [0.25, 0.75], "truth": row["ground_truth"]},
            )

    class Plain(Base):
        async def run(self, sampling_params, **row):
            ids = await self.apply_chat_template(row["raw_prompt"])
            return self.output(ids, await self.ask(ids, **sampling_params))

    class Parallel(Base):
        async def run(self, sampling_params, **row):
            prompts = [self.tokenizer.encode(text) for text in ("one", "two", "three")]
            answers = await asyncio.gather(*(self.ask(ids) for ids in prompts))
            return [self.output(ids, answer, reward_score=k) for k, (ids, answer) in enumerate(zip(prompts, answers))]

    class Later(Base):
        async def run(self, sampling_params, **row):
            async def second():
                await asyncio.sleep(0.2)
                return await self.ask(self.tokenizer.encode("two"))

            ids = self.tokenizer.encode("one")
            answer, other = await asyncio.gather(self.ask(ids), second())
            return self.output(ids, answer, extra_fields={"other": self.tokenizer.decode(other)})

    class Forges(Base):
        async def run(self, sampling_params, **row):
            ids = self.tokenizer.encode("ask")
            answer = await self.ask(ids)
            return self.output(ids, [*answer, *self.tokenizer.encode("FORGED")])

    class Hot(Base):
        async def run(self, sampling_params, **row):
            ids = self.tokenizer.encode("ask")
            return self.output(ids, await self.ask(ids, temperature=0.3, max_tokens=4, stop=["x"], stop_token_ids=[9]))

    class Odd(Base):
        async def run(self, sampling_params, **row):
            return self.output([5], await self.ask([5], beam_width=4))

    class Wrong(Base):
        async def run(self, sampling_params, **row):
            return {"answer": 42}

    class Nothing(Base):
        async def run(self, sampling_params, **row):
            return self.output([5], self.tokenizer.encode("all my own"))

    class Raises(Base):
        async def run(self, sampling_params, **row):
            await self.ask([5])
            raise RuntimeError("no luck")

    class Exits(Base):
        async def run(self, sampling_params, **row):
            raise SystemExit(0)

    class Dies(Base):
        async def run(self, sampling_params, **row):
            await self.ask([5])
            os._exit(3)

    class Waits(Base):
        async def run(self, sampling_params, **row):
            await asyncio.Event().wait()

    class Blocks(Base):
        async def run(self, sampling_params, **row):
            time.sleep(1000)
"""
NAMES = (
    *(
        "Twice",
        "Plain",
        "Parallel",
        "Later",
        "Forges",
        "Hot",
        "Odd",
        "Wrong",
        "Nothing",
        "Raises",
        "Exits",
        "Dies",
        "Waits",
    ),
    "Blocks",
)
TARGETS = {name.lower(): f"loops.py:{name}" for name in NAMES}
LETTERS = Letters()
PAGE = Path(__file__).parents[4] / "docs" / "agent_loops.md"


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentLoops]:
    with agent_loops(tmp_path_factory.mktemp("loops"), LETTERS, TARGETS, source=SOURCE) as made:
        yield made


def policy(*says: str) -> Policy:
    return Policy(LETTERS, *says, end=END)


def test_a_loop_of_two_turns(loops: AgentLoops) -> None:
    """What is trained on is what was sampled, with its log-probs; score and fields reach the graders."""
    ask, asked = policy("43", "42"), prompt("twice", ground_truth="42")
    episode = run(loops, ask, asked)
    assert said(LETTERS, episode) == "43<|im_end|>Sure?42<|im_end|>" and episode.failure is None
    assert ask.asked == [context_of(episode.turns[:1]), context_of(episode.turns)]
    rollouts = assemble_rollouts([asked], [[episode]])
    mask_R = rollouts.response_mask_BR[0]
    assert LETTERS.decode(rollouts.response_ids_BR[0][mask_R].tolist()) == "43<|im_end|>42<|im_end|>"
    assert rollouts.rollout_log_probs_BR[0][mask_R].tolist() == [-0.5] * 3 + [-1.5] * 3
    assert rollouts.weight_version_BR[0][mask_R].unique().tolist() == [7]
    outcome = Member(asked, episode).known_outcome()
    assert outcome is not None and outcome.score == 0.5
    assert episode.info == {"num_turns": 4, "turn_scores": [0.25, 0.75], "truth": "42"}
    assert [turn.reward for turn in episode.turns] == [None, None]


def test_turns_that_read_the_same_began_in_the_same_state(loops: AgentLoops) -> None:
    one, same, other = (run(loops, policy(first, "42"), prompt("twice")) for first in ("43", "43", "41"))
    states = [[turn.state_id for turn in episode.turns] for episode in (one, same, other)]
    assert states[0] == states[1] and states[0][0] == states[2][0] and states[0][0] != states[0][1]


def test_several_requests_of_an_episode_are_with_the_policy_at_a_time(loops: AgentLoops) -> None:
    """The first answer waits for the third request. Three outputs are three rows of one episode."""
    third = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 2:
            third.set()
        await third.wait()

    ask = Policy(LETTERS, "1", "2", "3", end=END, wait=wait)
    episode = run(loops, ask, prompt("parallel"))
    assert [LETTERS.decode(context_of(row)) for row in episode.rows()] == ["one", "two", "three"]
    assert [LETTERS.decode(row[0].sampled.token_ids.tolist()) for row in episode.rows()] == [
        f"{k}<|im_end|>" for k in "123"
    ]
    assert episode.reward == 2.0  # of the last


def test_a_loop_may_ask_more_while_it_waits(loops: AgentLoops) -> None:
    """The first answer waits for the second request, which comes when the loop has been quiet for a while."""
    second = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 1:
            second.set()
        await second.wait()

    episode = run(loops, Policy(LETTERS, "1", "2", end=END, wait=wait), prompt("later"))
    assert said(LETTERS, episode) == "1<|im_end|>" and episode.info["other"] == "2<|im_end|>"


def test_what_was_not_sampled_is_not_trained_on_and_counted(loops: AgentLoops) -> None:
    episode = run(loops, policy("honest"), prompt("forges"))
    assert said(LETTERS, episode) == "honest<|im_end|>" and episode.counts["unsampled_tokens"] == len("FORGED")
    assert conversation_metrics([episode])["tools/unsampled_tokens"] == 6.0


def test_a_loop_may_sample_otherwise(loops: AgentLoops) -> None:
    ask = policy("honest")
    run(loops, ask, prompt("hot"))
    (told,) = ask.told
    assert (told.temperature, told.max_tokens, told.stop, told.stop_token_ids) == (0.3, 4, ("x",), (END, 9))


def test_rows_of_other_agents_are_not_for_loops(loops: AgentLoops) -> None:
    ask = policy("42")
    episode = run(loops, ask, prompt("single_turn_agent"))
    assert ask.asked == [[1, 2]] and len(episode.turns) == 1


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "agent_loop_exception", "RuntimeError: no luck"),
        ("exits", "agent_loop_exception", "SystemExit"),
        ("odd", "agent_loop_exception", r"sampling_params\['beam_width'\]=4 is not supported here"),
        ("wrong", "agent_loop_exception", "must return an AgentLoopOutput or a list of them, not dict"),
        ("nothing", "agent_loop_output", "no token of what the loop returned was sampled"),
        ("dies", "agent_loop_crash", "exited with status 3"),
    ],
)
def test_what_goes_wrong_loses_the_episode_and_no_other(loops: AgentLoops, name: str, kind: str, message: str) -> None:
    episode = run(loops, policy("1", "2"), prompt(name))
    assert episode.failure is not None and episode.failure.kind == kind
    assert re.search(message, episode.failure.message)
    outcome = Member(prompt(name), episode).known_outcome()
    assert outcome is not None and outcome.score is None and outcome.lost
    assert conversation_metrics([episode])["tools/lost_episodes"] == 1.0
    assert said(LETTERS, run(loops, policy("42"), prompt("plain"))) == "42<|im_end|>"


@pytest.mark.parametrize("name", ["waits", "blocks"])
def test_a_loop_that_hangs_is_given_up(tmp_path: Path, name: str) -> None:
    """One that waits is cancelled; one that blocks its process is killed with it. Another process is there then."""
    with agent_loops(tmp_path, LETTERS, TARGETS, source=SOURCE, timeout=0.5) as loops:
        episode = run(loops, policy(), prompt(name))
        assert episode.failure is not None and episode.failure.kind in ("agent_loop_timeout", "agent_loop_crash")
        assert said(LETTERS, run(loops, policy("42"), prompt("plain"))) == "42<|im_end|>"


def test_the_policys_time_is_not_the_loops(tmp_path: Path) -> None:
    """The answer takes longer than the loop may."""

    async def wait(number: int) -> None:
        await asyncio.sleep(1.0)

    with agent_loops(tmp_path, LETTERS, TARGETS, source=SOURCE, timeout=0.4, turn_rewards=True) as loops:
        episode = run(loops, Policy(LETTERS, "43", "42", end=END, wait=wait), prompt("twice"))
    assert episode.failure is None
    assert [turn.reward for turn in episode.turns] == [0.25, 0.75]  # with multi_turn.turn_rewards


def test_an_episode_that_is_given_up_asks_no_more(loops: AgentLoops) -> None:
    asked, cancelled = asyncio.Event(), list[int]()

    async def wait(number: int) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def give_up() -> None:
        task = asyncio.ensure_future(loops.run(prompt("parallel"), 0, Policy(LETTERS, *"123", end=END, wait=wait)))
        await asked.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(give_up())
    assert 0 in cancelled
    assert said(LETTERS, run(loops, policy("42"), prompt("plain"))) == "42<|im_end|>"


def test_the_loop_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/agent_loops.md, as it stands there."""
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), re.S):
        (tmp_path / block.split()[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    with agent_loops(tmp_path, LETTERS, tmp_path / "loops.yaml") as loops:
        episode = run(loops, policy("Yes.", "Yes!"))
    assert said(LETTERS, episode) == "Yes.<|im_end|>Are you sure?Yes!<|im_end|>" and episode.reward is None
    assert episode.info == {"num_turns": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: mine", r"\[0\] needs name and _target_"),
        ("mine: 1", "the file must hold a list of loops"),
        ("- {name: a, _target_: m.A}\n- {name: a, _target_: m.B}", r"\[1\]: a second loop is called a"),
        ("- {name: a, _target_: m.A, _partial_: true}", "_partial_ is not supported"),
        ("- {", "is not YAML: .*while parsing"),
    ],
)
def test_a_bad_list_of_loops_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "loops.yaml").write_text(text)
    with pytest.raises((AgentLoopError, UserCodeError), match=f"agent.agent_loop_config_path=.*loops.yaml.*{message}"):
        read_loops(str(tmp_path / "loops.yaml"))


def test_a_loop_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    source = "class NoLoop:\n    def run(self): ...\n"
    with (
        pytest.raises(AgentLoopError, match=r"\(mine\): .*:NoLoop has no `async def run`"),
        agent_loops(tmp_path, LETTERS, {"mine": "loops.py:NoLoop"}, source=source),
    ):
        pass
