"""A freshly initialised small Qwen2 model with an existing tokenizer, for trying the trainer on real prompts.

    python recipes/gsm8k/make_small_model.py --tokenizer ../shared/data/tok_qwen25 --output-dir outputs/gsm8k/model

It cannot solve anything: it is there to exercise the real tokenizer, vocabulary and chat template without a download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM


def small_config(tokenizer: PreTrainedTokenizerBase, *, hidden_size: int, num_layers: int) -> Qwen2Config:
    """Heads of size 32 (vLLM's CPU build needs at least that); the vocabulary is the tokenizer's, rounded up to 128."""
    return Qwen2Config(
        vocab_size=-(-len(tokenizer) // 128) * 128,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 64),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not (arguments.tokenizer / "tokenizer.json").is_file():
        raise SystemExit(f"--tokenizer {arguments.tokenizer}: no tokenizer.json there")
    if arguments.hidden_size % 64:
        raise SystemExit(f"--hidden-size {arguments.hidden_size}: must be a multiple of 64 (two heads of size 32)")
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    torch.manual_seed(arguments.seed)
    config = small_config(tokenizer, hidden_size=arguments.hidden_size, num_layers=arguments.num_layers)
    model = Qwen2ForCausalLM(config).float()
    tokenizer.save_pretrained(arguments.output_dir)
    model.save_pretrained(arguments.output_dir)  # the weights come last: recipes look for them
    print(f"{arguments.output_dir}: {model.num_parameters() / 1e6:.1f}M parameters, {config.vocab_size} tokens")


if __name__ == "__main__":
    main()
