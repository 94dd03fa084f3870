"""What tools may do wrong: an outcome of the call, and of nobody else's but those whose state was there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.unit.episodes.tools.rows import called, row, toolbox, write
from tests.unit.rewards.test_manager import gone
from verl_like.plugins.agents.tools.toolbox import Toolbox

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

HARMFUL = """
    import asyncio, os, subprocess, sys, time

    class Text(str): pass

    class Mute(Exception):
        def __str__(self): raise KeyError

    class Harmful:
        kept = []

        def reset(self, **row):
            self.count = 0
            if row.get("broken"): raise KeyError("no such world")

        async def act(self, what: str) -> str:
            '''Acts.

            Args:
                what: How.
            '''
            self.count += 1
            match what:
                case "count": return self.count
                case "hang": time.sleep(1000)
                case "wait": await asyncio.sleep(1000)
                case "exit": sys.exit(3)
                case "interrupt": raise KeyboardInterrupt
                case "crash": os._exit(3)
                case "long": return "x" * 1_000_000_000
                case "shout": raise ValueError("y" * 30_000_000)
                case "mute": raise Mute
                case "print":
                    while True: print("z" * 1000)
                case "stuff": print("z" * 10_000_000)
                case "leak":
                    while True: self.kept.append(bytearray(10 ** 7))
                case "late": raise TimeoutError("the server's")
                case "set": return {"a": {1}}
                case "object": return object()
                case "none": return None
                case "text": return Text("own class")
                case "surrogate": return "a" + chr(0xd800)
                case "program":
                    print("before")
                    subprocess.run("echo small; yes | head -c 30000000; yes | head -c 30000000 >&2", shell=True)
                    subprocess.run(["sh", "-c", "yes | head -c 30000000"], stdout=sys.stdout)
                case "child": return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
            return "done"

        def get_reward(self):
            if self.count > 90: return float("nan")
            return 1
"""
FUNCTIONS = """
    import os
    from verl.tools.function_tool import function_tool

    @function_tool
    def give(what: str):
        '''Gives.

        Args:
            what: What.
        '''
        if what == "crash": os._exit(3)
        if what == "four": return 1, 2, 3, 4
        if what == "reward": return "text", "high"
        if what == "infinite": return "text", float("inf")
        return 5, None, [what]
"""


def harmful(folder: Path) -> str:
    return write(folder, "harmful.py", HARMFUL) + ":Harmful"


def act(box: Toolbox, session: str, what: str) -> tuple[str | None, str]:
    outcome = called(box, session, "act", what=what)
    return outcome.kind, outcome.text


def test_what_is_raised_or_returned_costs_the_call_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with toolbox(environment_path=harmful(tmp_path), timeout=0.6) as box:
        (pid,) = box.worker_pids()
        box.begin("a", row()).result(20)
        error = "Error executing tool 'act': "
        assert act(box, "a", "count") == (None, "1")
        assert act(box, "a", "exit") == ("exception", f"{error}3")
        assert act(box, "a", "interrupt") == ("exception", f"{error}KeyboardInterrupt")
        assert act(box, "a", "late") == ("exception", f"{error}the server's")
        assert act(box, "a", "mute") == ("exception", f"{error}Mute")
        assert act(box, "a", "wait") == ("timeout", "Error executing tool: it took too long")
        assert act(box, "a", "set") == (None, "{'a': {1}}")
        assert act(box, "a", "object")[1].startswith("<object object")
        assert act(box, "a", "none") == (None, "None")
        assert act(box, "a", "text") == (None, "own class")
        assert act(box, "a", "surrogate") == (None, "a\ufffd")
        assert act(box, "a", "stuff") == (None, "done")
        assert act(box, "a", "count") == (None, "13")  # the state outlived all of that
        assert box.worker_pids() == [pid]
        assert box.end("a").result(20).reward == 1.0
        assert box.begin("b", row(broken=1)).result(20).text == "Error at the begin of the episode: 'no such world'"
        assert act(box, "b", "count")[0] == "exception"
        assert box.end("b").result(20).kind is None
    assert len(capfd.readouterr().out) < 100_000


def test_what_programs_of_tools_print_is_cut(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with toolbox(environment_path=harmful(tmp_path)) as box:
        box.begin("a", row()).result(20)
        assert act(box, "a", "program") == (None, "done")
    printed = capfd.readouterr()
    assert "before\n" in printed.out and "small\n" in printed.out
    assert len(printed.out) < 50_000 and len(printed.err) < 50_000


def test_floods_are_cut_in_the_worker(tmp_path: Path) -> None:
    with toolbox(environment_path=harmful(tmp_path), max_response_length=20, truncate_side="middle") as box:
        box.begin("a", row()).result(20)
        assert act(box, "a", "long") == (None, "x" * 10 + "...(truncated)..." + "x" * 10)
        assert act(box, "a", "shout") == ("exception", "Error exec...(truncated)...yyyyyyyyyy")
        assert act(box, "a", "count") == (None, "3")


@pytest.mark.parametrize("what", ["hang", "print", "crash"])
def test_a_worker_that_is_lost_takes_its_sessions_with_it_and_is_replaced(
    tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with toolbox(environment_path=harmful(tmp_path), timeout=0.5) as box:
        for session in "abc":
            box.begin(session, row()).result(20)
        child = int(act(box, "b", "child")[1])
        kind = {"hang": "timeout", "print": "timeout", "crash": "crash"}[what]
        assert act(box, "a", what)[0] == kind
        assert gone(child)
        assert act(box, "b", "count") == ("crash", "Error executing tool: its process failed")
        assert box.end("b").result(20).kind == "crash"  # and then it is forgotten
        box.begin("b", row()).result(20)
        assert act(box, "b", "count") == (None, "1")
        assert box.end("c").result(20).reward is None
    assert len(capfd.readouterr().out) < 100_000


def test_a_leak_is_an_outcome_and_the_worker_is_replaced(tmp_path: Path) -> None:
    with toolbox(environment_path=harmful(tmp_path), memory_limit_mb=400) as box:
        (pid,) = box.worker_pids()
        box.begin("a", row()).result(20)
        assert act(box, "a", "leak") == ("memory", "Error executing tool: it ran out of memory")
        assert gone(pid)
        box.end("a").result(20)
        box.begin("a", row()).result(20)
        assert act(box, "a", "count") == (None, "1")


def test_functions_lose_nothing_with_their_worker(tmp_path: Path) -> None:
    with toolbox(function_tool_path=write(tmp_path, "f.py", FUNCTIONS)) as box:
        box.begin("a", row()).result(20)
        assert called(box, "a", "give", what="crash").kind == "crash"
        good = called(box, "a", "give", what="x")
        assert (good.text, good.reward, good.metrics) == ("5", None, {})
        assert "not 4 values" in called(box, "a", "give", what="four").text
        assert "not 'high'" in called(box, "a", "give", what="reward").text
        assert "not inf" in called(box, "a", "give", what="infinite").text


def test_tools_that_wait_can_be_called_at_the_same_time(tmp_path: Path) -> None:
    source = """
        import asyncio
        from verl.tools.function_tool import function_tool

        @function_tool
        async def wait(seconds: float):
            '''Waits.

            Args:
                seconds: How long.
            '''
            await asyncio.sleep(seconds)
    """
    with toolbox(function_tool_path=write(tmp_path, "f.py", source), concurrency=20) as box:
        start = time.monotonic()
        waiting = [box.call("a", "wait", {"seconds": 0.5}) for _ in range(20)]
        assert all(future.result(20).kind is None for future in waiting)
        assert time.monotonic() - start < 5


def test_a_reward_that_is_no_number_is_an_outcome_of_the_end(tmp_path: Path) -> None:
    with toolbox(environment_path=harmful(tmp_path)) as box:
        box.begin("a", row()).result(20)
        futures = [box.call("a", "act", {"what": "count"}) for _ in range(91)]
        assert [future.result(20).text for future in futures] == [str(i) for i in range(1, 92)]  # in order
        end = box.end("a").result(20)
        assert end.kind == "exception" and "not nan" in end.text and end.reward is None
