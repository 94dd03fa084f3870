"""Lines that only run with CUDA: found by their conditions; at least 90% run here, the others are left for a reason."""

from __future__ import annotations

import ast
import time

import pytest

from tests.twin.cuda_lines import _Finder, have_run, is_cuda_only, places, reason, table
from tests.twin.inner import TIMEOUT_S, lines_of

SUITES = 5  # tests whose processes write what they ran

_CODE = """
def f(device, q):
    on_cuda = device.type == "cuda"
    stream = make() if on_cuda else None
    if device.type == "cuda" and q:
        a()
    else:
        b()
    if stream is not None:
        c()
    if q.is_cuda:
        d()
    if device.type == "cpu":
        return
    e()
"""


def test_the_finder_finds_what_a_cpu_cannot_run() -> None:
    found = _Finder("f.py", ast.parse(_CODE)).lines
    assert {_CODE.splitlines()[line - 1].strip() for line in found} == {"a()", "c()", "d()", "e()"}


@pytest.mark.parametrize(
    ("text", "only"),
    [
        ("device == 'cuda'", True),
        ("not device.type != 'cuda'", True),
        ("device == 'cuda' or x", False),
        ("torch.cuda.is_available() and x", True),
        ("name == 'cuda'", False),
    ],
)
def test_conditions(text: str, only: bool) -> None:
    assert is_cuda_only(ast.parse(text, mode="eval").body, set()) == only


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
def test_the_lines_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """After test_cuda_branches_*: with two workers of pytest the last of them may still be at it."""
    branches = [item for item in request.session.items if "test_cuda_branches_" in item.nodeid]
    if sum("tmp_path_factory" in getattr(item, "fixturenames", ()) for item in branches) < SUITES:
        pytest.skip("all of test_cuda_branches_* must run for it")
    lines = lines_of(tmp_path_factory)
    deadline = time.monotonic() + TIMEOUT_S - 10
    while len(list(lines.glob("*.done"))) < SUITES:
        assert not list(lines.glob("*.failed")), "a suite has failed"
        assert time.monotonic() < deadline, "a suite is not through"
        time.sleep(0.5)
    ran = have_run(lines)
    text, share = table(ran)
    print(text, f"\n{share:.1%} of the lines outside of Triton's kernels have run")
    unexplained = [f"{place}: {left}" for place, _, left in places(ran) if left and reason(place) is None]
    assert not unexplained, "\n".join(unexplained)
    assert share >= 0.9, f"{share:.1%} of the lines"
