"""Teachers through the engine: packed rows, several teachers, two ranks give the gradient of plain float64 models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import gradients, my_rows
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Experience
from verl_like.config import ActorConfig
from verl_like.config.distillation import DistillationConfig, DistillationLossConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models.heads import PolicyModel
from verl_like.parallel.dist import ProcessInfo

K = 5
MODES = ("forward_kl_topk", "reverse_kl_full", "jsd")
TOP = frozenset({"top_log_probs", "top_ids"})


def objective(mode: str) -> PolicyObjective:
    loss = DistillationLossConfig(loss_mode=mode, topk=K, use_task_rewards=False)
    return PolicyObjective(ActorConfig(), distillation=DistillationConfig(enabled=True, distillation_loss=loss))


def engines(process: ProcessInfo, path: str, temperature: float = 1.0) -> tuple[FSDPEngine, list[FSDPEngine]]:
    """A policy, and two teachers of other seeds."""
    policy = tiny.build_engine(process, path)
    teachers = [tiny.build_engine(process, path, seed=seed, optim=None) for seed in (8, 9)]
    for engine in (policy, *teachers):
        assert isinstance(engine.model, PolicyModel)
        engine.model.top_k, engine.model.tempered = K, (frozenset({"chosen_log_probs", "full_kl", "jsd"}), temperature)
    return policy, teachers


def taught(rows: Experience, teachers: list[FSDPEngine], temperature: float) -> Experience:
    """The rows with the top-k columns of teacher_B's teachers (collective)."""
    n = len(rows.response_ids_T)
    values_TK, ids_TK = torch.zeros(n, K), torch.zeros(n, K, dtype=torch.int32)
    number_T = rows.teacher_B.repeat_interleave(rows.response_length_B)  # type: ignore[union-attr]
    for number, teacher in enumerate(teachers):
        found = teacher.forward(rows, want=TOP, rule=tiny.ONE_BATCH, temperature=temperature)
        if n:
            mine = number_T == number
            values_TK[mine], ids_TK[mine] = found["top_log_probs"][mine], found["top_ids"][mine]
    return rows.replace(teacher_log_probs_T=values_TK, teacher_ids_T=ids_TK)


def of_shares(process: ProcessInfo, path: str) -> list[dict[str, dict[str, Tensor]]]:
    """Gradients of rows on all ranks, and on the first alone, while the others run placeholders with it."""
    return [of_modes(process, path, share) for share in ("even", "first")]


def of_modes(process: ProcessInfo, path: str, share: str, temperature: float = 1.0) -> dict[str, dict[str, Tensor]]:
    """Gradient by loss_mode, of this rank's share of the rows."""
    batch = tiny.experience(7)
    batch = batch.replace(teacher_B=torch.arange(7) % 2)
    policy, teachers = engines(process, path, temperature)
    policy.attach_reference(*teachers)
    rows = taught(my_rows(process, batch, share), teachers, temperature)
    return {mode: gradients(policy, rows, batch, loss=objective(mode)) for mode in MODES}


def plain(process: ProcessInfo, path: str, folder: Path, temperature: float) -> dict[str, dict[str, Tensor]]:
    """The same in float64 with transformers, row by row, over whole vocabularies."""
    policy, teachers = engines(process, path)
    models: list[Any] = []
    for i, engine in enumerate((policy, *teachers)):
        engine.export_hf(str(folder / str(i)))
        models.append(AutoModelForCausalLM.from_pretrained(folder / str(i), dtype=torch.float64))
    batch, found = tiny.experience(7), {}
    for mode in MODES:
        models[0].zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for i, (p, r) in enumerate(zip(batch.prompt_length_B.tolist(), batch.response_length_B.tolist(), strict=True)):
            prompt = batch.prompt_ids_BP[i, batch.prompt_ids_BP.shape[1] - p :]
            ids, mask = torch.cat([prompt, batch.response_ids_BR[i, :r]]).long(), batch.response_mask_BR[i, :r]
            chosen = (models[0], models[1 + i % 2])
            log_q, log_p = ((m(ids[None]).logits[0, p - 1 : -1] / temperature).log_softmax(-1)[mask] for m in chosen)
            total = total + distance(mode, log_q, log_p.detach()).sum()
        (total / int(batch.response_mask_T.sum())).backward()
        found[mode] = {name: each.grad.clone() for name, each in models[0].named_parameters()}
    return found


def distance(mode: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    q, p = log_q.exp(), log_p.exp()
    if mode == "reverse_kl_full":
        return (q * (log_q - log_p)).sum(-1)
    if mode == "jsd":
        log_m = ((q + p) / 2).log()
        return ((q * (log_q - log_m)).sum(-1) + (p * (log_p - log_m)).sum(-1)) / 2
    top = log_p.topk(K)
    return (top.values.exp() * (top.values - log_q.gather(1, top.indices))).sum(-1).clamp(min=0)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_two_teachers_by_row_equal_plain_models(
    process: ProcessInfo, path: str, tmp_path: Path, temperature: float
) -> None:
    expected, found = plain(process, path, tmp_path, temperature), of_modes(process, path, "even", temperature)
    for mode in MODES:
        pairs = [(found[mode][name].double(), gradient) for name, gradient in expected[mode].items()]
        ours, theirs = (torch.cat([each.flatten() for each in side]) for side in zip(*pairs, strict=True))
        gap = float((ours - theirs).norm() / theirs.norm())
        assert gap <= 5e-6, f"{mode}: {gap:.1e}"  # 2e-6 is the rounding of float32 models


def test_two_ranks_equal_one(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    one = of_modes(process, path, "even")
    for rank in tiny.spawn_ranks(2, of_shares, tmp_path, path):
        for found in rank:
            for mode in MODES:
                tiny.assert_same(one[mode], found[mode])


def test_a_batch_without_the_teachers_columns_is_told(process: ProcessInfo, path: str) -> None:
    policy, _ = engines(process, path)
    with pytest.raises(ValueError, match="teacher_ids_T"):
        gradients(policy, tiny.experience(2), tiny.experience(2), loss=objective("forward_kl_topk"))
