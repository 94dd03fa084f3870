"""Conversations with images: in the prompt, and in what tools answer. Tokens, places, and log-probs of what follows."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import string
import types
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from tests.unit.models import tiny_vision as tiny
from tests.unit.models.test_videos import write_video
from verl_like.batch import MediaHandle, Prompt, PromptRow, Rollouts
from verl_like.config import ModelConfig
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.episode import Episode
from verl_like.episodes.rows import assemble_rollouts
from verl_like.models import loading, packing
from verl_like.models.images import decoded
from verl_like.models.prefix_tree import beginnings
from verl_like.models.videos import clip_of, frames_of
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.agents.tools.kinds import media_of
from verl_like.plugins.agents.tools.tool_call import ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.rollout.rollout_engine import Completion, Sampled
from verl_like.trainer import recording

TOOLS = '''
import io

import numpy as np
from PIL import Image
from verl.tools.schemas import ToolResponse
from verl.tools.function_tool import function_tool

@function_tool
def look(number: int):
    """Look at something.

    Args:
        number: which one
    """
    if number == -1:
        return ToolResponse(text="broken", image=[b"no image"])
    pixels = np.random.default_rng(abs(number)).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    if number < 0:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return ToolResponse(text="cut off", image=[{"bytes": file.getvalue()[:400]}])
    return ToolResponse(text="seen", image=[Image.fromarray(pixels)])

@function_tool
def watch(number: int):
    """Watch something.

    Args:
        number: which one
    """
    size = (4, 84, 112, 3) if number > 0 else (4, 8, 8, 3)
    frames = [np.random.default_rng(100 * abs(number) + i).integers(0, 256, size[1:], dtype=np.uint8) for i in range(4)]
    options = {"sample_fps": 3} if number > 0 else {"fsp": 3}
    return ToolResponse(text="seen", video=[{"video": np.stack(frames), **options}])
'''
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] | replace('hmm', '') }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}assistant:"
)
CALL = '<tool_call>{{"name": "look", "arguments": {{"number": {}}}}}</tool_call>'
WATCH = CALL.replace("look", "watch")


def letters() -> Any:
    """The tiny tokenizer, and every printable character."""
    found = tiny.tokenizer()
    found.add_tokens([AddedToken(each, normalized=False) for each in string.printable])
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return tiny.save(folder, "qwen2_vl", vocab_size=192, max_position_embeddings=1024).double()


@pytest.fixture(scope="module")
def vision(folder: Path, hf: Any) -> VisionProcessor:
    model = ModelConfig(path=str(folder))
    found = processor_of(model, loading.load_hf_config(model))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    with closing(Toolbox(ToolSpec(function_tool_path=str(path), timeout=20.0), num_workers=1)) as made:
        yield made


class Model:
    """Says these things; what it was asked, and with which images."""

    def __init__(self, tokenizer: Any, *says: str) -> None:
        self.tokenizer, self.says = tokenizer, list(says)
        self.asked: list[tuple[list[int], list[MediaHandle]]] = []

    async def __call__(
        self, context_ids: list[int], sampling: Any = None, *, max_tokens: int | None = None, media: Any = None
    ) -> Completion:
        self.asked.append((list(context_ids), list(media)))
        ids = [*self.tokenizer.encode(self.says.pop(0)), tiny.END]
        return Completion(request_id="x", sampled=Sampled.of(ids, [-1.0] * len(ids), 1), finish_reason="stop")


def prompt_of(folder: Path, vision: VisionProcessor, tokenizer: Any) -> Prompt:
    """With an image of 56 x 56: four tokens."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]}]
    handles = tiny.write_images(folder / "rows.parquet", [[{"bytes": tiny.picture(1)}]])[0]
    (ids,) = PromptEncoder(tokenizer, {}).encode([(messages, None)])
    ids, media = vision.expand(ids, handles, 1)
    row = PromptRow(index=0, data_source="x", messages=messages, media=media)
    return Prompt(ids=ids, row=row, group=5, position=0)


def converse(box: Toolbox, prompt: Prompt, model: Model, vision: Any, **options: Any) -> Episode:
    agent = ToolAgent(
        PromptEncoder(model.tokenizer, {}),
        box,
        parser_of("hermes"),
        Bounds(prompt=400, response=400),
        end_ids=(tiny.END,),
        follow_template=options.pop("follow", False),
        vision=vision,
        **options,
    )
    return asyncio.run(agent.run(prompt, 0, model))


def tool_picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return tiny_png(pixels)


def tiny_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_what_a_tool_shows_is_seen_and_trained_with(
    folder: Path, hf: Any, vision: VisionProcessor, box: Toolbox
) -> None:
    """Two episodes of a prompt with an image that look at other things: the tokens of the images are there once, their
    log-probs are those of transformers' forward of each row, and the rows share their prompt alone."""
    tokenizer = letters()
    prompt = prompt_of(folder, vision, tokenizer)
    models = [Model(tokenizer, CALL.format(number), "yes") for number in (4, 5)]
    episodes = [converse(box, prompt, model, vision) for model in models]
    seen = (
        tokenizer.encode("tool:<|vision_start|>") + [tiny.IMAGE] * 6 + tokenizer.encode("<|vision_end|>seen<|im_end|>")
    )
    for episode, model in zip(episodes, models, strict=True):
        assert episode.failure is None and len(episode.turns) == 2
        (first, one), (second, two) = model.asked
        assert first == prompt.ids and one == prompt.row.media
        called = episode.turns[0].sampled.token_ids.tolist()
        assert second == [*first, *called, *seen, *tokenizer.encode("assistant:")]
        assert two[0] == one[0] and two[1].starts == (second.index(tiny.IMAGE, len(first)),)
    rows = assemble_rollouts([prompt], [episodes])
    assert rows.media is not None and [len(row) for row in rows.media] == [2, 2]
    assert [not mask for mask in rows.response_mask_T[: rows.response_length_B[0]]].count(True) == len(seen) + 10
    (_, shared), first = beginnings(rows).common, [row[1].starts[0] for row in rows.media]
    assert first[0] == first[1] and len(prompt.ids) < shared <= first[0]  # up to the image that a tool showed
    _check_log_probs(folder, hf, vision, rows, [tool_picture(4), tool_picture(5)])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_what_a_tool_films_is_seen_and_trained_with(family: str, tmp_path: Path, box: Toolbox) -> None:
    """Behind the prompt's image; Qwen3-VL reads the seconds before each of its times. Also where the step was recorded
    and is read again."""
    hf = tiny.save(tmp_path, family, vocab_size=192, max_position_embeddings=1024).double()
    vision = processor_of(ModelConfig(path=str(tmp_path)), hf.config)
    assert vision is not None
    tokenizer = letters()
    if family == "qwen3_vl":
        tokenizer.save_pretrained(tmp_path)
    prompt = prompt_of(tmp_path, vision, tokenizer)
    model = Model(tokenizer, WATCH.format(4), "yes")
    episode = converse(box, prompt, model, vision)
    assert episode.failure is None and len(episode.turns) == 2
    ids, media = model.asked[1]
    assert [handle.kind for handle in media] == ["image", "video"] and ids.count(tiny.VIDEO) == 2 * 12
    rows = assemble_rollouts([prompt], [[episode]])
    recording.write_step(tmp_path / "step", {"rollouts": rows}, {})
    again = recording.read_step(tmp_path / "step").stage("rollouts", Rollouts)
    assert again.media == rows.media and again.rows == rows.rows
    _check_log_probs(tmp_path, hf, vision, again, [tiny.film(4)])


def _check_log_probs(folder: Path, hf: Any, vision: VisionProcessor, rows: Any, shown: Sequence[Any]) -> None:
    """Of the last turn of each row, packed with shared prompts."""
    model: Any = loading.build_token_model(
        ModelConfig(path=str(folder)),
        loading.load_hf_config(ModelConfig(path=str(folder))),
        kind="policy",
        dtype=torch.float64,
        vocab_size=None,
        seed=0,
    ).eval()
    wanted_T = torch.ones_like(rows.response_mask_T)
    inputs = packing.pack(rows, wanted_T, torch.device("cpu"), share_prompts=True, vision=vision)
    with torch.no_grad():
        found_T = inputs.unpack(model(inputs, frozenset({"log_probs"}), 1.0)["log_probs"])
    found = found_T.split(rows.response_length_B.tolist())
    answers = rows.response_ids_T.split(rows.response_length_B.tolist())
    for place, (prompt_ids, answer, file) in enumerate(zip(rows.prompt_lists(), answers, shown, strict=True)):
        ids, last = answer.tolist(), 4  # "yes" and its end
        files = [tiny.picture(1), file]
        with torch.no_grad():
            expected = tiny.oracle(hf, [*prompt_ids, *ids[:-last]], ids[-last:], files)
        assert (found[place][-last:] - expected).abs().max() < 1e-12


def test_a_rewritten_history_keeps_its_images(folder: Path, hf: Any, vision: VisionProcessor, box: Toolbox) -> None:
    """The template drops a word of the first turn: a new row, with both images in their new places."""
    tokenizer = letters()
    prompt = prompt_of(folder, vision, tokenizer)
    model = Model(tokenizer, "hmm" + CALL.format(4), "yes")
    episode = converse(box, prompt, model, vision, follow=True)
    assert [turn.new_row for turn in episode.turns] == [False, True]
    second, media = model.asked[1]
    assert [second[start : start + 7].count(tiny.IMAGE) for h in media for start in h.starts] == [4, 6]
    rows = assemble_rollouts([prompt], [[episode]])
    assert rows.media is not None and [len(row) for row in rows.media] == [1, 2]
    assert beginnings(rows).common[1] >= len(prompt.ids) - 3
    other = [rows.media[0], [dataclasses.replace(rows.media[1][0], number=9), rows.media[1][1]]]
    assert beginnings(dataclasses.replace(rows, media=other)).common[1] == second.index(tiny.IMAGE)


def test_images_that_cannot_be_used_are_told(folder: Path, hf: Any, vision: VisionProcessor, box: Toolbox) -> None:
    tokenizer = letters()
    model = Model(tokenizer, CALL.format(-1), "yes")
    episode = converse(box, prompt_of(folder, vision, tokenizer), model, vision)
    text = tokenizer.decode(episode.turns[1].observation_ids)
    assert "Error executing tool 'look': look, row 0: image 0 of column 'image' is no image that PIL" in text
    model = Model(tokenizer, CALL.format(-2), "yes")
    converse(box, prompt_of(folder, vision, tokenizer), model, vision)
    assert "image 0 of column 'image' cannot be decoded: image file is truncated" in tokenizer.decode(model.asked[1][0])
    model = Model(tokenizer, CALL.format(4), "yes")
    converse(box, prompt_of(folder, vision, tokenizer), model, vision, max_megapixels=0.001)
    assert "84 x 56 pixels, more than data.max_image_megapixels=0.001" in tokenizer.decode(model.asked[1][0])
    model = Model(tokenizer, WATCH.format(-1), "yes")
    converse(box, prompt_of(folder, vision, tokenizer), model, vision)
    assert "'fsp' is no option of a video; they are fps" in tokenizer.decode(model.asked[1][0])


def test_a_model_that_reads_text_is_told_how_many(folder: Path, box: Toolbox) -> None:
    tokenizer = letters()
    row = PromptRow(index=0, data_source="x", messages=[{"role": "user", "content": "go"}])
    prompt = Prompt(ids=tokenizer.encode("user:go<|im_end|>assistant:"), row=row, group=1, position=0)
    model = Model(tokenizer, CALL.format(4), "yes")
    converse(box, prompt, model, None)
    assert "tool:seen\n[1 image]<|im_end|>" in tokenizer.decode(model.asked[1][0])
    model = Model(tokenizer, WATCH.format(4), "yes")
    converse(box, prompt, model, None)
    assert "tool:seen\n[1 video]<|im_end|>" in tokenizer.decode(model.asked[1][0])


def test_every_form_of_a_tools_image(tmp_path: Path) -> None:
    """Their pixels come through."""
    file = tmp_path / "a.png"
    file.write_bytes(tiny.picture(3))
    expected = np.asarray(Image.open(file))
    forms = [
        Image.open(file),
        expected,
        file.read_bytes(),
        str(file),
        {"bytes": file.read_bytes()},
        {"bytes": None, "image": expected},
        {"url": f"file://{file}"},
    ]
    found = media_of(types.SimpleNamespace(text="", image=forms))
    assert len(found) == len(forms) and media_of("text") == media_of({"image": [1]}) == []
    for number, (kind, source) in enumerate(found):
        handle = MediaHandle(kind=kind, path="tool", column="image", row=0, number=number, source=source)
        assert kind == "image" and np.array_equal(np.asarray(decoded(handle)), expected)
    clear = np.zeros((56, 56, 4), np.uint8)  # nothing to see, and as a viewer shows it
    deep = np.full((56, 56), 65535, np.uint16)
    for _, source in media_of(types.SimpleNamespace(text="", image=[clear, Image.fromarray(clear), deep])):
        handle = MediaHandle(kind="image", path="tool", column="image", row=0, number=0, source=source)
        assert (np.asarray(decoded(handle)) == 255).all()
    with pytest.raises(ValueError, match="a tool's image must be one of PIL's, an array, bytes, a path or a URL"):
        media_of(types.SimpleNamespace(text="", image=[object()]))


def test_every_form_of_a_tools_video(tmp_path: Path) -> None:
    """A file's frames come through, and those of lists and arrays; what was said of them stays beside them."""
    data, film = write_video(tmp_path / "a.avi"), tiny.film(2, 3, 56, 56)
    pixels = [np.asarray(Image.open(io.BytesIO(frame))) for frame in film]
    files = [data, str(tmp_path / "a.avi"), {"bytes": data}, {"video": data, "fps": 5}]
    lists = [pixels, np.stack(pixels), film, {"type": "video", "video": [{"bytes": frame} for frame in film]}]
    found = media_of(types.SimpleNamespace(text="", image=None, video=[*files, *lists]))
    for number, (kind, source) in enumerate(found):
        handle = MediaHandle(kind=kind, path="tool", column="video", row=0, number=number, source=source)
        assert kind == "video" and json.loads(json.dumps(source)) == source
        clip = clip_of(handle)
        frames = [np.asarray(frame) for frame in frames_of(handle, clip)]
        if number < len(files):
            assert len(clip.numbers) == (10 if number == 3 else 4) and frames[0].shape == (48, 64, 3)
        else:
            assert all(np.array_equal(a, b) for a, b in zip(frames, pixels, strict=True))
    for wrong in (7, {"fps": 2}, {"video": None}):
        with pytest.raises(
            ValueError, match="a tool's video must be a file's bytes, a path or a URL, a list of images"
        ):
            media_of(types.SimpleNamespace(text="", video=[wrong]))
