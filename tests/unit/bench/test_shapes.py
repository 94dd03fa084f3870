"""Workloads: lengths as promised, inputs that decode and encode back."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.unit.bench.tiny import MODEL
from verl_like.kit.bench.inputs import REWARD, model_config, word_tokenizer, write_inputs
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, Workload
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_tokenizer


@pytest.mark.parametrize("name", [name for name, load in WORKLOADS.items() if load.mean_response is not None])
def test_drawn_lengths_have_the_mean_and_the_bound(name: str) -> None:
    load = WORKLOADS[name]
    assert load.mean_response is not None
    lengths = load.draw_lengths(seed=3)
    assert len(lengths) == 512 and min(lengths) >= 1 and max(lengths) <= load.max_response
    assert sum(lengths) / 512 == pytest.approx(load.mean_response, rel=0.005)
    assert max(lengths) > 2 * load.mean_response  # a tail, as real responses have
    assert lengths == load.draw_lengths(seed=3) != load.draw_lengths(seed=4)


def test_inputs_are_a_run_of_the_trainer(tmp_path: Path) -> None:
    load = Workload(num_prompts=2, responses_per_prompt=2, prompt_length=5, mean_response=None, max_response=8)
    write_inputs(tmp_path, MODEL, load, num_steps=3)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert len(rows) == 6
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], tokenize=True, return_dict=False)
        assert len(ids) == 5 and min(ids) > 2
        assert tokenizer.decode(ids) == row["prompt"][0]["content"]


def test_a_config_alone_names_its_class() -> None:
    assert model_config(MODEL, 8).architectures == ["Qwen2ForCausalLM"]  # by which SGLang finds the model


def test_reward_is_the_share_of_even_words() -> None:
    scope: dict = {}
    exec(REWARD, scope)
    text = word_tokenizer(20).decode([4, 5, 6, 7, 1], skip_special_tokens=True)
    assert scope["compute_score"]("", text, "") == 0.5
    assert scope["compute_score"]("", "", "") == 0.0


def test_the_cpu_shape_is_the_one_that_figures_are_quoted_for() -> None:
    from transformers import Qwen2Config

    shape = MODELS["cpu"]
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tied_embeddings,
    )
    assert ModelCost.of(config).all_weights == pytest.approx(4.8e6, rel=0.02)
