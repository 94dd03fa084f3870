"""Model, tokenizer, prompts, reward and trained rows of a benchmark, made on the spot.

Tokens are words, "t3" to "t<vocabulary - 1>": whatever a random model says decodes to text and encodes back to the same
tokens. The reward is the share of a response's words with an even number, so that every group has a spread.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3_5TextConfig, Qwen3MoeConfig

from verl_like.batch import Experience, pad_rows
from verl_like.kit.bench.shapes import ModelShape, Workload

DATA_SOURCE = "bench/even_words"
_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

REWARD = '''"""Share of words with an even number: t2 t3 t4 -> 2/3."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    numbers = [int(word[1:]) for word in solution_str.split() if word.startswith("t") and word[1:].isdigit()]
    return sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)
'''


def write_inputs(folder: Path, shape: ModelShape, workload: Workload, *, num_steps: int, seed: int = 1) -> None:
    """Write folder/{model,tokenizer,train.parquet,reward.py}: random weights, and prompts for `num_steps` steps.

    The tokenizer has a folder of its own: beside a Qwen2 config transformers would split text by Qwen2's rules.
    """
    tokenizer = word_tokenizer(shape.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_model(folder / "model", shape, workload.prompt_length + workload.max_response, seed)
    rows = prompt_rows(shape, workload, num_steps * workload.num_prompts, seed)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)


def write_model(folder: Path, shape: ModelShape, max_length: int, seed: int) -> None:
    """A Hugging Face folder: config and random weights (float32, from `seed`)."""
    config = model_config(shape, max_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)


def model_config(shape: ModelShape, max_length: int) -> Qwen2Config | Qwen3_5TextConfig | Qwen3MoeConfig:
    """The Hugging Face config of a shape. Saved alone it is a model that starts from random weights."""
    head_size, hybrid = shape.hidden_size // shape.num_heads, shape.delta_layers > 0
    kinds = [*["linear_attention"] * shape.delta_layers, "full_attention"]
    more: dict[str, Any] = {
        "layer_types": (kinds * shape.num_layers)[: shape.num_layers],
        "head_dim": head_size,
        **{f"linear_num_{name}_heads": shape.num_heads for name in ("key", "value")},
        **{f"linear_{name}_head_dim": head_size for name in ("key", "value")},
    }
    make, name = (Qwen3_5TextConfig, "Qwen3_5") if hybrid else (Qwen2Config, "Qwen2")
    if shape.num_experts:
        make, name = Qwen3MoeConfig, "Qwen3Moe"
        more = {"head_dim": head_size, "num_experts": shape.num_experts, "num_experts_per_tok": 2}
        more["moe_intermediate_size"] = shape.intermediate_size
    return make(
        architectures=[f"{name}ForCausalLM"],  # SGLang goes by it
        **more if hybrid or shape.num_experts else {},
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=max(max_length, 128),
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=_SPECIAL.index("<eos>"),
        pad_token_id=_SPECIAL.index("<pad>"),
    )


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a word; pad 0, end 1, unknown 2."""
    words = [*_SPECIAL, *(f"t{i}" for i in range(len(_SPECIAL), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_SPECIAL[0], eos_token=_SPECIAL[1], unk_token=_SPECIAL[2]
    )
    fast.chat_template = _TEMPLATE
    return fast


def prompt_rows(shape: ModelShape, workload: Workload, count: int, seed: int) -> list[dict[str, object]]:
    """Random prompts of exactly `workload.prompt_length` tokens in verl's row schema."""
    generator = random.Random(seed)
    ids = range(len(_SPECIAL), shape.vocab_size)
    rows = []
    for index in range(count):
        text = " ".join(f"t{i}" for i in generator.choices(ids, k=workload.prompt_length))
        rows.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": text}],
                "ability": "bench",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    return rows


_FIRST_WORD = 3  # ids below are special tokens


def grouped_rows(workload: Workload, vocab_size: int, *, seed: int, turns: int = 1) -> Experience:
    """Prompts x responses rows in the order of the trainer: the rows of a group are neighbours and share a prompt.

    turns: an agent's. Each response is cut into so many, each of which is a row with all that came before as prompt;
        the first half of a turn is what the agent was shown.
    """
    generator, lengths = torch.Generator().manual_seed(seed), workload.response_lengths(seed)
    texts = [torch.randint(_FIRST_WORD, vocab_size, (k,), generator=generator).tolist() for k in lengths]
    starts = random_prompts(workload, vocab_size, seed=seed)
    rows: list[tuple[int, list[int], list[int]]] = []  # group, prompt, response
    for number, text in enumerate(texts):
        group = number // workload.responses_per_prompt
        for first, end in itertools.pairwise(len(text) * k // turns for k in range(turns + 1)):
            said = first + (end - first) // 2 if turns > 1 else first
            rows += [(group, starts[group] + text[:said], text[said:end])] if end > first else []
    groups, prompts, responses = zip(*rows, strict=True)
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    length_B = torch.tensor([len(response) for response in responses])
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < length_B[:, None]
    return Experience(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=mask_BR,
        group_B=torch.tensor(groups),
        advantages_BR=torch.randn(len(rows), 1, generator=generator).expand_as(mask_BR) * mask_BR,
    )


def random_prompts(workload: Workload, vocab_size: int, *, seed: int) -> list[list[int]]:
    """The prompts alone, each once; another seed gives others."""
    generator, count = torch.Generator().manual_seed(seed), workload.num_prompts
    return torch.randint(_FIRST_WORD, vocab_size, (count, workload.prompt_length), generator=generator).tolist()
