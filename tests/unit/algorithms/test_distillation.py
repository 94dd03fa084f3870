"""Losses of distillation: value and gradient against plain full-vocabulary float64 sums and verl's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Experience
from verl_like.config import ActorConfig
from verl_like.config.distillation import DistillationConfig, DistillationLossConfig
from verl_like.models.fused_linear import Head, Reference, fused_reductions, top_log_probs

V, H, K, T = 23, 5, 4, 1.3
CLAMPS = {"loss_max_clamp": 0.4, "log_prob_min_clamp": -3.0}
CASES: dict[str, dict[str, Any]] = {
    "k1": {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 0.4},
    "k3": {"loss_mode": "k3"},
    "k2_clamped": {"loss_mode": "mse", "loss_max_clamp": 0.4},
    "topk": {"loss_mode": "forward_kl_topk"},
    "topk_clamped": {"loss_mode": "forward_kl_topk", **CLAMPS},
    "topk_tail": {"loss_mode": "forward_kl_topk", "add_tail": True},
    "topk_as_advantage": {"loss_mode": "forward_kl_topk", "use_policy_gradient": True, "clip_ratio_high": 0.05},
    "reverse": {"loss_mode": "reverse_kl_full"},
    "jsd": {"loss_mode": "jsd"},
}


def plain_loss(log_q: Tensor, log_p: Tensor, target: Tensor, old: Tensor, loss: DistillationLossConfig) -> Tensor:
    """One token's loss from whole vocabularies: log_q the policy's, log_p the teacher's."""
    d, mode = log_q[target] - log_p[target], loss.loss_mode
    if mode == "k1":
        distance = d
    elif mode == "mse":
        distance = d.square() / 2
    elif mode == "k3":
        distance = ((-d).exp() + d - 1).clamp(-10, 10)  # as verl
    elif mode == "reverse_kl_full":
        distance = (log_q.exp() * (log_q - log_p)).sum()
    elif mode == "jsd":
        m = (log_q.exp() + log_p.exp()) / 2
        distance = ((log_q.exp() * (log_q - m.log())).sum() + (log_p.exp() * (log_p - m.log())).sum()) / 2
    else:  # verl's: gather, clamp both, sum over the teacher's K, not below 0
        ids = log_p.topk(loss.topk).indices
        q, p = log_q[ids], log_p[ids]
        rest = [1 - each.exp().sum() for each in (q, p)]
        if loss.log_prob_min_clamp is not None:
            q, p = q.clamp_min(loss.log_prob_min_clamp), p.clamp_min(loss.log_prob_min_clamp)
        distance = (p.exp() * (p - q)).sum()
        if loss.add_tail:
            distance = distance + rest[1] * (rest[1] / rest[0]).log()
        distance = distance.clamp_min(0)
    if loss.loss_max_clamp is not None:
        distance = distance.clamp(-loss.loss_max_clamp, loss.loss_max_clamp)
    if not loss.use_policy_gradient:
        return distance
    ratio, a = (log_q[target] - old).exp(), -distance.detach()
    high = loss.clip_ratio if loss.clip_ratio_high is None else loss.clip_ratio_high
    value = torch.maximum(-a * ratio, -a * ratio.clamp(1 - loss.clip_ratio, 1 + high))
    return torch.minimum(value, -a * 3.0) if a < 0 else value


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside_rewards"])
def test_equals_plain_sums_over_the_vocabulary(case: str, alone: bool) -> None:
    loss = DistillationLossConfig(**CASES[case], topk=K, use_task_rewards=not alone, distillation_loss_coef=0.7)
    batch = tiny.experience(5, vocab=V)
    g = torch.Generator().manual_seed(3)
    n = len(batch.response_ids_T)
    hidden, weight, other, head = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((n, H), (V, H), (n, H), (V, H))
    )
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    old_T = 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    targets, mask_T = batch.response_ids_T.long(), batch.response_mask_T
    log_p = (other @ head.T / T).log_softmax(-1)
    old_T = (hidden @ weight.T / T).log_softmax(-1).gather(1, targets[:, None])[:, 0].detach() + old_T
    columns: dict[str, Any] = {"teacher_log_probs_T": log_p.gather(1, targets[:, None])[:, 0]}
    if loss.loss_mode == "forward_kl_topk":
        values, ids = top_log_probs(other, Head(weight_VH=head), K, temperature=T)
        torch.testing.assert_close(values, log_p.topk(K).values)
        columns = {"teacher_log_probs_T": values, "teacher_ids_T": ids}
    rows: Experience = batch.replace(old_log_probs_T=old_T, **columns)
    distillation = DistillationConfig(enabled=True, distillation_loss=loss)
    objective = PolicyObjective(ActorConfig(entropy_coeff=0.1), distillation=distillation)
    outputs = fused_reductions(
        hidden,
        Head(weight_VH=weight),
        targets,
        objective.wants,
        temperature=T,
        references=(Reference(hidden_NH=other, head=Head(weight_VH=head)),),
        chosen_NK=None if "teacher_ids_T" not in columns else columns["teacher_ids_T"].long(),
        chunk_elements=7 * V,
    )
    found, metrics = objective({n: rows.padded(v) for n, v in outputs.items()}, rows, tiny.denominators(rows))
    gradients = torch.autograd.grad(found, [hidden, weight])

    log_q = (hidden @ weight.T / T).log_softmax(-1)
    parts = [plain_loss(log_q[t], log_p[t], targets[t], old_T[t], loss) for t in mask_T.nonzero().flatten()]
    expected = torch.stack(parts).sum() / int(mask_T.sum())
    assert metrics["distillation/loss"].value == pytest.approx(expected.item(), rel=1e-6)
    if not alone:
        outputs = {"log_probs": log_q.gather(1, targets[:, None])[:, 0], "entropy": -(log_q.exp() * log_q).sum(-1)}
        own = PolicyObjective(ActorConfig(entropy_coeff=0.1))
        task, _ = own({n: rows.padded(v) for n, v in outputs.items()}, rows, tiny.denominators(rows))
        expected = task + 0.7 * expected
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, plain in zip(gradients, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        assert float((ours - plain).abs().max()) <= 1e-6 * float(plain.abs().max())
    assert objective.without_gradient(rows) is None


def test_masses_and_tail_are_shown() -> None:
    """Teacher 0.5, 0.3 of its two likeliest, policy 0.2, 0.2: what is left is 0.2 against 0.6."""
    loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=2)
    batch = tiny.experience(1).replace(
        response_ids_T=torch.tensor([1]), response_length_B=torch.tensor([1]), response_mask_T=torch.tensor([True]),
        advantages_T=torch.zeros(1), teacher_log_probs_T=torch.tensor([[0.5, 0.3]]).log(),
        teacher_ids_T=torch.tensor([[3, 4]]),
    )  # fmt: skip
    objective = PolicyObjective(ActorConfig(), distillation=DistillationConfig(enabled=True, distillation_loss=loss))
    outputs = {"log_probs": torch.zeros(1, 1), "entropy": torch.zeros(1, 1)}
    outputs["chosen_log_probs"] = torch.tensor([[[0.2, 0.2]]]).log()
    _, metrics = objective(outputs, batch, tiny.denominators(batch))
    shown = {name: round(metrics[f"distillation/{name}"].value, 4) for name in ("student_mass", "teacher_mass_min")}
    assert shown == {"student_mass": 0.4, "teacher_mass_min": 0.8}
    assert metrics["distillation/tail_kl"].value == pytest.approx(0.2 * torch.tensor(0.2 / 0.6).log().item(), rel=1e-5)
