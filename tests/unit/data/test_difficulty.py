"""data.curriculum: draws by the stated probabilities, pools by what responses say, the same in a resumed run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.observe import factory
from verl_like.batch import Prompt, PromptRow, Scores
from verl_like.config.data import CurriculumConfig
from verl_like.config.errors import RunStopped
from verl_like.data.sampler import ResumableSampler
from verl_like.plugins.samplers.difficulty import POOLS, CurriculumSampler, mixed_probability

ROWS, N = 60, 8
ROW = PromptRow(index=0, data_source="toy", messages=[], ground_truth="")


def sampler(num_rows: int = ROWS, shuffle: bool = True, **keys: Any) -> CurriculumSampler:
    return CurriculumSampler(
        CurriculumConfig(**keys), num_rows, N, shuffle=shuffle, seed=5, identity={"rows": num_rows}
    )


def tell(own: CurriculumSampler, position: int, number: int, successes: float) -> None:
    scores = factory.scores([1.0] * int(successes) + [0.0] * (N - int(successes)))
    own.judged(Prompt(ids=[1], row=ROW, group=number, position=position), scores)


@pytest.mark.parametrize(("a", "b", "n"), [(2.5, 1.5, 2), (1.5, 9.5, 8), (3.0, 3.0, 16), (40.0, 1.2, 4)])
def test_the_signal_is_that_of_all_success_rates_by_their_probability(a: float, b: float, n: int) -> None:
    rate = (np.arange(200_000) + 0.5) / 200_000
    density = rate ** (a - 1) * (1 - rate) ** (b - 1)
    mixed = 1 - rate**n - (1 - rate) ** n
    found = mixed_probability(np.array([a]), np.array([b]), n)[0]
    assert found == pytest.approx((density * mixed).sum() / density.sum(), abs=1e-6)


def likelihood(counts: np.ndarray, passes: int, chance: np.ndarray) -> float:
    """Probability, by chi-square, of draws that are farther from what these chances let expect than the counts are."""
    open_ = chance > 0
    distance = (counts - passes * chance)[open_] ** 2 / (passes * chance * (1 - chance))[open_]
    return 1 - torch.special.gammainc(torch.tensor(open_.sum() / 2), torch.tensor(distance.sum() / 2)).item()


def test_draws_have_the_stated_probabilities_and_dropped_prompts_none() -> None:
    own = sampler(revisit_epochs=None)
    for position in range(50):  # ten are never scored
        for visit in range(3):
            tell(own, position, visit, position % 9)
    _, signal, pool = own.beliefs()
    best = 1 - 2.0 ** (1 - N)
    chance = np.where(np.isin(pool, (POOLS.index("hopeless"), POOLS.index("solved"))), 0, signal / best)
    assert [POOLS[int(pool[k])] for k in (0, 1, 4, 7, 8, 55)] == [
        *("hopeless", "hard", "middling", "easy", "solved", "fresh")
    ]
    assert chance[55] == pytest.approx((1 - 2 * math.comb(16, 8) / 2**16) / best)  # of Beta(1/2, 1/2)
    counts, passes = np.zeros(ROWS), 120
    while own.epoch < passes:
        (row,), _ = own.draw(1)
        counts[row] += own.epoch < passes
    assert not counts[chance == 0].any()
    assert likelihood(counts, passes, chance) > 0.001
    assert likelihood(counts, passes, np.where(chance > 0, chance[chance > 0].mean(), 0)) < 1e-6  # were all alike


def test_solved_and_hopeless_prompts_leave_and_come_back() -> None:
    own = sampler(num_rows=4, shuffle=False, revisit_epochs=2.0, min_signal=0.3)
    tell(own, 0, 0, 0)
    tell(own, 1, 1, N)
    tell(own, 2, 2, 4)
    assert own.metrics()["curriculum/drawn/fresh"] == 1.0
    seen = [own.draw(1)[0][0] for _ in range(8)]  # 8 draws: two epochs
    assert not {0, 1} & set(seen)
    came = [own.draw(1)[0][0] for _ in range(4)]
    assert {0, 1} <= set(came)
    tell(own, 0, 9, 4)
    tell(own, 1, 10, N)
    told = own.metrics()
    assert (told["curriculum/revisits"], told["curriculum/revisits_mixed"]) == (2.0, 0.5)
    assert told["curriculum/drawn/solved"] == told["curriculum/drawn/hopeless"] == 0.5
    assert told["curriculum/pool/solved"] == 0.25 and told["curriculum/pool/hopeless"] == 0.0
    assert told["curriculum/success/observed"] == 0.75 and told["curriculum/signal/observed"] == 0.5


def test_where_all_are_dropped_the_longest_unseen_come_and_it_is_told() -> None:
    own = sampler(num_rows=4, shuffle=False, min_signal=0.3)
    for number, position in enumerate((2, 0, 3, 1)):
        tell(own, position, number, 0)
    own.metrics()
    assert own.draw(3)[0] == [2, 0, 3]
    tell(own, 2, 4, 0)
    assert own.metrics()["curriculum/early_revisits"] == 3


def test_a_pass_that_takes_too_few_is_filled_in_its_order_and_with_dropped_prompts_last() -> None:
    own = sampler(prior=[0.001, 5.0], revisit_epochs=None)  # new prompts: the dice take next to none
    order, _ = ResumableSampler(ROWS, shuffle=True, seed=5).draw(ROWS)
    for number, position in enumerate(order[:30]):
        tell(own, position, number, 4 if number % 3 == 2 else 0)
    drawn = own.draw(40)[0]
    assert [position for position in drawn if position in order[30:]] == order[30:]
    assert {*order[2:30:3]} < {*drawn}
    tell(own, order[2], 30, 4)
    assert own.metrics()["curriculum/early_revisits"] == 0
    assert [place for place in own.draw(45)[0] if place not in drawn] == [order[k] for k in (0, 1, 3, 4, 6)]


def life(own: CurriculumSampler, steps: range, states: dict[int, str]) -> list[Any]:
    """Steps of 6 prompts each, of which the last draw is given back now and then."""
    told: list[Any] = []
    for step in steps:
        rows, numbers = own.draw(6, drop_last=False)
        used = 4 if step % 3 == 1 else 6
        own.give_back(list(zip(rows, numbers, strict=True))[used:])
        for row, number in list(zip(rows, numbers, strict=True))[:used]:
            tell(own, row, number, int(np.random.default_rng([row, number]).binomial(N, row / ROWS)))
        told.append((rows, numbers, own.metrics()))
        states[step] = json.dumps(own.state_dict())
    return told


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    states: dict[int, str] = {}
    whole = life(sampler(), range(80), states)
    assert len({tuple(sorted(rows)) for rows, *_ in whole}) > 20
    for step in (0, 7, 31, 64):
        own = sampler()
        own.load_state_dict(json.loads(states[step]))
        assert life(own, range(step + 1, 80), {}) == whole[step + 1 :]
    assert max(len(set(rows)) for rows, *_ in whole) == 6 and all(len(set(rows)) == 6 for rows, *_ in whole)


def test_states_of_other_runs() -> None:
    plain = ResumableSampler(ROWS, shuffle=True, seed=5, identity={"rows": ROWS})
    plain.draw(7)
    own = sampler()
    own.load_state_dict(json.loads(json.dumps(plain.state_dict())))
    assert (own.draws, own.position) == (7, 7) and own.chances().max() < 0.62  # all are fresh
    plain.load_state_dict(json.loads(json.dumps(own.state_dict())))
    with pytest.raises(ValueError, match="the training data changed"):
        sampler(num_rows=ROWS + 1).load_state_dict(own.state_dict())


def test_what_counts_as_success() -> None:
    own, prompt = sampler(metric="acc", success_above=0.0), Prompt(ids=[1], row=ROW, group=0, position=3)
    own.judged(prompt, factory.scores([0.0, 5.0, 5.0, None], [{"acc": True}, {"acc": 0}, {}, {"acc": 1}]))
    assert own.metrics()["curriculum/success/observed"] == 0.5  # one has no acc, one no score
    own.judged(prompt, Scores.concat([factory.scores([None])] * 2))
    assert own.metrics() == {}  # nobody knows
    own.judged(prompt, factory.scores([0.0, 1.0], [{"right": 1}, {}]))
    with pytest.raises(RunStopped, match=r"data\.curriculum\.metric=acc: no response has .*returned: right\)"):
        own.metrics()
