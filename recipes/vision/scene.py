"""Pictures of a disc, and a tiny Qwen2-VL that looks at them: all made on the spot.

A picture has 56 x 56 pixels, which the model sees as four tokens. On a grey ground of random brightness, with specks of
all colours, stands a disc of one of six colours, anywhere, large or small. "color of disc?" is answered by one word.
"""

from __future__ import annotations

import io
import random
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
SIDE, PATCH = 56, 14  # pixels; two by two patches become one token
WORDS = ["<pad>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<unk>"]
WORDS += ["color of disc?", *COLORS]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


QUESTION = "<image>color of disc?"


def picture(color: str, rng: random.Random) -> bytes:
    """A random one, as a PNG file."""
    ground = rng.randint(70, 170)
    image = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = rng.randrange(SIDE - 3), rng.randrange(SIDE - 3)
        pen.rectangle((left, top, left + 2, top + 2), fill=rng.choice(list(COLORS.values())))
    size = rng.randint(14, 30)
    left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
    pen.ellipse((left, top, left + size, top + size), fill=COLORS[color])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of WORDS."""
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    whole.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": WORDS[2:6]})
    fast.add_tokens([AddedToken(word, normalized=False) for word in WORDS[7:]])
    fast.chat_template = TEMPLATE
    return fast


def build_processor() -> Qwen2VLImageProcessorPil:
    """Of pictures of this size."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=28 * 28, max_pixels=112 * 112
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2VLForConditionalGeneration:
    """A new one, with heads of size 32, the smallest that vLLM's CPU attention takes."""
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
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
            "patch_size": PATCH,
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
