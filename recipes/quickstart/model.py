"""A small Qwen2 model and a character tokenizer, made on the spot: nothing is downloaded.

The tokenizer knows digits, a few operators and an end token. Its chat template only joins the message texts, so that
the prompt [{"role": "user", "content": "37+58="}] becomes the tokens of "37+58=".
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-*= "
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
JOIN_MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character. Ids: pad 0, eos 1, unknown 2, then the characters in order."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    fast.chat_template = JOIN_MESSAGES
    return fast


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 128, num_layers: int = 3, seed: int = 1
) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 with heads of size 32, the smallest that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def save_checkpoint(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write model and tokenizer as one Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
