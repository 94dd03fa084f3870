"""A model for the check where none is given: small, and with what long rows meet in large ones."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=., "
WINDOW = 256
DESCRIPTION = f"a tiny Qwen2 made here, random, with a sliding window of {WINDOW} and RoPE scaling (YaRN)"


def write_tiny_model(folder: Path) -> str:
    """Config and character tokenizer of a random Qwen2: sliding window 256 in its second layer, RoPE scaled by YaRN.

    Weights are drawn wide, so that attention is sharp and a wrong position or mask changes the answer.
    """
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(fast) + 3,  # ids that the tokenizer does not know
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        initializer_range=0.12,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    config.save_pretrained(folder)
    return str(folder)
