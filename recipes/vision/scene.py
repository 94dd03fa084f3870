"""Pictures of a disc and a square, the questions about them, and a tiny Qwen2-VL that looks at them: all made on the spot.

A picture has 2 x 2 cells of 28 pixels, which the model sees as four tokens. Disc and square stand in two of the cells,
somewhere inside, in two of six colours, on a grey ground of random brightness. "color of disc?" is answered by one word.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 190),
    "white": (250, 250, 250),
}
SHAPES = ("disc", "square")
CELL = 28  # pixels: what becomes one token
WORDS = ["<pad>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<unk>"]
WORDS += ["color of ", "?", *SHAPES, *COLORS]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """colors: of disc and square. asked: which of them the question is about."""

    colors: tuple[str, str]
    asked: int
    picture: bytes

    @property
    def question(self) -> str:
        return f"<image>color of {SHAPES[self.asked]}?"

    @property
    def answer(self) -> str:
        return self.colors[self.asked]


def scene(rng: random.Random) -> Scene:
    """A random one."""
    ground = rng.randint(90, 150)
    image = Image.new("RGB", (2 * CELL, 2 * CELL), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    first, second = rng.sample(list(COLORS), 2)
    for shape, color, cell in zip(SHAPES, (first, second), rng.sample(range(4), 2), strict=True):
        size = rng.randint(14, 20)
        left, top = (CELL * place + rng.randint(1, CELL - size - 1) for place in (cell % 2, cell // 2))
        draw = pen.ellipse if shape == "disc" else pen.rectangle
        draw((left, top, left + size, top + size), fill=COLORS[color])
    file = io.BytesIO()
    image.save(file, "PNG")
    return Scene(colors=(first, second), asked=rng.randrange(2), picture=file.getvalue())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of WORDS."""
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    whole.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": WORDS[2:6]})
    fast.add_tokens([AddedToken(word, normalized=False) for word in WORDS[7:]])
    fast.chat_template = TEMPLATE
    return fast


def build_processor() -> Qwen2VLImageProcessorPil:
    """Of pictures of this size."""
    return Qwen2VLImageProcessorPil(
        patch_size=CELL // 2, merge_size=2, temporal_patch_size=2, min_pixels=CELL**2, max_pixels=(4 * CELL) ** 2
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2VLForConditionalGeneration:
    """A new one, with heads of size 32, the smallest that vLLM's CPU attention takes."""
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        tie_word_embeddings=True,
        image_token_id=WORDS.index("<|image_pad|>"),
        video_token_id=WORDS.index("<|video_pad|>"),
        vision_start_token_id=WORDS.index("<|vision_start|>"),
        vision_end_token_id=WORDS.index("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def save(folder: Path, model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """One Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_processor().save_pretrained(folder)
