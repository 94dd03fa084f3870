"""What the order in which groups are taken costs: steps of a simulated fleet, without a model and without waiting.

    python -m benchmarks.scheduler --extra 0 8 16 32

Responses have lengths as of long reasoning (log-normal, median 200 tokens, one in a hundred above 2,000); decoding
takes what it takes a model of 1.5B parameters on a large GPU (kit/bench/fake_time.py). Rows: plain steps; additional
prompts (rollout.scheduler.additional_prompts); more responses than are kept (rollout.n_redundant); dynamic sampling
where half of the groups have a signal, in whole draws and in flight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean

from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits, Selection
from verl_like.kit.bench.fake_time import FakeTimeEngine, SimulatedLink, VirtualClock, long_tailed
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.kit.verbs.bench import files, positive
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams, request_seed
from verl_like.rollout.router import Router

_SAMPLING = SamplingParams(max_tokens=16_384)
_PROMPT = [1] * 200


def main(words: list[str] | None = None) -> Report:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=positive, default=64, help="of a step")
    parser.add_argument("--n", type=positive, default=8, help="responses to each")
    parser.add_argument("--replicas", type=positive, default=8)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--extra", type=int, nargs="+", default=[0, 8, 16, 32, 64], help="additional prompts")
    parser.add_argument("--redundant", type=positive, nargs="+", default=[1, 2, 4], help="rollout.n_redundant")
    files(parser)
    arguments = parser.parse_args(words)
    fleet = {"num_prompts": arguments.prompts, "n": arguments.n, "num_replicas": arguments.replicas}
    wanted, steps = arguments.prompts, arguments.steps
    rows = []
    for extra in arguments.extra:
        limits = Limits(wanted=wanted, in_flight=wanted + extra, most=wanted * 4, extra=extra)
        for aborted in ("wait", "drop") if extra else ("wait",):
            name = f"{extra} additional, aborted: {aborted}" if extra else "plain"
            rows.append(Fleet(**fleet, aborted=aborted).run(name, limits, CompletionOrder, steps))
    plain = Limits(wanted=wanted, in_flight=wanted, most=wanted * 4)
    for redundant in arguments.redundant:
        rows.append(Fleet(**fleet, redundant=redundant).run(f"{redundant} redundant", plain, CompletionOrder, steps))
    half = Limits(wanted=wanted, in_flight=wanted, most=wanted * 50)
    for name, in_draws in (("dynamic, in whole draws", True), ("dynamic, in flight", False)):
        rows.append(Fleet(**fleet, signal=0.5).run(name, half, DrawOrder, steps, in_draws=in_draws))
    notes = [
        "Simulated seconds of a step's sampling. used: mean length in the batch; written: of all that was begun, had "
        "nobody aborted it. begun: prompts. Dynamic sampling: half of the groups have a signal, gen_batch_size = "
        "train_batch_size."
    ]
    work = {**fleet, "steps": steps, "extra": arguments.extra, "redundant": arguments.redundant}
    return finish(Report(bench="scheduler", work=work, rows=rows, notes=notes), arguments.json, arguments.compare)


@dataclass(kw_only=True)
class Fleet:
    """Replicas that sample groups of n responses, the first to end of n + redundant. signal: share of groups that are
    kept. aborted: as the key says."""

    num_prompts: int
    n: int
    num_replicas: int
    signal: float = 1.0
    aborted: str = "wait"
    redundant: int = 0
    waiting: list[int] = field(default_factory=list)  # prompts that the step before aborted
    drawn: int = 0

    def run(
        self, name: str, limits: Limits, kind: Callable[[Limits], Selection], steps: int, *, in_draws: bool = False
    ) -> Row:
        """The mean over some steps, one after the other."""
        found = [self.step(kind(limits), in_draws) for _ in range(steps)]
        seconds, used, written, started = (fmean(each) for each in zip(*found, strict=True))
        figures = {
            "used_tokens": used,
            "written_tokens": written,
            "used_by_written": used / written,
            "started": started,
        }
        return Row(name=name, seconds=seconds, figures=figures)

    def step(self, selection: Selection, in_draws: bool) -> tuple[float, float, float, float]:
        """Seconds, mean length used, mean length of all that was begun, prompts begun."""
        clock = VirtualClock()
        links = [SimulatedLink(f"{i}", FakeTimeEngine(max_model_len=2**20), clock) for i in range(self.num_replicas)]
        router = Router(links, max_running_requests=None)
        overdue, left, begun, full = set(self.waiting), dict[int, int](), list[int](), 0.0
        used: dict[int, list[int]] = {}  # group -> lengths of the responses that it keeps

        def start(count: int) -> None:
            for _ in range(count):
                group = self.waiting.pop(0) if self.waiting else self.drawn
                self.drawn = max(self.drawn, group + 1)
                selection.begin(group, overdue=group in overdue)
                begun.append(group)
                left[group], used[group] = self.n, []
                for sample in range(self.n + self.redundant):
                    router.submit(self.request(group, sample)).add_done_callback(lambda done, g=group: ended(g, done))

        def ended(group: int, done: Future[Completion]) -> None:
            nonlocal full
            if not left[group]:
                return
            left[group] -= 1
            used[group].append(len(done.result().sampled))
            if left[group]:
                return
            router.abort([self.request(group, sample).request_id for sample in range(self.n + self.redundant)])
            if selection.complete():
                return
            selection.end(group, kept=request_seed(0, group) % 1000 < 1000 * self.signal)
            if selection.complete():
                full = clock.now
            elif not in_draws:
                start(selection.admits())
            elif not any(left.values()):
                start(self.num_prompts)

        start(self.num_prompts if in_draws else selection.admits())
        while not full:
            clock.run(clock.now + 1.0)
        chosen = selection.chosen()
        if self.aborted == "wait":
            self.waiting += sorted(set(begun) - {*chosen, *selection.dropped()})
        return full, fmean(fmean(used[group]) for group in chosen), fmean(map(self.length, begun)), len(begun)

    @staticmethod
    def request(group: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{group}-{sample}",
            prompt_ids=_PROMPT,
            sampling=_SAMPLING,
            seed=request_seed(1, group, sample),
            session=str(group),
        )

    def length(self, group: int) -> float:
        """Mean over the group's responses, as they end by themselves."""
        most = _SAMPLING.max_tokens
        samples = range(self.n + self.redundant)
        return fmean(min(most, long_tailed(self.request(group, sample))) for sample in samples)


if __name__ == "__main__":
    main()
