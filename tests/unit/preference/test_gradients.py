"""Losses and gradients through the engine, packed and cut anywhere, against plain float64 models row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import RULE, gradients, my_rows
from verl_like.config import PPOConfig, TrainerConfig
from verl_like.config.preference import PreferenceConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo
from verl_like.plugins.preference.losses import LOSSES, Measured, carried, distance, imitation, measured, referenced
from verl_like.plugins.preference.pairs import Carried, Item, Pairs, pairs_of
from verl_like.plugins.sft.turns import Row

NUM, SEED = 5, 7


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"), pad_token_id=0)


def items(kto: bool) -> list[Item]:
    """Random answers of other lengths to prompts of other lengths; some have two turns, one has two rows."""
    draw = np.random.default_rng(SEED)
    prompts = [draw.integers(1, tiny.VOCAB, 2 + place) for place in range(NUM)]

    def row(place: int, length: int, two_turns: bool = False) -> Row:
        ids = np.concatenate([prompts[place], draw.integers(1, tiny.VOCAB, length)]).astype(np.int32)
        trained = np.arange(len(ids)) >= len(prompts[place])
        return Row(ids=ids, trained=trained & ~(two_turns & (np.arange(len(ids)) == len(ids) - 3)))

    found = []
    for place in range(NUM):
        answers = [[row(place, 3 + place)], [row(place, 9 - place, True)]]
        if place == 2 and not kto:
            answers[0].append(row(place, 5))
        good = (True, False)
        if kto:
            answers, good = answers[place % 2 :][:1], (place % 2 == 0,)
        unrelated = [[row(place, 4)] for _ in answers] if kto else ()
        found.append(Item(answers=answers, good=good, unrelated=unrelated, margin=place / 4))
    return found


def log_prob(model: Any, answer: Any) -> tuple[Tensor, int]:
    """Of an answer, and its number of tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in answer:
        ids = torch.from_numpy(row.ids).long()
        of_each = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total, count = total + of_each[torch.from_numpy(row.trained[1:])].sum(), count + int(row.trained[1:].sum())
    return total, count


def plain(c: PreferenceConfig, data: list[Item], policy: Any, reference: Any) -> Tensor:
    """The papers' formulas, an answer at a time."""

    def of(answer: Any) -> tuple[Tensor, Tensor, int]:
        (ours, count), theirs = log_prob(policy, answer), torch.zeros((), dtype=torch.float64)
        if referenced(c):
            with torch.no_grad():
                theirs = log_prob(reference, answer)[0]
        return ours, theirs, count

    if c.loss == "kto":
        apart = [ours - theirs for item in data for ours, theirs, _ in map(of, item.unrelated)]
        kl = torch.stack(apart).mean().clamp(min=0).detach()
        terms = []
        for item in data:
            for answer, good in zip(item.answers, item.good, strict=True):
                ours, theirs, _ = of(answer)
                weight, sign = (c.desirable_weight, 1) if good else (c.undesirable_weight, -1)
                terms.append(weight * (1 - torch.sigmoid(sign * c.beta * (ours - theirs - kl))))
        return torch.stack(terms).mean()
    terms, imitated = [], []
    for item in data:
        (w, w_ref, w_count), (r, r_ref, r_count) = map(of, item.answers)
        margin, smooth = c.margin + item.margin, c.label_smoothing
        if c.loss == "dpo":
            h = c.beta * ((w - w_ref) - (r - r_ref)) - margin
            terms.append(-(1 - smooth) * logsigmoid(h) - smooth * logsigmoid(-h))
        elif c.loss == "ipo":
            terms.append(((w - w_ref) / w_count - (r - r_ref) / r_count - 1 / (2 * c.beta)) ** 2)
        elif c.loss == "simpo":
            h = c.beta * (w / w_count - r / r_count) - margin
            terms.append(-(1 - smooth) * logsigmoid(h) - smooth * logsigmoid(-h))
        else:
            odds = [mean.exp() / (1 - mean.exp()) for mean in (w / w_count, r / r_count)]
            terms.append(-c.beta * torch.sigmoid((odds[0] / odds[1]).log()).log())
        whole = [Row(ids=row.ids, trained=row.trained | imitation(c)[1]) for row in item.answers[0]]
        imitated.append(log_prob(policy, whole))
    loss = torch.stack(terms).mean()
    if coef := imitation(c)[0]:
        loss = loss - coef * torch.stack([value for value, _ in imitated]).sum() / sum(count for _, count in imitated)
    return loss


def by_engine(c: PreferenceConfig, data: list[Item], policy: FSDPEngine, reference: FSDPEngine) -> Any:
    """Loss and gradient as a step has them: rows shuffled, micro-batches of 24 tokens, pairs torn apart."""
    objective = Carried(PPOConfig(trainer=TrainerConfig(objective="preference"), preference=c))
    (want,) = objective.wants
    options: dict[str, Any] = {"whole": imitation(c)[1], "scored": c.loss == "reward"}

    def said(engine: FSDPEngine, rows: Pairs) -> Tensor:
        return engine.forward(rows, want=objective.wants, rule=RULE)[want]

    known, numbers = None, list(range(len(data)))
    if referenced(c):
        rows = pairs_of(data, numbers, None, **options)
        known = Measured.of(rows, said(reference, rows)).policy_IS
    rows = pairs_of(data, numbers, known, **options)
    rows = rows.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)))
    learnt, metrics = carried(c, rows, said(policy, rows))
    return metrics, gradients(policy, learnt, learnt, loss=objective)


CASES = [
    PreferenceConfig(loss="dpo", label_smoothing=0.1, margin=0.3),
    PreferenceConfig(loss="dpo", reference_free=True, sft_loss_coef=0.5),
    PreferenceConfig(loss="ipo", beta=0.2),
    PreferenceConfig(loss="kto", desirable_weight=1.3, undesirable_weight=0.7),
    PreferenceConfig(loss="orpo", beta=0.3),
    PreferenceConfig(loss="orpo", sft_prompt=False, sft_loss_coef=2.0),
    PreferenceConfig(loss="simpo", beta=2.0, margin=0.5, label_smoothing=0.1),
]


def same(ours: dict[str, Tensor], model: Any) -> None:
    theirs = {name: each.grad for name, each in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    mine, yours = (torch.cat([side[name].double().flatten() for name in ours]) for side in (ours, theirs))
    gap = float((mine - yours).norm() / yours.norm())
    assert gap <= 5e-6, f"{gap:.1e}"  # 2e-6 is the rounding of float32 models


@pytest.mark.parametrize("c", CASES, ids=lambda c: f"{c.loss} {imitation(c)}")
def test_losses_equal_plain_models(process: ProcessInfo, path: str, tmp_path: Path, c: PreferenceConfig) -> None:
    engines = [tiny.build_engine(process, path, seed=seed, tokenizer_size=None) for seed in (3, 4)]
    models: list[Any] = []
    for engine in engines:
        engine.export_hf(str(tmp_path / str(len(models))))
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(len(models)), dtype=torch.float64))
    data = items(c.loss == "kto")
    metrics, found = by_engine(c, data, *engines)
    loss = plain(c, data, *models)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert set(metrics) == set(measured(c))
    same(found, models[0])


@pytest.mark.parametrize(("ratios", "point"), [((1.0, 0.5), 0.75), ((1.0, -1.5), 0.0)])
def test_ktos_reference_point_is_a_mean_that_is_not_below_0(ratios: tuple[float, float], point: float) -> None:
    zeros, yes = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.bool)
    given = {
        "reference_IS": zeros,
        "length_IS": zeros + 1,
        "good_IS": yes,
        "margin_I": zeros[:, 0],
        "imitated_I2": zeros,
    }
    said = Measured(policy_IS=zeros + torch.tensor(ratios)[:, None], unrelated_IS=yes, **given)
    assert distance(said).item() == pytest.approx(point)


@pytest.mark.parametrize("mean", [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0)])
def test_odds_of_an_answer_that_float32_takes_for_certain_are_finite(mean: tuple[float, float]) -> None:
    policy_IS = torch.tensor([mean], dtype=torch.float64, requires_grad=True)
    ones, no = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.bool)
    given = {"reference_IS": 0 * ones, "length_IS": ones, "margin_I": 0 * ones[:, 0], "imitated_I2": ones}
    said = Measured(policy_IS=policy_IS, good_IS=~no, unrelated_IS=no, **given)
    loss, _ = LOSSES["orpo"](PreferenceConfig(loss="orpo"), said)
    loss.backward()
    assert loss.isfinite() and policy_IS.grad is not None and policy_IS.grad.isfinite().all()


def test_a_reward_model_equals_a_plain_one(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """And what is written is read by transformers."""
    c = PreferenceConfig(loss="reward", margin=0.2, center_coef=0.05)
    engine = tiny.build_engine(process, path, kind="value")
    engine.export_hf(str(tmp_path))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    metrics, found = by_engine(c, data := items(False), engine, engine)
    terms = []
    for item in data:
        w, r = (model(torch.from_numpy(answer[-1].ids).long()[None]).logits[0, 0] for answer in item.answers)
        terms.append(-logsigmoid(w - r - c.margin - item.margin) + c.center_coef * (w + r) ** 2)
    loss = torch.stack(terms).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    same(found, model)


def of_share(process: ProcessInfo, path: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient where each rank has every second row: of a pair it has one."""
    c, data = PreferenceConfig(reference_free=True), items(False)
    objective = Carried(PPOConfig(trainer=TrainerConfig(objective="preference"), preference=c))
    rows, policy = pairs_of(data, list(range(NUM)), None, whole=False, scored=False), tiny.build_engine(process, path)
    said_T = policy.forward(rows, want=objective.wants, rule=RULE)["log_probs"]
    learnt, metrics = carried(c, rows, said_T)
    return metrics["loss"], gradients(policy, my_rows(process, learnt, "even"), learnt, loss=objective)


def test_two_ranks_equal_one(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    loss, one = of_share(process, path)
    for other, found in tiny.spawn_ranks(2, of_share, tmp_path, path):
        assert other == pytest.approx(loss, rel=1e-6)
        tiny.assert_same(found, one)
