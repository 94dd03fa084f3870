"""Routers that replay routes: of every family the scores, gradients and types; routes joined over passes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.models import zoo
from tests.unit.models.test_state_layers import in_float64
from verl_like.models import families
from verl_like.models.routes import Routers, continued, filled, route_type, routers_of, unknown

SOFTMAX, BEHIND, SIGMOID = "softmax of all", "softmax of the chosen", "sigmoid"
KINDS = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "flex_olmo", "hunyuan_v1_moe"), SOFTMAX),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), SOFTMAX),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "gpt_oss"), BEHIND),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "lfm2_moe"), SIGMOID),
}
OF_ROUTERS = ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor")
X = 255  # unknown


def formula(kind: str, router: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """Weights of the chosen experts, written out once more: gathered from the scores of all."""
    linear = router.wg if hasattr(router, "wg") else router
    logits = torch.nn.functional.linear(hidden, linear.weight, getattr(linear, "bias", None))
    scores = {SOFTMAX: logits.softmax(-1), BEHIND: logits, SIGMOID: logits.sigmoid()}[kind].gather(1, chosen)
    if kind == BEHIND:
        return scores.softmax(-1)
    if getattr(router, "norm_topk_prob", True):
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-6 if type(router).__name__.startswith("Lfm2") else 0))
    return scores * getattr(router, "routed_scaling_factor", 1.0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("telling", [False, True])
def test_scores_are_gathered_from_all_with_their_gradient(name: str, telling: bool) -> None:
    """In float64 1e-10; a token of unknown routes is left to the router, and is the only one that is.

    telling: norms, groups and scales of scores that the tiny config leaves out.
    """
    changes = {key: value for key, value in zoo.telling(name).items() if telling and key in OF_ROUTERS}
    with in_float64():
        compare_scores(name, AutoModelForCausalLM.from_config(zoo.config(name, **changes)).double())


def compare_scores(name: str, hf: Any) -> None:
    modules, _ = routers_of(hf, "a key", "a fix")
    assert len(modules) == 2
    torch.manual_seed(0)
    for module in modules:
        for each in module.parameters():
            torch.nn.init.normal_(each)
    hidden = torch.randn(9, 64, dtype=torch.float64, requires_grad=True)
    more = () if name not in ("minimax_m2", "lfm2_moe") else (torch.randn(8, dtype=torch.float64),)
    live = [next(t for t in module(hidden, *more) if not t.is_floating_point()) for module in modules]
    routes = torch.stack([torch.stack([torch.randperm(8)[:2] for _ in range(9)]) for _ in modules], 1)
    routes[4] = X
    routers = Routers(hf, "a key")
    routers.replay(routes.to(torch.uint8))
    for layer, module in enumerate(modules):
        output = module(hidden, *more)
        weights = next(t for t in output if t.is_floating_point() and t.shape[-1] == 2)
        chosen = next(t for t in output if not t.is_floating_point())
        expected = torch.where(routes[:, layer] == X, live[layer], routes[:, layer])
        assert torch.equal(chosen, expected) and not torch.equal(chosen, live[layer])
        wanted = formula(KINDS[name], module, hidden, expected)
        assert float((weights - wanted).detach().abs().max()) < 1e-10
        by = [hidden, *module.parameters()]
        factors = torch.randn_like(weights)
        for found, right in zip(
            torch.autograd.grad((weights * factors).sum(), by),
            torch.autograd.grad((wanted * factors).sum(), by),
            strict=True,
        ):
            assert float(right.abs().max()) > 0 and float((found - right).abs().max()) < 1e-10
    differing, compared = routers.differing()
    same = torch.stack([(live[i].sort(-1).values == routes[:, i].sort(-1).values).all(-1) for i in range(2)], 1)
    assert (differing, compared) == (16 - int(same.sum()), 16)


def test_every_family_with_routers_is_here_or_refused_by_name() -> None:
    mixtures = {name for name, family in families.FAMILIES.items() if "experts" in family.kind}
    assert mixtures - KINDS.keys() == {"jamba"}
    for name, why in (("jamba", "do not tell their scores"), ("qwen3", "has no routers")):
        hf = AutoModelForCausalLM.from_config(zoo.config(name))
        with pytest.raises(ValueError, match=rf"^a key=R2: .*{name}.* {why}: it is for mixtures of experts"):
            Routers(hf, "a key=R2")


def test_a_type_holds_all_experts_and_one_more() -> None:
    counts = (8, 255, 256, 512)
    types = [route_type(zoo.config("qwen3_moe", num_experts=n, num_local_experts=n)) for n in counts]
    assert types == [torch.uint8, torch.uint8, torch.int16, torch.int16]
    assert [unknown(torch.uint8), unknown(torch.int16), unknown(np.dtype("int16"))] == [255, 32767, 32767]


def numbered(*experts: int) -> np.ndarray:
    return np.array(experts, dtype=np.uint8).reshape(-1, 1, 1)


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [
        (numbered(1, 2), numbered(7, 8, 9), [1, 2, 9]),  # computed again, under other weights: the first counts
        (numbered(1, X, 3), numbered(7, 8, 9, 9), [1, 8, 3, 9]),
        (numbered(1, 2, 3), numbered(7), [1, 2, 3]),
        (None, numbered(7), [7]),
        (numbered(), numbered(7), [7]),
        (numbered(7), None, [7]),
    ],
)
def test_routes_of_two_passes(earlier: Any, later: Any, joined: list[int]) -> None:
    found = continued(earlier, later)
    assert found is not None and found.flatten().tolist() == joined
    assert filled(found, 5, found).flatten().tolist() == [*joined, X, X, X, X][:5]


def test_routes_of_nothing() -> None:
    assert continued(None, None) is None
    assert filled(None, 2, numbered(7)).flatten().tolist() == [X, X]


def test_what_holds_routes_imports_no_transformers() -> None:
    """Processes that only pass responses on import these modules; transformers costs them seconds."""
    code = "import sys, verl_like.rollout.rollout_engine, verl_like.batch; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
