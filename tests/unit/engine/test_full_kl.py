"""KL(policy || reference) over the whole vocabulary, through two engines: values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import RULE, gradients
from verl_like.batch import Denominators, Experience, Metric
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo

WANT = frozenset({"full_kl"})
FUSED = {"use_remove_padding": True, "use_fused_kernels": True}
NAIVE = {"use_remove_padding": False, "use_fused_kernels": False}


class KLLoss:
    """The exact KL alone, over the number of tokens."""

    wants = WANT

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        loss = (outputs["full_kl"] * experience.response_mask_BR).sum() / denominators.num_tokens
        return loss, {"kl": Metric(value=loss.item(), reduction="sum")}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


def pair(process: ProcessInfo, path: str, model: dict[str, bool]) -> FSDPEngine:
    """A policy with the reference of another seed attached."""
    engine = tiny.build_engine(process, path, model=model)
    engine.attach_reference(tiny.build_engine(process, path, model=model, seed=8, optim=None))
    return engine


def naive_kl(engines: list[FSDPEngine], folder: Path, batch: Experience, temperature: float) -> Tensor:
    """Both models as transformers loads them, full logits, row by row."""
    plain = []
    for i, engine in enumerate(engines):
        engine.export_hf(str(folder / str(i)))
        plain.append(AutoModelForCausalLM.from_pretrained(folder / str(i), dtype=torch.float32))
    kl_BR = torch.zeros(batch.response_ids_BR.shape)
    for i, (p, r) in enumerate(zip(batch.prompt_length_B.tolist(), batch.response_length_B.tolist(), strict=True)):
        prompt = batch.prompt_ids_BP[i, batch.prompt_ids_BP.shape[1] - p :]
        ids = torch.cat([prompt, batch.response_ids_BR[i, :r]]).long()
        with torch.no_grad():
            log_p, log_q = ((model(ids[None]).logits[0, p - 1 : -1] / temperature).log_softmax(-1) for model in plain)
        kl_BR[i, :r] = (log_p.exp() * (log_p - log_q)).sum(-1)
    return kl_BR * batch.response_mask_BR


def test_equals_the_naive_sum(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine, batch = pair(process, path, FUSED), tiny.experience(6)
    (reference,) = engine._references
    values = engine.forward(batch, want=WANT | {"log_probs"}, rule=RULE, temperature=0.7)
    expected = naive_kl([engine, reference], tmp_path, batch, 0.7)
    torch.testing.assert_close(batch.padded(values["full_kl"]), expected, rtol=1e-5, atol=1e-5)
    assert float(expected.max()) > 0.1
    alone = reference.forward(batch, want=frozenset({"log_probs"}), rule=RULE)  # still works on its own
    assert alone["log_probs"].shape == batch.response_ids_T.shape


def test_gradient_is_the_naive_one_and_the_reference_stays(
    process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and fused in small micro-batches, against padded rows with full logits and autograd in one."""
    batch, results = tiny.experience(7), []
    monkeypatch.setattr("tests.unit.engine.scenarios.PolicyLoss", KLLoss)
    for model, rule in ((FUSED, RULE), (NAIVE, MicroBatchRule(max_tokens=10_000))):
        monkeypatch.setattr("tests.unit.engine.scenarios.RULE", rule)
        engine = pair(process, path, model)
        assert engine._references
        before = tiny.weights(engine._references[0])
        results.append(gradients(engine, batch, batch))
        after = tiny.weights(engine._references[0])
        assert all(torch.equal(before[name], after[name]) for name in before)
    for name, expected in results[1].items():
        scale = float(expected.abs().max())
        assert scale > 0 and float((results[0][name] - expected).abs().max()) / scale < 1e-5, name


def test_training_on_it_brings_the_policy_to_the_reference(process: ProcessInfo, path: str) -> None:
    engine, batch = pair(process, path, FUSED), tiny.experience(7)
    values = [
        engine.train_minibatch(batch, KLLoss(), tiny.denominators(batch), rule=RULE)["kl"].value for _ in range(8)
    ]
    assert values[-1] < 0.7 * values[0]


def test_lora_compares_with_its_own_base(process: ProcessInfo, path: str) -> None:
    """Zero before the first step (an adapter starts as nothing), then the KL from the model as it was."""
    batch = tiny.experience(7)
    lora = tiny.build_engine(process, path, model={"lora_rank": 4, "lora_alpha": 8})
    assert not lora.forward(batch, want=WANT, rule=RULE)["full_kl"].any()
    lora.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
    ours = lora.forward(batch, want=WANT, rule=RULE)["full_kl"]
    assert float(ours.max()) > 1e-4
    metrics = lora.train_minibatch(batch, KLLoss(), tiny.denominators(batch), rule=RULE)
    mean = float((ours * batch.response_mask_T).sum()) / tiny.denominators(batch).num_tokens
    assert metrics["kl"].value == pytest.approx(mean, rel=1e-4)


def test_rows_that_are_only_watched_are_compared_too(process: ProcessInfo, path: str) -> None:
    batch, kls = tiny.experience(5), []
    for apart_B in (None, torch.arange(5) < 2):
        engine = pair(process, path, FUSED)
        counts = tiny.denominators(batch)
        kls.append(engine.train_minibatch(batch, KLLoss(), counts, rule=RULE, without_gradient_B=apart_B)["kl"].value)
    assert kls[1] == pytest.approx(kls[0], rel=1e-5)


def test_without_a_reference_it_is_refused(process: ProcessInfo, path: str) -> None:
    with pytest.raises(ValueError, match="full_kl"):
        tiny.build_engine(process, path).forward(tiny.experience(2), want=WANT, rule=RULE)
