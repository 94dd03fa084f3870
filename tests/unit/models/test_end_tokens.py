"""What ends a response: the union of the tokenizer, config.json and generation_config.json."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tests.unit.observe import factory
from verl_like.models.loading import end_token_ids, load_generation_config, write_generation_config
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams
from verl_like.rollout.rows import Row

MISSING = object()


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / name)
    return tmp_path


def ends(folder: Path, generation: Any = MISSING, config: Any = MISSING) -> tuple[int, ...]:
    """Of the tiny model, whose tokenizer ends with 1 and has 18 ids."""
    if generation is not MISSING:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    hf_config = AutoConfig.from_pretrained(folder)
    if config is not MISSING:
        hf_config.eos_token_id = config
    return end_token_ids(AutoTokenizer.from_pretrained(folder), hf_config, str(folder), "MODEL")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (MISSING, MISSING, (1,)),  # no such file
        ({}, MISSING, (1,)),
        ({"eos_token_id": None}, None, (1,)),
        ({"eos_token_id": 5}, MISSING, (1, 5)),
        ({"eos_token_id": [7, 1, 5]}, MISSING, (1, 7, 5)),
        ({"eos_token_id": [0, 1]}, MISSING, (1, 0)),  # 0 is the pad token too
        ({"eos_token_id": 5}, [9, 3], (1, 9, 3, 5)),  # each knows one that the others do not
        ({"eos_token_id": [5, 18, 151643, -1]}, MISSING, (1, 5)),
    ],
)
def test_the_union(folder: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    assert ends(folder, generation, config) == expected


def test_what_no_tokenizer_has_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ends(folder, {"eos_token_id": [5, 18]})
    assert f"MODEL={folder}: no token has the eos_token_id [18] of generation_config.json" in caplog.text


@pytest.mark.parametrize("wrong", ["<eos>", [1, "5"], True, 5.0, [[5]], {"id": 5}])
def test_what_is_no_id(folder: Path, wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"MODEL=.*eos_token_id=.* of generation_config.json must be the ids of tokens"
    ):
        ends(folder, {"eos_token_id": wrong})


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"<eos>"', "7", "\ufeff{}", "[" * 100_000])
def test_a_file_that_cannot_be_read(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"MODEL=.*its generation_config.json cannot be used: .*must be an object"):
        ends(folder)


def test_numbers_that_a_tokenizer_leaves_out(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<eos>": 50, "<eot>": 90}, unk_token="<eos>"))
    backend.add_special_tokens(["<eos>", "<eot>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    Qwen2Config(vocab_size=100, eos_token_id=50).save_pretrained(tmp_path)
    assert ends(tmp_path, {"eos_token_id": [90, 40, 2]}) == (50, 90)


def test_none_at_all(folder: Path) -> None:
    bare: Any = SimpleNamespace(eos_token_id=None, __len__=None)
    config = AutoConfig.from_pretrained(folder)
    config.eos_token_id = None
    with pytest.raises(ValueError, match=r"neither the tokenizer nor config.json nor generation_config.json names"):
        end_token_ids(bare, config, str(folder))


def test_a_model_that_sees_has_them_beside_its_text_config(folder: Path) -> None:
    config = Gemma3Config(eos_token_id=[1, 6])  # as gemma-3-4b-it: the text part alone knows 1
    assert end_token_ids(AutoTokenizer.from_pretrained(folder), config, str(folder)) == (1, 6)


def test_vllm_and_transformers_stop_at_these_too(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    theirs = GenerationConfig.from_pretrained(folder)
    params = pytest.importorskip("vllm.sampling_params").SamplingParams()
    params.update_from_generation_config(theirs.to_diff_dict(), 1)  # 1: the tokenizer's
    assert {params._eos_token_id, *params.stop_token_ids} == set(ends(folder)) == {1, 5, 7}


def test_a_trained_model_keeps_them_and_all_else(folder: Path, tmp_path: Path) -> None:
    said = {"eos_token_id": 5, "temperature": 0.6, "top_k": 20}  # which transformers would refuse to save
    (folder / "generation_config.json").write_text(json.dumps(said))
    out = tmp_path / "huggingface"
    out.mkdir()
    (out / "generation_config.json").write_text('{"_from_model_config": true, "eos_token_id": 1, "pad_token_id": 0}')
    write_generation_config(out, str(folder), (1, 5))
    assert load_generation_config(str(out)) == said | {"eos_token_id": [1, 5], "pad_token_id": 0}
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 5]


def test_an_end_token_that_pads_too_ends_once_and_is_trained_once() -> None:
    pad = 0
    row = Row(
        request=GenerationRequest(
            request_id="x", prompt_ids=[pad, 3], sampling=SamplingParams(max_tokens=4, stop_token_ids=(1, pad)), seed=1
        ),
        seed=1,
    )
    reasons = []
    for token in (3, 4, pad):
        row.take(token, -0.5, 0)
        reasons.append(row.end(None))
    assert reasons == [None, None, "stop"] and row.completion("stop").sampled.token_ids.tolist() == [3, 4, pad]
    rollouts = factory.rollouts([[3, 4, pad], [5, 5, 5, 5]])
    assert rollouts.response_ids_BR[0].tolist() == [3, 4, pad, pad]
    assert rollouts.response_mask_BR[0].tolist() == [True, True, True, False]
    assert rollouts.response_ids_T.tolist() == [3, 4, pad, 5, 5, 5, 5]  # what is trained on has no pads
