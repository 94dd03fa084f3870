"""Router replay in the training engine: routes noted by one pass are those of the next, wherever a token goes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, assert_same, build_engine, denominators, experience
from tests.unit.models import zoo
from tests.unit.models.test_routes import KINDS, formula
from verl_like.batch import Experience
from verl_like.config.actor import ReplayMode, RouterConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import LOG_PROBS
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.models.routes import ROUTES, unknown
from verl_like.parallel.dist import ProcessInfo

X = unknown(torch.uint8)
CUT = MicroBatchRule(max_tokens=24)
R2: dict[str, Any] = {"replay": ReplayMode.R2}
BATCH = experience(8, rows_per_prompt=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return zoo.folder(tmp_path_factory.mktemp("models"), "qwen3_moe")


def noted(engine: FSDPEngine, batch: Experience, rule: MicroBatchRule = CUT) -> Experience:
    """The rows with the routes of a pass over them."""
    routes_T = engine.forward(batch, want=frozenset({LOG_PROBS, ROUTES}), rule=rule)[ROUTES]
    return batch.replace(routes_T=routes_T, routed_length_B=batch.num_tokens_B())


def moved(engine: FSDPEngine) -> FSDPEngine:
    """The engine with routers of the opposite taste: most routes are other ones now."""
    for name, parameter in engine.model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data.neg_()
    return engine


class Seen:
    """Choices as they reach the experts of each layer: in forward, and again where it is recomputed."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.calls: list[list[Tensor]] = []
        experts = [part for part in engine.model.modules() if hasattr(part, "gate_up_proj")]
        for part in experts:
            self.calls.append([])
            part.register_forward_pre_hook(partial(self._note, self.calls[-1]))

    def _note(self, calls: list[Tensor], _: Any, given: tuple[Tensor, ...]) -> None:
        calls.append(given[1].clone())


def test_routes_reach_the_experts_in_forward_and_recomputation(process: ProcessInfo, path: str) -> None:
    """One micro-batch, unshared: position by position those that were noted; a row's last token is not there."""
    engine = build_engine(process, path, model={"enable_gradient_checkpointing": True, "share_prompts": False}, **R2)
    rows = noted(engine, BATCH, tiny.ONE_BATCH)
    assert rows.routes_T is not None and rows.routes_T.dtype == torch.uint8
    assert rows.routes_T.nbytes <= 2 * 2 * int(BATCH.num_tokens_B().sum())
    seen = Seen(moved(engine))
    gradients = minibatch_gradients(engine, rows, PolicyLoss(), denominators(rows), rule=tiny.ONE_BATCH)
    order = torch.sort(rows.num_tokens_B() - 1, stable=True).indices.tolist()  # rows are packed shortest first
    each = rows.routes_T.split(rows.num_tokens_B().tolist())
    assert all(bool((row[-1] == X).all()) and int(row[:-1].max()) < 8 for row in each)
    wanted = torch.cat([each[row][:-1] for row in order]).long()
    for layer, calls in enumerate(seen.calls):
        assert len(calls) == 2 and all(torch.equal(call, wanted[:, layer]) for call in calls)
    assert all(float(g.abs().max()) > 0 for name, g in gradients.items() if "gate.weight" in name)
    seen.calls[0].clear()
    minibatch_gradients(engine, rows.with_routes(None), PolicyLoss(), denominators(rows), rule=tiny.ONE_BATCH)
    assert float((seen.calls[0][0].sort(-1).values != wanted[:, 0].sort(-1).values).any(-1).float().mean()) > 0.3


@pytest.mark.parametrize(("name", "packed"), [("qwen3_moe", False), ("deepseek_v3", True), ("gpt_oss", True)])
def test_gradients_are_those_of_routes_gathered_from_all_scores(
    process: ProcessInfo, tmp_path: Path, name: str, packed: bool
) -> None:
    """Of transformers' model, each row alone, whose routers are written out; however rows are cut, with shared prompts
    and without."""
    engine = build_engine(process, zoo.folder(tmp_path, name), model={"use_remove_padding": packed}, **R2)
    rows = noted(engine, BATCH)
    assert torch.equal(noted(engine, BATCH, tiny.ONE_BATCH).routes_T, rows.routes_T)  # type: ignore[arg-type]
    moved(engine).export_hf(str(tmp_path / "full"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32, attn_implementation="eager")
    expected = written_out(model, rows, KINDS[name])
    for rule in (tiny.ONE_BATCH, CUT):
        found = minibatch_gradients(engine, rows, PolicyLoss(), denominators(rows), rule=rule)
        assert_same(found, {key: expected[key] for key in found}, 5e-5)
    live = minibatch_gradients(engine, rows.with_routes(None), PolicyLoss(), denominators(rows), rule=CUT)
    with pytest.raises(AssertionError, match="relative difference"):
        assert_same(live, {key: expected[key] for key in live}, 1e-2)


def test_the_base_below_adapters_chooses_its_own_routes(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """KL(policy with replayed routes || base with its own), by transformers' model: an adapter begins as nothing."""
    model = {"lora_rank": 4, "lora_alpha": 8, "exclude_modules": ["experts", "gate"]}
    engine, rows = build_engine(process, path, model=model, **R2), experience(4)
    routes_T = (torch.arange(int(rows.num_tokens_B().sum()) * 4).view(-1, 2, 2) % 8).to(torch.uint8)
    rows = rows.replace(routes_T=routes_T, routed_length_B=rows.num_tokens_B())
    found = engine.forward(rows, want=frozenset({"full_kl"}), rule=CUT)["full_kl"]
    engine.export_hf(str(tmp_path / "base"))
    base, policy = (AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32) for _ in range(2))
    expected = []
    for row, routes in zip(rows.split([1] * len(rows)), routes_T.split(rows.num_tokens_B().tolist()), strict=True):
        replay(policy, routes, KINDS["qwen3_moe"])
        log_p, log_q = log_probs_of(policy, row).detach(), log_probs_of(base, row).detach()
        expected.append((log_p.exp() * (log_p - log_q)).sum(-1))
    torch.testing.assert_close(found, torch.cat(expected) * rows.response_mask_T, rtol=1e-4, atol=1e-6)
    assert float(found.max()) > 1e-3


def written_out(model: Any, rows: Experience, kind: str) -> dict[str, Tensor]:
    total = torch.zeros(())
    assert rows.routes_T is not None and rows.routed_length_B is not None
    each = rows.routes_T.split(rows.routed_length_B.tolist())
    for row, routes in zip(rows.split([1] * len(rows)), each, strict=True):
        replay(model, routes, kind)
        logits = log_probs_of(model, row)
        chosen = logits.gather(1, row.response_ids_T.long()[:, None])[:, 0]
        entropy = -(logits.exp() * logits).sum(-1)
        terms = -row.advantages_T * chosen - 0.1 * entropy
        total = total + (terms * row.response_mask_T).sum() / denominators(rows).num_tokens
    total.backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}


def replay(model: Any, routes: Tensor, kind: str) -> None:
    """Let the routers of transformers' model choose these experts, for the tokens of one row."""
    routers = [part for part in model.modules() if type(part).__name__.lower().endswith("topkrouter")]
    for layer, router in enumerate(routers):
        router.forward = partial(replayed, kind, router, routes[:-1, layer].long())


def log_probs_of(model: Any, row: Experience) -> Tensor:
    ids = torch.cat([row.prompt_ids_T, row.response_ids_T]).long()[None]
    return model(input_ids=ids[:, :-1]).logits[0, int(row.prompt_length_B) - 1 :, : tiny.VOCAB].log_softmax(-1)


def replayed(kind: str, router: Any, chosen: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = formula(kind, router, hidden.reshape(-1, hidden.shape[-1]), chosen)
    return weights, weights, chosen


def test_a_step_tells_how_many_choices_changed(process: ProcessInfo, path: str) -> None:
    """Share of tokens and layers with another set; the same weights choose the same, and losses of routers see what is
    replayed."""
    recorded: dict[str, Any] = {"routes_sampled": True}
    for settings, replaces in ((R2, True), (recorded, False)):
        engine = build_engine(process, path, router=RouterConfig(balance_loss_coef=0.1), **settings)
        rows = noted(engine, BATCH)
        options: Any = {"loss_fn": PolicyLoss(), "denominators": denominators(rows), "rule": CUT}
        assert engine.train_minibatch(rows, **options)["router/differing_share"].value == 0
        other = rows.replace(routes_T=torch.where(rows.routes_T == X, X, (rows.routes_T + 3) % 8).to(torch.uint8))  # type: ignore[operator]
        seen = Seen(engine)
        share = engine.train_minibatch(other, **options)["router/differing_share"]
        assert share.value > 0.5 and share.weight == 2 * int((rows.num_tokens_B() - 1).sum())
        counts = torch.bincount(torch.cat(seen.calls[0]).flatten(), minlength=8)
        given = torch.bincount(other.routes_T[:, 0].flatten().long(), minlength=8)[:8]  # type: ignore[index]
        assert torch.equal(counts, 2 * given) == replaces  # the balance loss counts in a pass of its own
        assert "router/differing_share" not in engine.train_minibatch(rows.with_routes(None), **options)


def test_layers_that_are_computed_again_count_once(process: ProcessInfo, path: str) -> None:
    engine = build_engine(process, path, model={"enable_gradient_checkpointing": True, "share_prompts": False}, **R2)
    rows = noted(engine, BATCH)
    options: Any = {"loss_fn": PolicyLoss(), "denominators": denominators(rows), "rule": CUT}
    share = engine.train_minibatch(rows, **options)["router/differing_share"]
    assert share.weight == 2 * int((rows.num_tokens_B() - 1).sum())


def test_what_has_no_routers_is_refused_by_name(process: ProcessInfo, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^actor.router_replay.mode=R2: model type 'qwen2' has no routers"):
        build_engine(process, tiny.model_folder(tmp_path), **R2)
