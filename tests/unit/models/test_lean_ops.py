"""The lean functions against transformers' own, class by class: values, gradients, and whole models."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.unit.engine import tiny
from tests.unit.models.test_packed_forward import ARCHITECTURES, assert_close, gradient_of, run
from verl_like.config.model import ModelConfig
from verl_like.models import lean_model, lean_ops, loading
from verl_like.models.heads import TokenModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
TITLES = {family: family.capitalize() for family in FAMILIES}


def source(family: str) -> object:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def norm_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    norm = getattr(source(family), f"{TITLES[family]}RMSNorm")(48, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    return norm.to(dtype)


def with_gradients(function: object, *inputs: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_norm_equals_the_family_s_own(family: str, dtype: torch.dtype, tolerance: float) -> None:
    norm, g = norm_of(family, dtype), torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, 7, 48, generator=g).to(dtype) for _ in range(2))
    eps_name, one_plus = lean_model._NORMS[type(norm).__name__]

    def own(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def lean(x: Tensor, weight: Tensor) -> Tensor:
        return lean_ops.rms_norm(x, weight, getattr(norm, eps_name), one_plus=one_plus)

    pairs = zip(
        with_gradients(lean, x, norm.weight.detach(), upstream=upstream),
        with_gradients(own, x, norm.weight.detach(), upstream=upstream),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_norm_gradient_by_finite_differences(one_plus: bool, frozen: bool) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, 6, dtype=torch.float64, generator=g).transpose(0, 1).requires_grad_()
    weight = torch.randn(6, dtype=torch.float64, generator=g).requires_grad_(not frozen)
    assert torch.autograd.gradcheck(lambda x, w: lean_ops.rms_norm(x, w, 0.1, one_plus=one_plus), (x, weight))


def test_norm_of_a_frozen_input_still_trains_the_weight() -> None:
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: lean_ops.rms_norm(x, w, 0.1, one_plus=False), (weight,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotary_equals_the_family_s_own(family: str, dtype: torch.dtype, tolerance: float) -> None:
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 9, heads, 8, generator=g).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(1, 9, 8, generator=g).to(dtype) for _ in range(2))
    own = source(family).apply_rotary_pos_emb  # type: ignore[attr-defined]
    for i, upstream in enumerate((torch.randn_like(q), torch.randn_like(k))):
        leaf = (q, k)[i]
        ours, theirs = (
            with_gradients(lambda x, f=f, i=i: f(*((x, k) if i == 0 else (q, x)), cos, sin)[i], leaf, upstream=upstream)
            for f in (lean_ops.apply_rotary, own)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_rotary_gradient_by_finite_differences() -> None:
    q, k, cos, sin = (
        torch.randn(shape, dtype=torch.float64) for shape in ((1, 2, 3, 4), (1, 1, 3, 4), *[(1, 3, 4)] * 2)
    )
    leaves = q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: lean_ops.apply_rotary(q, k, cos, sin), leaves)


def build(path: str, *, packed: bool = True, lean: bool = True) -> TokenModel:
    config = ModelConfig(path=path, use_remove_padding=packed, use_lean_ops=lean)
    hf_config, cpu = loading.load_hf_config(config), torch.device("cpu")
    model = loading.build_token_model(
        config, hf_config, kind="policy", dtype=torch.float32, vocab_size=tiny.VOCAB, seed=5
    )
    loading.replace_functions(model.hf, config, cpu, compiled=False)
    return model


def is_lean(model: TokenModel) -> bool:
    return any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_a_lean_model_equals_the_plain_one(tmp_path: Path, architecture: str, changes: dict[str, object]) -> None:
    path, rows = tiny.model_folder(tmp_path, architecture, **changes), tiny.experience(6, max_response=9)
    lean, plain = build(path), build(path, lean=False)
    assert is_lean(lean) and not is_lean(plain)
    ours, theirs = run(lean, rows, packed=True), run(plain, rows, packed=True)
    assert_close(ours, theirs)
    assert_close(gradient_of(lean, ours), gradient_of(plain, theirs))


def test_what_is_replaced(tmp_path: Path) -> None:
    model = build(tiny.model_folder(tmp_path, "qwen3"), lean=False)
    counted = lean_model.put_in(model.hf, lean_model.Functions())
    assert counted == lean_model.Replaced(norms=2 * 4 + 1, rotaries=2)  # a layer's two, queries', keys'; the last one


def test_padded_rows_and_compiled_layers_stay_plain(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    assert not is_lean(build(path, packed=False))
    config, model = ModelConfig(path=path), build(path, lean=False)
    loading.replace_functions(model.hf, config, torch.device("cpu"), compiled=True)
    loading.replace_functions(model.hf, config, torch.device("cuda"), compiled=False)
    assert not is_lean(model)


def test_a_class_of_the_same_name_from_elsewhere_is_left_alone(tmp_path: Path) -> None:
    model = build(tiny.model_folder(tmp_path), lean=False)
    stranger = type("Qwen2RMSNorm", (torch.nn.Identity,), {"__module__": "somebody.elses"})()
    model.hf.model.norm = stranger
    assert lean_model.put_in(model.hf, lean_model.Functions()).norms == 4 and "forward" not in vars(stranger)


def test_distributed_tensors_go_to_the_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = norm_of("llama", torch.float32)
    forward = lean_model._norm_forward(norm, 1e-3, False, lambda *_, **__: pytest.fail("not for distributed tensors"))
    monkeypatch.setattr(lean_model, "DTensor", torch.nn.Parameter)  # the weight is one
    x = torch.randn(3, 48)
    torch.testing.assert_close(forward(norm, x), norm(x))
    assert not issubclass(DTensor, torch.nn.Parameter)
