"""Tiny random vision-language models of three families, with tokenizer and image processor, and files of images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_like.batch import MediaHandle, Sequences
from verl_like.models.vision import VisionProcessor

PAD, END, START, STOP, IMAGE, VIDEO = range(6)
WORDS = ["<pad>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS += [f"w{i}" for i in range(70)] + ["<0.2 seconds>", "<0.8 seconds>"]
SECONDS = (76, 77)
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_PREFIX = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
_TOWER = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}


def tiny_vision(family: str, *, std: float = 0.15, **text: Any) -> PreTrainedModel:
    """Weights large enough that every tensor matters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    extra: dict[str, Any] = {}
    if family == "qwen3_vl":
        rope, extra = rope | {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}, {"head_dim": 32}
    config = getattr(transformers, f"{_PREFIX[family]}Config")(
        text_config={
            "vocab_size": 80,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "rope_parameters": rope,
            **extra,
            **text,
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            **_TOWER[family],
        },
        tie_word_embeddings=True,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    model = getattr(transformers, f"{_PREFIX[family]}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; words need no spaces."""
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    whole.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token=WORDS[PAD], eos_token=WORDS[END])
    fast.add_special_tokens({"additional_special_tokens": WORDS[START : VIDEO + 1]})
    fast.add_tokens([AddedToken(word, normalized=False) for word in reversed(WORDS[6:])])
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path, family: str = "qwen2_vl", **settings: Any) -> PreTrainedModel:
    """A whole model folder."""
    model = tiny_vision(family, **settings)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=28 * 28, max_pixels=112 * 112
    ).save_pretrained(folder)
    if family == "qwen3_vl":  # its bounds are of all frames together
        settings = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2}
        settings["size"] = {"shortest_edge": 28 * 28, "longest_edge": 4 * 112 * 112}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return model


def picture(seed: int, width: int = 56, height: int = 56, kind: str = "PNG") -> bytes:
    """An image of noise, as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_images(path: Path, cells: Sequence[Sequence[Any]], group: int = 2) -> list[list[MediaHandle]]:
    """A parquet file with a column of images; a handle for each."""
    pq.write_table(pa.table({"images": [list(cell) for cell in cells]}), path, row_group_size=group)
    return [
        [MediaHandle(kind="image", path=str(path), column="images", row=r, number=i) for i in range(len(cell))]
        for r, cell in enumerate(cells)
    ]


def film(seed: int, frames: int = 4, width: int = 112, height: int = 84) -> list[bytes]:
    """The frames of a video, as files."""
    return [picture(100 * seed + i, width, height) for i in range(frames)]


def write_film(folder: Path, frames: Sequence[bytes], **options: Any) -> MediaHandle:
    """A parquet file with this video; its handle."""
    table = pa.table({"videos": [[{"video": [{"bytes": frame} for frame in frames], **options}]]})
    pq.write_table(table, path := folder / "films.parquet")
    return MediaHandle(kind="video", path=str(path), column="videos", row=0, number=0)


def rows_with_images(folder: Path, vision: VisionProcessor) -> tuple[Sequences, list[list[Any]]]:
    """Six rows: two answer one prompt with an image, one has two images, one none, one the first's tokens with another
    image, and one a video and an image. One answer holds the placeholder's id, sampled as any other. Beside them the
    images' files, of a video a list of them."""
    files = [[picture(0, 56, 84)], [picture(1, 112, 56), picture(2, 70, 70)], [], [picture(3, 56, 84)]]
    files += [[picture(4, 70, 70)]]
    handles = write_images(folder / "rows.parquet", [[{"bytes": file} for file in row] for row in files])
    video = write_film(folder, film(5), sample_fps=3)
    prompts = [
        vision.expand([7, START, IMAGE, STOP, 8, 9], handles[0], 64),
        vision.expand([START, IMAGE, STOP, 10, START, IMAGE, STOP, 11], handles[1], 64),
        vision.expand([12, 13, 14], [], 64),
        vision.expand([7, START, IMAGE, STOP, 8, 9], handles[3], 64),
        vision.expand([15, START, VIDEO, STOP, 16, START, IMAGE, STOP, 17], [*handles[4], video], 64),
    ]
    files[4].insert(0, film(5))
    chosen = [0, 0, 1, 2, 3, 4]
    answers = [[20, IMAGE, 21, 22], [23, 24, 25], [26, 27, 28, 29, 30], [31, 32], [33, 34, 35], [36, 37, 38, 39]]
    count = sum(map(len, answers))
    rows = Sequences(
        prompt_ids_T=torch.tensor([i for p in chosen for i in prompts[p][0]], dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompts[p][0]) for p in chosen]),
        response_ids_T=torch.tensor([i for answer in answers for i in answer], dtype=torch.int32),
        response_length_B=torch.tensor(list(map(len, answers))),
        response_mask_T=torch.ones(count, dtype=torch.bool),
        media=[prompts[p][1] for p in chosen],
    )
    return rows, [files[p] for p in chosen]


def patches_of_film(frames: Sequence[bytes]) -> tuple[Tensor, list[int]]:
    """Patches of a video whose sides need no change, and their grid: Qwen's layout, written out."""
    mean, std = (np.array(x) for x in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]))
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(frame))) for frame in frames])
    scaled = (pixels * (1 / 255)).astype(np.float32)  # float32, as transformers has it
    pixels = ((scaled - mean.astype(np.float32)) / std.astype(np.float32)).transpose(0, 3, 1, 2)  # frames, colors, ...
    grid = [len(frames) // 2, pixels.shape[2] // 14, pixels.shape[3] // 14]
    pixels = pixels.reshape(grid[0], 2, 3, grid[1] // 2, 2, 14, grid[2] // 2, 2, 14)
    return torch.from_numpy(pixels.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 14 * 14)), grid


def oracle(
    model: Any,
    prompt_ids: list[int],
    response_ids: list[int],
    files: Sequence[Any],
    positions: Tensor | None = None,
    fps: float = 3,
) -> Tensor:
    """Log-probs of a response by transformers' own forward of one row: its positions (unless given), its merging of
    features. It would take sampled placeholders for images: other ids with the same embeddings stand for them. fps: of
    videos."""
    others = dict(zip((IMAGE, VIDEO), sorted({*range(80)} - {*prompt_ids, *response_ids}), strict=False))
    answer = [others.get(token, token) for token in response_ids]
    ids = torch.tensor([prompt_ids + answer])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    weight = model.get_input_embeddings().weight
    inputs: dict[str, Any] = {} if positions is None else {"position_ids": positions[:, None]}
    films = [patches_of_film(file) for file in files if isinstance(file, list)]
    if films:
        inputs["pixel_values_videos"] = torch.cat([pixels for pixels, _ in films]).to(weight.dtype)
        inputs["video_grid_thw"] = torch.tensor([grid for _, grid in films])
        if "2_5" in model.config.model_type:
            inputs["second_per_grid_ts"] = torch.tensor([2 / fps] * len(films))
    images = [Image.open(io.BytesIO(file)) for file in files if isinstance(file, bytes)]
    if images:
        settings = {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 112 * 112}
        processed = Qwen2VLImageProcessorPil(**settings)(images=images, return_tensors="pt")
        inputs["pixel_values"] = processed["pixel_values"].to(weight.dtype)
        inputs["image_grid_thw"] = processed["image_grid_thw"]
    kept = weight.data.clone()
    for token in {*response_ids} & {*others}:
        weight.data[others[token]] = weight.data[token]
    mask = torch.ones_like(ids)
    hidden = model.model(input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds, **inputs).last_hidden_state
    weight.data.copy_(kept)
    log_probs = model.lm_head(hidden)[0].log_softmax(-1)
    return torch.stack([log_probs[len(prompt_ids) + i - 1, token] for i, token in enumerate(response_ids)])
