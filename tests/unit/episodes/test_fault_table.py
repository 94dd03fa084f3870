"""docs/outcomes.md has a table of faults: what happened, what was trained on, what was counted. Here each is done."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes.faults import FAULTS, FUNCTIONS, WORLD, Bench, Fault, bench, in_threads, service_tools
from tests.unit.episodes.test_tool_agent import TOKENIZER
from tests.unit.episodes.tools.rows import write
from tests.unit.episodes.tools.services import MCP_SERVER, http_service
from verl_like.algorithms.experience import make_experience
from verl_like.batch import Evaluated
from verl_like.config import ActorConfig, AlgorithmConfig
from verl_like.config.outcomes import GRADED, LOST

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]
PAGE = Path(__file__).parents[3] / "docs" / "outcomes.md"
COUNTS = re.compile(
    r"outcomes/(?!lost)\w+$|tools/(failed|malformed)_calls|tools/out_of_turns|tool/.*/(errors|timeouts)|reward/failures/"
)
HEAD = ("what happens", "outcome", "trained on", "counts that rise")


@contextmanager
def benches(folder: Path) -> Iterator[dict[str, Bench]]:
    for name in ("tools", "hanging", "grading", "world", "mcp"):
        (folder / name).mkdir()
    server = write(folder, "server.py", MCP_SERVER)
    mcp = f"tools: [{{class_name: mcp, config: {{command: {sys.executable}, args: [{server}], timeout: 6}}}}]"
    made = {}
    with http_service((404, "no such thing")) as (missing, _), http_service((500, "broken")) as (broken, _):
        with http_service((200, "")) as (absent, _):
            pass
        addresses = {"missing": missing, "broken": broken, "absent": absent}
        specs: dict[str, dict[str, Any]] = {
            "tools": {
                "function_tool_path": write(folder / "tools", "f.py", FUNCTIONS),
                "tool_config_path": service_tools(folder / "tools", addresses),
                "memory_limit_mb": 900,
            },
            "hanging": {"function_tool_path": write(folder / "hanging", "f.py", FUNCTIONS), "timeout": 0.4},
            "world": {"environment_path": write(folder / "world", "w.py", WORLD) + ":World", "timeout": 2.0},
            "grading": {"function_tool_path": write(folder / "grading", "f.py", FUNCTIONS)},
            "mcp": {"tool_config_path": write(folder / "mcp", "t.yaml", mcp)},
        }
        with ExitStack() as stack:
            for name, spec in specs.items():
                made[name] = stack.enter_context(bench(folder / name, spec, environment=name == "world"))
            yield made


def observed(made: Bench, fault: Fault) -> tuple[str, str, str]:
    """Outcome, what is trained on, and what was counted."""
    rollouts, scores, metrics = made.step(fault)
    group = made.prompts[0].group
    counted = {name: value for name, value in metrics.items() if COUNTS.match(name) and value}
    counted["outcomes/solved"] -= 1  # of the good one beside it
    (outcome,) = [name for name in (*GRADED, *LOST) if counted.get(f"outcomes/{name}")]
    evaluated = Evaluated(response_length_B=rollouts.response_length_B)
    algorithm, actor = AlgorithmConfig(adv_estimator="reinforce"), ActorConfig()
    experience, _ = make_experience(algorithm, actor, rollouts, scores, evaluated, 0.0)
    own_B = experience.group_B == group
    columns = zip(experience.response_ids_BR[own_B], experience.response_mask_BR[own_B], strict=True)
    trained = [TOKENIZER.decode(ids[mask].tolist(), skip_special_tokens=True) for ids, mask in columns]
    score = float(scores.score_B[rollouts.group_B == group][0])
    if not "".join(trained):
        assert outcome in LOST and score != score, "a lost episode has no score"
        what = "nothing"
    else:
        (written,) = trained
        num_turns = len(fault.says)
        assert written == "".join(fault.says), "exactly what the model wrote"
        what = f"{'its turn' if num_turns == 1 else f'its {num_turns} turns'}, score {score:g}"
    return outcome, what, ", ".join(f"`{name}`" for name, value in sorted(counted.items()) if value)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, ...]]:
    rows: dict[str, tuple[str, ...]] = {}

    def run(made: Bench, faults: list[Fault]) -> None:
        for fault in faults:
            rows[fault.told] = (fault.told, *observed(made, fault))

    with benches(tmp_path_factory.mktemp("faults")) as made:
        in_threads([partial(run, each, [f for f in FAULTS if f.where == where]) for where, each in made.items()])
    return [rows[fault.told] for fault in FAULTS]


def test_the_table_in_the_docs_is_what_happens(table: list[tuple[str, ...]]) -> None:
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *table)]
    start = PAGE.read_text().partition("## Faults\n")[2]
    found = [line for line in start.splitlines() if line.startswith("|")]
    assert found == lines, "docs/outcomes.md, Faults, should have:\n" + "\n".join(lines)


def test_every_outcome_is_in_the_table_and_none_that_is_lost_is_trained_on(table: list[tuple[str, ...]]) -> None:
    assert len(table) >= 20
    assert {outcome for _, outcome, _, _ in table} >= {*LOST, "solved", "truncated"}
    assert all((trained == "nothing") == (outcome in LOST) for _, outcome, trained, _ in table)
