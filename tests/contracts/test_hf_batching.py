"""The hf engine's continuous batches: rows join and leave, nothing is computed twice, no row depends on another.

Most tests make the steps themselves, with the loop paused, so that what happens in which step is exact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.models import zoo
from tests.unit.rollout.tiny import (
    MAX_LEN,
    TOKENIZER_SIZE,
    build_for,
    hf_engines,
    log_probs,
    single_process,
    state,
    tiny_model,
)
from verl_like.config import ModelConfig
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout import hf_batch
from verl_like.rollout import rows as token_rows
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.rollout.hf_batch import Batch
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled, SamplingParams

MODEL, OTHER = tiny_model(), tiny_model(seed=9)
ENDLESS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


Make = Callable[..., HFRolloutEngine]


@pytest.fixture(scope="module")
def make(process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """An engine over the tiny Qwen2, with other settings."""
    with hf_engines(tmp_path_factory.mktemp("model"), MODEL, process) as build:
        yield build


@pytest.fixture(scope="module")
def shared(make: Make) -> HFRolloutEngine:
    return make(max_num_seqs=40)


@pytest.fixture
def engine(shared: HFRolloutEngine) -> HFRolloutEngine:
    assert shared.paused and not shared.has_unfinished()
    if shared.weight_version != 1:
        shared.load_weights(iter(state(MODEL).items()), 1)
    return shared


def request(i: int, prompt: int = 3, sampling: SamplingParams = ENDLESS, **fields: Any) -> GenerationRequest:
    prompt_ids = [(7 * i + 3 * j) % 60 + 1 for j in range(prompt)]
    return GenerationRequest(request_id=f"r{i}", prompt_ids=prompt_ids, sampling=sampling, seed=1000 + i, **fields)


def batches(engine: HFRolloutEngine) -> list[Batch]:
    """What is under way, by forward."""
    return engine._batches


def model_of(engine: HFRolloutEngine) -> Any:
    return engine._module


def steps(engine: HFRolloutEngine, count: int = 10_000) -> dict[str, Completion]:
    """At most so many steps; what ended, in this order."""
    done: dict[str, Completion] = {}
    while count and engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
        count -= 1
    return done


def alone(engine: HFRolloutEngine, asked: GenerationRequest) -> Completion:
    engine.add(asked)
    return steps(engine)[asked.request_id]


def gap(asked: GenerationRequest, sampled: Sampled) -> float:
    """Largest difference between the sampled log-probs and those of the model without a cache."""
    expected = log_probs(MODEL, asked.prompt_ids + sampled.token_ids.tolist())[len(asked.prompt_ids) - 1 :]
    return float((expected - torch.from_numpy(sampled.log_probs)).abs().max())


def churn(
    engine: HFRolloutEngine, seed: int, count: int = 40
) -> tuple[dict[str, GenerationRequest], dict[str, Sampled]]:
    """Requests of all lengths that come in any step, some of which are dropped; what became of each."""
    dice = random.Random(seed)
    asked: dict[str, GenerationRequest] = {}
    got: dict[str, Sampled] = {}
    while len(asked) < count or engine.has_unfinished():
        for _ in range(min(dice.choice([0, 0, 1, 1, 2, 5]), count - len(asked))):
            sampling = SamplingParams(max_tokens=dice.randint(1, 20))
            asked[f"r{len(asked)}"] = request(len(asked), dice.randint(1, 15), sampling)
            engine.add(asked[f"r{len(asked) - 1}"])
        if dice.random() < 0.1 and engine.progress():
            dropped = engine.drop([dice.choice(sorted(engine.progress()))])
            assert [completion.finish_reason for completion in dropped] == ["abort"]
            got |= {completion.request_id: completion.sampled for completion in dropped}
        if engine.has_unfinished():
            got |= {completion.request_id: completion.sampled for completion in engine.step()}
    return asked, got


def test_a_late_request_gets_its_first_token_before_the_others_end(engine: HFRolloutEngine) -> None:
    for i in range(32):
        engine.add(request(i, 1 + i % 5))
    assert not steps(engine, 4)
    engine.add(request(32))
    assert not engine.step()
    tokens = {i: len(sampled) for i, sampled in engine.progress().items()}
    assert tokens == {f"r{i}": 5 for i in range(32)} | {"r32": 1}
    assert len(steps(engine)) == 33


def test_equal_prompts_are_computed_once(engine: HFRolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are taken up together, and also where rows go on from what was drawn before."""
    before = engine.prefilled_tokens
    asked = [dataclasses.replace(request(i % 3, 4 + i % 3), request_id=f"r{i}", seed=i) for i in range(9)]
    for each in asked:
        engine.add(each)
    ended = steps(engine)
    assert engine.prefilled_tokens - before == 4 + 5 + 6
    for each in asked:
        assert gap(each, ended[each.request_id].sampled) < 1e-4
    assert len({ended[each.request_id].sampled.token_ids.tobytes() for each in asked}) == 9


def test_the_same_through_futures(engine: HFRolloutEngine) -> None:
    ended: list[str] = []
    futures = [engine.submit(request(i, sampling=SamplingParams(max_tokens=100))) for i in range(32)]
    engine.open()
    while not any(map(len, engine.snapshot().values())):
        sleep(0.001)
    futures.append(engine.submit(request(32, sampling=SamplingParams(max_tokens=1))))
    for future in futures:
        future.add_done_callback(lambda f: ended.append(f.result().request_id))
    assert [len(future.result(60).sampled) for future in futures] == [100] * 32 + [1]
    engine.pause()
    assert ended[0] == "r32"


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_the_models_after_any_joins_and_leaves(
    engine: HFRolloutEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every row in every step, against one forward pass of the row's tokens alone. Nothing is computed
    twice: as many tokens are prefilled as the prompts have."""
    sample, gaps, sizes = Batch.sample, [0.0], set[int]()

    def checked(self: Batch, logits_bV: Tensor, version: int) -> None:
        sizes.add(len(self.rows))
        assert self.mask_bS.shape[1] == max(len(row.known_ids) for row in self.rows)  # no column that nobody needs
        assert self.cache.get_seq_length() == self.mask_bS.shape[1]
        for row, logits_V in zip(self.rows, logits_bV, strict=True):
            expected_V = MODEL(torch.tensor([row.known_ids])).logits[0, -1, :TOKENIZER_SIZE]
            gaps.append(float((logits_V - expected_V).abs().max() / expected_V.abs().max()))
        sample(self, logits_bV, version)

    monkeypatch.setattr(Batch, "sample", checked)
    before = engine.prefilled_tokens
    asked, got = churn(engine, seed)
    assert max(gaps) < 1e-5
    assert len(sizes) > 4
    never_begun = [i for i, sampled in got.items() if not len(sampled)]
    assert engine.prefilled_tokens - before == sum(
        len(each.prompt_ids) for i, each in asked.items() if i not in never_begun
    )
    whole = {i for i, each in asked.items() if len(got[i]) == each.sampling.max_tokens}
    monkeypatch.undo()
    for i in sorted(whole)[:8]:
        assert alone(engine, asked[i]).token_ids == got[i].token_ids.tolist()


def test_columns_that_no_row_needs_are_cut_off(engine: HFRolloutEngine) -> None:
    engine.add(request(0, 50, SamplingParams(max_tokens=2)))
    engine.add(request(1, 4))
    steps(engine, 1)
    assert batches(engine)[0].cache.get_seq_length() == 50
    steps(engine, 1)
    assert batches(engine)[0].cache.get_seq_length() == batches(engine)[0].mask_bS.shape[1] == 5
    assert gap(request(1, 4), steps(engine)["r1"].sampled) < 1e-5


SHAPES: list[dict[str, Any]] = [
    {},
    {"do_sample": False},
    {"min_tokens": 12, "stop_token_ids": (3, 5, 8, 13, 21)},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"bad_words": tuple((i, j) for i in range(20) for j in (30, 31)), "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_what_is_resumed_goes_on_as_if_nothing_had_happened(
    engine: HFRolloutEngine, shape: dict[str, Any], cut: int
) -> None:
    sampling = dataclasses.replace(ENDLESS, **shape)
    asked = [request(i, 1 + i, sampling) for i in range(6)]
    for each in asked:
        engine.add(each)
    whole = steps(engine)
    before, prefilled = engine.prefilled_tokens, 0
    for each in asked:
        sampled = whole[each.request_id].sampled
        if len(sampled) > cut:
            resume = Sampled.of(sampled.token_ids[:cut].tolist(), sampled.log_probs[:cut].tolist(), 7)
            engine.add(dataclasses.replace(each, resume=resume))
            prefilled += len(each.prompt_ids) + cut
    for i, again in steps(engine).items():
        assert again.token_ids == whole[i].token_ids
        assert again.finish_reason == whole[i].finish_reason
        assert again.log_probs == pytest.approx(whole[i].log_probs, abs=1e-5)
        assert again.sampled.weight_versions.tolist() == [7] * cut + [1] * (len(again.sampled) - cut)
    assert prefilled and engine.prefilled_tokens - before == prefilled


def test_what_is_dropped_comes_with_its_tokens(engine: HFRolloutEngine) -> None:
    for i in range(45):  # five of them wait
        engine.add(request(i))
    steps(engine, 3)
    so_far = engine.progress()
    assert [len(so_far[f"r{i}"]) for i in range(45)] == [3] * 40 + [0] * 5
    dropped = engine.drop(["r2", "r44", "nobody's", "r17"])
    assert {c.request_id: len(c.sampled) for c in dropped} == {"r2": 3, "r17": 3, "r44": 0}
    assert {c.finish_reason for c in dropped} == {"abort"}
    done = steps(engine)
    assert len(done) == 42
    assert max(gap(request(int(i[1:])), completion.sampled) for i, completion in done.items()) < 1e-5
    by_id = {c.request_id: c.sampled for c in dropped}
    assert gap(request(2), by_id["r2"]) < 1e-5
    rest = alone(engine, dataclasses.replace(request(2), resume=by_id["r2"]))
    assert rest.token_ids == alone(engine, request(2)).token_ids
    assert not engine.drop(["r2"])


def test_a_dropped_request_alone_leaves_an_empty_engine(engine: HFRolloutEngine) -> None:
    engine.add(request(0))
    steps(engine, 2)
    assert engine.drop(["r0"])
    assert not engine.has_unfinished() and not engine.progress()


def test_new_weights_draw_the_rest_of_what_is_under_way(engine: HFRolloutEngine) -> None:
    asked = [request(i, 1 + i % 7) for i in range(12)]
    for each in asked:
        engine.add(each)
    steps(engine, 6)
    before, kept = engine.prefilled_tokens, engine.progress()
    engine.load_weights(iter(state(OTHER).items()), 2)
    assert {i: s.token_ids.tolist() for i, s in engine.progress().items()} == {
        i: s.token_ids.tolist() for i, s in kept.items()
    }
    done = steps(engine)
    assert engine.prefilled_tokens - before == sum(len(each.prompt_ids) + 6 for each in asked)
    for each in asked:
        sampled = done[each.request_id].sampled
        assert sampled.weight_versions.tolist() == [1] * 6 + [2] * 18
        assert sampled.token_ids[:6].tolist() == kept[each.request_id].token_ids.tolist()
        tokens, first = each.prompt_ids + sampled.token_ids.tolist(), len(each.prompt_ids) - 1
        old, new = log_probs(MODEL, tokens)[first:], log_probs(OTHER, tokens)[first:]
        assert torch.allclose(torch.from_numpy(sampled.log_probs), torch.cat([old[:6], new[6:]]), atol=1e-5)


def test_a_pause_in_which_weights_arrive(engine: HFRolloutEngine) -> None:
    futures = [engine.submit(request(i, sampling=SamplingParams(max_tokens=100))) for i in range(4)]
    engine.open()
    while not any(len(sampled) > 2 for sampled in engine.snapshot().values()):
        sleep(0.001)
    engine.pause()
    kept = engine.snapshot()
    engine.load_weights(iter(state(OTHER).items()), 2)
    engine.open()
    for i, future in enumerate(futures):
        sampled, count = future.result(60).sampled, len(kept[f"r{i}"])
        assert sampled.weight_versions.tolist() == [1] * count + [2] * (100 - count)
        assert sampled.token_ids[:count].tolist() == kept[f"r{i}"].token_ids.tolist()
    engine.pause()


def test_a_forward_takes_no_more_tokens_than_allowed(make: Make) -> None:
    """Padding counted, also after a load under long responses. A row that is longer alone is computed alone."""
    most, taken = 100, list[int]()
    asked = [request(i, 1 + 23 * i % 67, SamplingParams(max_tokens=50)) for i in range(32)]
    wide, bounded = (
        make(max_num_seqs=32, max_num_batched_tokens=10**6),
        make(max_num_seqs=32, max_num_batched_tokens=most),
    )
    model_of(bounded).model.embed_tokens.register_forward_pre_hook(lambda _, args: taken.append(args[0].numel()))
    lengths = [[len(each.prompt_ids) for each in asked], [len(each.prompt_ids) + 40 for each in asked]]
    done = []
    for engine in (wide, bounded):
        for each in asked:
            engine.add(each)
        assert not steps(engine, 40) and len(batches(engine)) == 1
        engine.load_weights(iter(state(OTHER).items()), 2)
        done.append({i: c.token_ids for i, c in steps(engine).items()})
    assert done[0] == done[1]
    prefills = [[n for n in part if n > 32] for part in (taken[:40], taken[40:])]
    for computed, own in zip(prefills, lengths, strict=True):
        assert max(computed) <= max(most, max(own))
        assert sum(own) <= sum(computed) + 32 < 1.2 * sum(own)
    assert max(lengths[1]) > most > max(lengths[0])


def test_less_priority_numbers_come_first_and_what_lost_its_cache_before_all(make: Make) -> None:
    engine = make(max_num_seqs=2)
    short = SamplingParams(max_tokens=2)
    for i, priority in enumerate([0, 5, 0, -1, 0, 0]):
        engine.add(request(i, sampling=short, priority=priority))
    assert list(steps(engine)) == ["r3", "r0", "r2", "r4", "r5", "r1"]
    engine.add(request(0, sampling=short))
    engine.add(request(1, sampling=short))
    steps(engine, 1)
    engine.load_weights(iter(state(MODEL).items()), 2)
    engine.add(request(2, sampling=short, priority=-9))
    assert list(steps(engine, 1)) == ["r0", "r1"]
    assert list(steps(engine)) == ["r2"]


def test_greedy_with_penalties_beside_rows_that_are_drawn(engine: HFRolloutEngine) -> None:
    """The penalised choice, written down token by token."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    greedy = dataclasses.replace(ENDLESS, do_sample=False, **penalties)
    asked = [request(i, 1 + i, greedy if i % 2 else ENDLESS) for i in range(8)]
    for each in asked:
        engine.add(each)
        engine.step()
    done = steps(engine)
    for each in asked[1::2]:
        tokens = list(each.prompt_ids)
        for token in done[each.request_id].token_ids:
            with torch.no_grad():
                logits = MODEL(torch.tensor([tokens])).logits[0, -1, :TOKENIZER_SIZE]
            drawn = tokens[len(each.prompt_ids) :]
            for known in set(tokens):
                logits[known] *= 1.4 if logits[known] < 0 else 1 / 1.4
                logits[known] -= 0.5 * drawn.count(known) + 0.5 * (known in drawn)
            assert token == int(logits.argmax())
            tokens.append(token)
    for each in asked[::2]:
        assert done[each.request_id].token_ids == alone(engine, each).token_ids


def of_type(name: str, folder: Path, process: ProcessInfo) -> HFRolloutEngine:
    """An engine with random weights of this model type."""
    path = zoo.folder(folder, name)
    model_config = ModelConfig(path=path, use_remove_padding=False)
    engine = build_for("hf", model_config, process, tokenizer_size=zoo.VOCAB, max_model_len=MAX_LEN)
    assert isinstance(engine, HFRolloutEngine)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(zoo.config(name), dtype=torch.float32)
    names, weights = CheckpointNames(model), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        weights |= names.views(name, parameter.detach())
    saved = model.state_dict()
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    engine.load_weights(iter(weights.items()), 1)
    return engine


def assert_churn_is_right(engine: HFRolloutEngine, tolerance: float) -> None:
    asked, got = churn(engine, 5, 25)
    for i, sampled in got.items():
        if len(sampled):
            prompt_ids = asked[i].prompt_ids
            expected = engine.score([prompt_ids + sampled.token_ids.tolist()])[0][len(prompt_ids) - 1 :]
            assert sampled.log_probs.tolist() == pytest.approx(expected, abs=tolerance)


# windows (of 5 tokens) in all layers or in some, with sinks; states of four kinds, also in one layer with attention
TYPES = ["mistral", "gemma3_text", "gpt_oss", "qwen3_next", "jamba", "falcon_h1", "lfm2"]


@pytest.mark.parametrize("name", TYPES)
def test_windows_and_states_join_too(name: str, process: ProcessInfo, tmp_path: Path) -> None:
    engine = of_type(name, tmp_path, process)
    before = engine.prefilled_tokens
    engine.add(request(0, 20))
    steps(engine, 8)
    engine.add(request(1, 2))
    steps(engine, 1)
    assert engine.prefilled_tokens - before == 22 and len(batches(engine)) == 1
    engine.drop(["r0"])  # leaves a cache that is narrower than the window, then wider
    steps(engine)
    assert_churn_is_right(engine, 1e-4)
    engine.shutdown()


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen3_next"])
def test_caches_that_cannot_be_joined_are_decoded_in_turn(
    name: str, process: ProcessInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and states stand here for layers that nobody has taught us to join."""
    monkeypatch.setattr(hf_batch, "JOINABLE", frozenset({"DynamicLayer"}))
    engine = of_type(name, tmp_path, process)
    before = engine.prefilled_tokens
    for i in range(3):
        engine.add(request(2 * i, 9 + i))
        engine.add(request(2 * i + 1, 2))
        steps(engine, 2)
    assert [len(batch.rows) for batch in batches(engine)] == [2, 2, 2]
    assert engine.prefilled_tokens - before == 9 + 10 + 11 + 6
    assert [len(sampled) for sampled in engine.progress().values()] == [6, 6, 4, 4, 2, 2]
    engine.drop(["r2", "r3"])
    assert [len(batch.rows) for batch in batches(engine)] == [2, 2]
    steps(engine)
    assert_churn_is_right(engine, 1e-4)
    engine.shutdown()


def test_tokens_name_the_weights_that_drew_them_also_once_these_are_unloaded(make: Make) -> None:
    engine = make()
    engine.add(GenerationRequest(request_id="r", prompt_ids=[1], sampling=ENDLESS, seed=1))
    engine.step()
    engine.unload()  # as a weight sync does before it finds that the engine is open
    engine.step()
    assert engine.progress()["r"].weight_versions.tolist() == [1, 1]
    engine.drop(["r"])


@pytest.mark.parametrize("where", ["layer", "sampling"])
def test_out_of_memory_halves_the_rows_and_changes_no_token(
    engine: HFRolloutEngine, make: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The real error of the allocator, whenever more than six rows are computed (or sampled) together."""
    asked = [request(i, 2 + i % 5, SamplingParams(max_tokens=4 + i)) for i in range(20)]
    for one in asked:
        engine.add(one)
    expected, small = steps(engine), make(max_num_seqs=40)

    def ask(rows: int) -> None:
        if rows > 6:
            torch.empty(2**47)

    if where == "layer":
        model_of(small).model.layers[1].mlp.register_forward_pre_hook(lambda _, args: ask(len(args[0])))
    else:
        draw = token_rows.draw
        monkeypatch.setattr(token_rows, "draw", lambda rows, uniform: (ask(len(uniform)), draw(rows, uniform))[1])
    for one in asked:
        small.add(one)
    found = steps(small)
    assert small.num_rescues >= 2 and small._max_num_seqs <= 6
    assert {name: c.token_ids for name, c in found.items()} == {name: c.token_ids for name, c in expected.items()}
    if where == "layer":
        small.add(request(30, 3))
        model_of(small).model.layers[0].mlp.register_forward_pre_hook(lambda *_: torch.empty(2**47) and None)
        with pytest.raises(RuntimeError, match="allocate"):
            small.step()  # one row alone
