"""Images among a request's tokens, on the engines of a small model that sees, against transformers' own forward."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.models import tiny_vision
from tests.unit.models.tiny_vision import IMAGE, START, STOP, oracle, picture
from tests.unit.tinker_server import test_shared as shared
from tests.unit.tinker_server.fake import LIMITS
from verl_like.config import ModelConfig
from verl_like.models.loading import load_hf_config
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.tinker_server import bodies, wire
from verl_like.plugins.tinker_server.engine import Engines, Row, Work
from verl_like.plugins.tinker_server.images import Reader
from verl_like.plugins.tinker_server.prompts import Limits, prompt_of

FILES = [picture(1, 84, 56), picture(2, 56, 84)]
ANSWER = [10, IMAGE, 11, 12]  # the placeholder's id, sampled as any other
PARTS: list[Any] = [[7, START], FILES[0], [STOP, 8, START], FILES[1], [STOP]]
NAMES = ("ann", "bob")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return tiny_vision.save(folder, "qwen2_5_vl")


@pytest.fixture(scope="module")
def limits(model: PreTrainedModel, folder: Path) -> Limits:
    place = ModelConfig(path=str(folder))
    reader = Reader(vision=VisionProcessor(place, load_hf_config(place)), max_megapixels=0.01)
    told = {"vocabulary": 80, "longest": 64, "reader": reader}
    return Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | told)


@pytest.fixture(scope="module")
def engines(model: PreTrainedModel, folder: Path) -> Iterator[Engines]:
    """Engines with two models that have taken no step yet: they are the base."""
    made = shared.engines_on("cpu", folder, specs={})
    for name in NAMES:
        made.create(name, shared.SPECS[name])
    yield made
    made.close()


def row(limits: Limits, parts: list[Any], **image: Any) -> Row:
    """A row as it is read from a body. image: fields of its images."""
    chunks = [
        {"image": {"data": part, "format": "png", **image}}
        if isinstance(part, bytes)
        else {"encoded_text": {"tokens": np.asarray(part, np.int32).tobytes()}}
        for part in parts
    ]
    message = wire.MESSAGES["Pass"](loss_fn="cross_entropy")
    message.data.add(model_input=chunks)
    length = 2 * 3 + sum(len(part) for part in parts if not isinstance(part, bytes))  # 2 x 3 tokens of each image
    length += 6 * (sum(isinstance(part, bytes) for part in parts) - 1)
    targets = np.full(length, 5, np.int64)
    targets[-len(ANSWER) :] = [*ANSWER[1:], 13]
    weights = np.ones(length, np.float32)
    for name, values, dtype in (("target_tokens", targets, 2), ("weights", weights, 1)):
        tensor = {"dense": values.tobytes(), "dtype": dtype, "shape": values.shape}
        message.data[0].loss_fn_inputs.add(key=name, value=tensor)
    [found] = wire.work_of(message, limits).rows
    return found


def work(name: str, found: Row) -> Work:
    return Work(model=name, rows=[found], loss="cross_entropy", settings={})


def test_a_row_with_images_has_the_log_probs_of_transformers(
    engines: Engines, limits: Limits, model: PreTrainedModel
) -> None:
    found = row(limits, [*PARTS, ANSWER])
    prompt = found.ids[: -len(ANSWER)].tolist()
    assert prompt == [7, START, *[IMAGE] * 6, STOP, 8, START, *[IMAGE] * 6, STOP]
    [([log_probs], _)] = engines.forward_backward([work("ann", found)], backward=False, seed=1)
    with torch.no_grad():
        expected = oracle(model, prompt, [*ANSWER, 13], FILES)
    np.testing.assert_allclose(log_probs[-len(ANSWER) :, 0], expected[1:].numpy(), atol=1e-5)


def test_what_models_share_is_that_of_each_alone(engines: Engines, limits: Limits) -> None:
    """Models with and without images in a pass; what the images are decides the gradient."""
    mine, other = row(limits, [*PARTS, ANSWER]), row(limits, [PARTS[0], FILES[1], PARTS[2], FILES[0], [STOP], ANSWER])
    plain = shared.row(9, "cross_entropy", 1)
    text = Row(ids=plain.ids % 70 + 6, targets=plain.targets % 70 + 6, columns=plain.columns)
    asked = [work("ann", mine), work("bob", text)]
    for name in NAMES:  # B is not zero from here on
        engines.forward_backward([work(name, other)], backward=True, seed=1)
        engines.optim_step(name, shared.STEP)
    alone = [gradients_of(engines, [each]) for each in asked]
    together = gradients_of(engines, asked)
    for name, found in zip(NAMES, alone, strict=True):
        for new, old in zip(together[name], found[name], strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-6 * float(old.abs().max()))
    exchanged = gradients_of(engines, [work("ann", other)])["ann"]
    assert any(
        (new - old).abs().max() > 1e-3 * old.abs().max() for new, old in zip(exchanged, alone[0]["ann"], strict=True)
    )


def gradients_of(engines: Engines, asked: list[Work]) -> dict[str, list[torch.Tensor]]:
    engines.forward_backward(asked, backward=True, seed=1)
    found = {each.model: [part.clone() for part in shared.gradients(engines, each.model)] for each in asked}
    for name in found:
        engines.drop_gradient(name)
    return found


def asked(parts: list[Any], **told: Any) -> bodies.Sample:
    chunks = [
        {"type": "image", "format": "png", "data": base64.b64encode(part).decode(), "expected_tokens": 6}
        if isinstance(part, bytes)
        else {"type": "encoded_text", "tokens": part}
        for part in parts
    ]
    params = {"max_tokens": 5, "temperature": 0, "stop": []}
    return bodies.Sample.model_validate({"prompt": {"chunks": chunks}, "sampling_params": params, **told})


def test_samples_and_scores_see_the_images(engines: Engines, limits: Limits, model: PreTrainedModel) -> None:
    prompt = prompt_of(asked([*PARTS, ANSWER], prompt_logprobs=True, topk_prompt_logprobs=2), "s:0", limits)
    [answer] = engines.sample([("one", None, prompt)])
    assert answer is not None and answer.log_probs is not None and answer.topk is not None
    ids, log_probs, _ = answer.samples[0]
    first = prompt.ids[: -len(ANSWER)]
    with torch.no_grad():
        expected = oracle(model, first, [*ANSWER, *ids.tolist()], FILES).numpy()
    np.testing.assert_allclose(log_probs, expected[len(ANSWER) :], atol=1e-5)
    np.testing.assert_allclose(answer.log_probs[-len(ANSWER) :], expected[: len(ANSWER)], atol=1e-5)
    unscored = [0, *range(2, 8), *range(11, 17)]
    assert np.isnan(answer.log_probs).nonzero()[0].tolist() == unscored
    assert (answer.topk[1][:, 0] == -99999.0).nonzero()[0].tolist() == unscored


@pytest.mark.parametrize(
    ("file", "image", "words"),
    [
        (b"", {}, r"data\[0\].model_input.chunks\[1\] is neither a png nor a jpeg \(0 bytes\)"),
        (picture(1, 84, 56, "EPS"), {}, "is neither a png nor a jpeg"),  # for which PIL would start another program
        (FILES[0][:9], {}, "is no image that PIL can open"),
        (picture(1, 112, 112), {}, "has 112 x 112 pixels, more than data.max_image_megapixels=0.01"),
        (FILES[0], {"expected_tokens": 7}, "expected_tokens=7: this image has 6 tokens"),
        (FILES[0], {"override_dimensions": {}}, "override_dimensions is not available"),
    ],
)
def test_images_that_are_refused(limits: Limits, file: bytes, image: dict[str, Any], words: str) -> None:
    with pytest.raises(bodies.Refused, match=words):
        row(limits, [[7, START], file, [STOP], ANSWER], **image)


def test_a_damaged_image_fails_its_request_alone(engines: Engines, limits: Limits) -> None:
    """Its header is whole. ValueError is told as the client's fault."""
    damaged = row(limits, [[7, START], FILES[0][:200], [STOP], ANSWER])
    with pytest.raises(ValueError, match="cannot be decoded"):
        engines.forward_backward([work("ann", damaged)], backward=True, seed=1)
    prompt = prompt_of(asked([[7, START], FILES[0][:200], [STOP]]), "s:0", limits)
    with pytest.raises(ValueError, match="cannot be decoded"):
        engines.sample([("one", None, prompt)])
    assert engines.sample([("two", None, prompt_of(asked(PARTS), "s:0", limits))])[0] is not None
