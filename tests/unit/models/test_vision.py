"""Vision-language models: log-probs and gradients against transformers' own padded forward, and planted faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.unit.models import tiny_vision as tiny
from verl_like.batch import Sequences
from verl_like.config import ModelConfig
from verl_like.models import loading, packing, vision
from verl_like.models.heads import PolicyModel
from verl_like.models.vision import VisionProcessor, processor_of

CPU = torch.device("cpu")


class Case:
    """One family: transformers' model in float64, ours, rows, and what transformers says of them."""

    def __init__(self, folder: Path, family: str, **changes: Any) -> None:
        self.hf = tiny.save(folder, family).double()
        self.config = loading.load_hf_config(ModelConfig(path=str(folder)))
        self.model = ModelConfig(path=str(folder), **changes)
        found = processor_of(self.model, self.config)
        assert found is not None
        self.vision: VisionProcessor = found
        self.rows, self.files = tiny.rows_with_images(folder, found)

    def ours(self, *, packed: bool = True) -> PolicyModel:
        settings = copy.copy(self.model)
        settings.use_remove_padding = packed
        model = loading.build_token_model(
            settings, self.config, kind="policy", dtype=torch.float64, vocab_size=None, seed=0
        )
        assert isinstance(model, PolicyModel)
        return model.eval()

    def expected(self, first: int = 0) -> Tensor:
        responses = self.rows.response_ids_T.split(self.rows.response_length_B.tolist())
        rows = list(zip(self.rows.prompt_lists(), [ids.tolist() for ids in responses], self.files, strict=True))
        return torch.cat([tiny.oracle(self.hf, *row) for row in rows[first:]])

    def inputs(self, *, packed: bool = True, share: bool = True, rows: Sequences | None = None) -> packing.ModelInput:
        rows = rows or self.rows
        wanted_T = torch.ones_like(rows.response_mask_T)
        if not packed:
            return packing.pad(rows, wanted_T, CPU, vision=self.vision)
        return packing.pack(rows, wanted_T, CPU, share_prompts=share, vision=self.vision)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.19"):
        pytest.skip("this transformers rounds the seconds between frames of Qwen2.5-VL down")
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def log_probs(model: PolicyModel, inputs: packing.ModelInput) -> Tensor:
    return inputs.unpack(model(inputs, frozenset({"log_probs"}), 1.0)["log_probs"])


@pytest.mark.parametrize(("packed", "share"), [(True, True), (True, False), (False, False)])
def test_log_probs_are_those_of_the_padded_forward(case: Case, packed: bool, share: bool) -> None:
    with torch.no_grad():
        found = log_probs(case.ours(packed=packed), case.inputs(packed=packed, share=share))
        assert (found - case.expected()).abs().max() < 1e-12


def test_gradients_of_both_towers_are_those_of_the_padded_forward(case: Case) -> None:
    model, rows = case.ours(), case.rows.select([1, 2, 3, 4, 5])  # the first has the oracle's stand-in for an id
    weights_T = torch.linspace(-1, 2, len(rows.response_ids_T), dtype=torch.float64)
    (log_probs(model, case.inputs(rows=rows)) * weights_T).sum().backward()
    case.hf.zero_grad()
    (case.expected(first=1) * weights_T).sum().backward()
    found = dict(model.hf.named_parameters())
    for name, parameter in case.hf.named_parameters():
        assert parameter.grad is not None and found[name].grad is not None, name
        # transformers' norms are float32 inside, also in float64
        assert (found[name].grad - parameter.grad).abs().max() < 1e-6 * parameter.grad.abs().max(), name
    assert any("visual" in name for name in found)


def test_positions_are_those_of_transformers(case: Case) -> None:
    for ids, media in zip(case.rows.prompt_lists(), case.rows.media or (), strict=True):
        row = torch.tensor([ids])
        grids = {kind: [list(h.grid) for h in media if h.kind == kind] for kind in ("image", "video")}
        given = {f"{kind}_grid_thw": torch.tensor(found) for kind, found in grids.items() if found}
        if "2_5" in case.config.model_type:
            given["second_per_grid_ts"] = torch.tensor([2 / 3])
        kinds = (row == tiny.IMAGE).int() + 2 * (row == tiny.VIDEO).int()
        expected, _ = case.hf.model.get_rope_index(input_ids=row, mm_token_type_ids=kinds, **given)
        assert torch.equal(case.vision.positions(len(ids), media), expected[:, 0])


def plain_positions(inputs: packing.ModelInput) -> packing.ModelInput:
    """As of a text model: each row counts on, along all axes."""
    return change(inputs, position_ids=inputs.position_ids[:1].expand(4, -1, -1))


def one_sequence(inputs: packing.ModelInput) -> packing.ModelInput:
    """Attention from row to row."""
    length = inputs.input_ids.shape[1]
    return change(inputs, segments=packing.Segments([length], CPU))


def next_feature(inputs: packing.ModelInput) -> packing.ModelInput:
    """Features in each other's places."""
    assert inputs.images is not None
    ids = inputs.images.feature_ids
    moved = torch.where(ids >= 0, (ids + 1) % (int(ids.max()) + 1), ids)
    values = {name: getattr(inputs.images, name) for name in ("parts", "token_patches", "patch_width")}
    return change(inputs, images=vision.VisionInput(feature_ids=moved, **values))


def change(inputs: packing.ModelInput, **changes: Any) -> packing.ModelInput:
    names = packing.ModelInput.__dataclass_fields__
    return packing.ModelInput(**{name: getattr(inputs, name) for name in names} | changes)


@pytest.mark.parametrize("fault", [plain_positions, one_sequence, next_feature])
def test_planted_faults_are_seen(case: Case, fault: Callable[[packing.ModelInput], packing.ModelInput]) -> None:
    with torch.no_grad():
        found = log_probs(case.ours(), fault(case.inputs(share=False)))
        assert (found - case.expected()).abs().max() > 1e-3


def test_three_axes_alone_leak_through_transformers_own_attention(case: Case) -> None:
    """Why rows are packed with four: without the text's positions transformers sees one sequence, and says nothing. Our
    attention is told where rows end, and does not depend on it."""
    inputs = case.inputs(share=False)
    with torch.no_grad():
        expected, model = case.expected(), case.ours()
        assert (log_probs(model, change(inputs, position_ids=inputs.position_ids[1:])) - expected).abs().max() < 1e-12
        own = case.ours(packed=False)
        right = log_probs(own, change(inputs, segments=None))
        leaked = log_probs(own, change(inputs, segments=None, position_ids=inputs.position_ids[1:]))
        assert (right - expected).abs().max() < 1e-12 < 1e-3 < (leaked - expected).abs().max()


def test_parts_of_the_tower_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        model, expected = case.ours(), case.expected()
        monkeypatch.setattr(case.vision, "max_patches", 1)
        inputs = case.inputs()
        assert inputs.images is not None and [grids[:, 0].tolist() for _, grids in inputs.images.parts] == [[1]] * 7
        assert (log_probs(model, inputs) - expected).abs().max() < 1e-12


def test_a_micro_batch_without_images_trains_the_tower_with_nothing(case: Case) -> None:
    """Its parameters take part, as they must where ranks gather them together, and get no gradient but zero."""
    model = case.ours()
    log_probs(model, case.inputs(rows=case.rows.select([3]))).sum().backward()
    gradients = [p.grad for name, p in model.hf.named_parameters() if "visual" in name]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_pixels_are_read_once_for_all_rows_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = vision._PixelCache(vision._CACHE_BYTES)
    monkeypatch.setattr(vision, "_pixels", cache)
    case = Case(tmp_path, "qwen2_vl")
    first, second = case.inputs(), case.inputs(packed=False)
    assert cache.misses == 6 and first.images is not None and second.images is not None
    (pixels, grids), *others = first.images.parts
    assert not others and len(grids) == 6 and len(pixels) == grids.prod(1).sum()
    small = vision._PixelCache(100)
    for key in ("a", "b", "a"):
        small.get(key, lambda: torch.zeros(20))
    assert small.misses == 3 and list(small._held) == ["a"]
