"""Routes that rollout engines record: of every token, through batches, caches, aborts and other weights; replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contracts.engine_ends import within
from tests.unit.engine import tiny
from tests.unit.models import zoo
from tests.unit.rollout.tiny import build_for
from verl_like.batch import Experience, Prompt, PromptRow, Rollouts
from verl_like.config import EngineKwargsConfig, ModelConfig, RolloutConfig
from verl_like.config.actor import ReplayMode
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import LOG_PROBS
from verl_like.episodes.episode import Episode, Turn
from verl_like.episodes.rows import assemble_rollouts
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams

ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.engines)]
X = 255
R3: dict[str, Any] = {"replay": ReplayMode.R3, "routes_sampled": True}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield tiny.single_process()
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixture(tmp_path_factory.mktemp("models"))


def mixture(folder: Path) -> str:
    """Heads of 64, as vLLM has them; the first layer is dense, so that layers and layers with routers differ."""
    changes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "mlp_only_layers": [0]}
    return zoo.folder(folder, "qwen3_moe", num_hidden_layers=3, num_experts_per_tok=3, **changes)


def ends(name: str, path: str, process: ProcessInfo, dtype: str, **more: Any) -> tuple[FSDPEngine, RolloutEngine]:
    engine = tiny.build_engine(process, path, fsdp=FSDPConfig(dtype=dtype), model={"share_prompts": False}, **R3)
    rollout = build_for(
        name,
        ModelConfig(path=path),
        process,
        tokenizer_size=tiny.VOCAB,
        dtype=dtype,
        enable_rollout_routing_replay=True,
        engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32} if name == "vllm" else {}),
        max_model_len=128,
        **more,
    )
    return engine, rollout


def requests(count: int, length: int, **more: Any) -> list[GenerationRequest]:
    """Prompts of several lengths, of which two each are equal."""
    prompts = [[(7 * i + 3 * j) % tiny.VOCAB for j in range(40 + 9 * (i % 3))] for i in range(count // 2)]
    sampling = SamplingParams(max_tokens=length)
    return [
        GenerationRequest(request_id=f"r{i}", prompt_ids=prompts[i // 2], sampling=sampling, seed=i, **more)
        for i in range(count)
    ]


def rows_of(rollout: RolloutEngine, asked: list[GenerationRequest], least_cached: int = 0) -> Rollouts:
    row = PromptRow(index=0, data_source="", messages=[])
    prompts = [Prompt(ids=r.prompt_ids, row=row, group=i, position=i) for i, r in enumerate(asked)]
    with rollout.opened():
        answers = [future.result() for future in rollout.submit_all(asked)]
    assert sum(answer.cached_tokens for answer in answers) >= least_cached
    turns = [Turn.of(prompt.ids, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return assemble_rollouts(prompts, [[Episode(turns=(turn,))] for turn in turns])


def experience(rows: Rollouts) -> Experience:
    columns = {name: value for name, value in rows.columns().items() if name in Experience.__dataclass_fields__}
    return Experience(advantages_T=torch.randn(len(rows.response_ids_T)), **columns)


def check_routes(rows: Rollouts, model: Any) -> None:
    """Assert that the routes are those of transformers' model, each row alone; none of a row's last token."""
    assert rows.routes_T is not None
    each = rows.routes_T.split(rows.num_tokens_B().tolist())
    for number, (row, routes) in enumerate(zip(rows.split([1] * len(rows)), each, strict=True)):
        ids = torch.cat([row.prompt_ids_T, row.response_ids_T]).long()[None]
        with torch.no_grad():
            logits = model(input_ids=ids, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(3).indices for layer in logits], 1)
        found, wanted = routes[:-1].sort(-1).values, expected[:-1].sort(-1).values.byte()
        assert bool((routes[-1] == X).all()) and torch.equal(found, wanted), number


@pytest.mark.parametrize("name", ENGINES)
def test_every_token_of_every_response_has_the_routes_it_went(
    process: ProcessInfo, path: str, name: str, tmp_path: Path
) -> None:
    """In float32 those of transformers' model, each row alone; of a prompt's second response, whose prompt is cached,
    too. Aborted, resumed under other weights, a response keeps the routes of its tokens."""
    engine, rollout = ends(name, path, process, "float32")
    sync = within(engine, rollout, RolloutConfig(), process)
    sync(1)
    rows = rows_of(rollout, requests(8, 12), least_cached=64 if name == "vllm" else 0)
    engine.export_hf(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert rows.routes_T is not None and rows.routes_T.shape[1:] == (2, 3)
    assert rows.routes_T.nbytes <= 2 * 3 * int(rows.num_tokens_B().sum())
    check_routes(rows, model)
    pending = [rollout.submit_all([each])[0] for each in requests(2, 60)]
    with rollout.opened():
        while any(len(sampled) < 5 for sampled in rollout.snapshot().values()):
            pass
    options: Any = {"loss_fn": tiny.PolicyLoss(), "denominators": tiny.denominators(experience(rows))}
    engine.train_minibatch(experience(rows), rule=tiny.ONE_BATCH, **options)
    sync(2)
    with rollout.opened():
        while any(len(sampled) < 30 for sampled in rollout.snapshot().values()):
            pass
        rollout.abort(["r0"])
        first, other = (future.result() for future in pending)
    again = requests(2, 60, resume=first.sampled)[:1]
    with rollout.opened():
        resumed = rollout.submit_all(again)[0].result()
    for answer in (other, resumed):
        assert len(answer.sampled) == 60 and set(answer.sampled.weight_versions.tolist()) == {1, 2}
        routes = answer.sampled.routes
        assert routes is not None and len(routes) == 40 + 59 and int(routes.max()) < 8
    assert np.array_equal(resumed.sampled.routes[: len(first.sampled.routes)], first.sampled.routes)  # type: ignore[index]
    rollout.shutdown()


@pytest.mark.engines
def test_a_prompt_that_begins_in_blocks_of_the_same_step(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """vLLM shares blocks when it plans a step, so that a request may need routes of one behind it in the batch."""
    narrow = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
    engine, rollout = ends("vllm", path, process, "float32", **narrow)
    within(engine, rollout, RolloutConfig(), process)(1)
    engine.export_hf(str(tmp_path))
    draw = random.Random(0)
    asked = list[GenerationRequest]()
    for group in range(24):
        prompt = [draw.randrange(tiny.VOCAB) for _ in range(draw.choice([65, 81, 97, 100]))]
        for each in range(4):
            sampling = SamplingParams(max_tokens=draw.choice([2, 3, 5, 9, 14]))
            number = 4 * group + each
            asked.append(GenerationRequest(request_id=f"r{number}", prompt_ids=prompt, sampling=sampling, seed=number))
    check_routes(rows_of(rollout, asked), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    rollout.shutdown()


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_replayed_is_what_the_engine_did(process: ProcessInfo, path: str, name: str) -> None:
    """In bfloat16: hooks in the experts see the engine's routes, in forward and recomputation; live ones differ. The
    log-probs come nearer to the engine's; routes of the next token do the opposite."""
    engine, rollout = ends(name, path, process, "bfloat16")
    within(engine, rollout, RolloutConfig(), process)(1)
    rows = rows_of(rollout, requests(8, 24))
    assert rows.routes_T is not None
    order = torch.sort(rows.num_tokens_B() - 1, stable=True).indices.tolist()
    each = rows.routes_T.split(rows.num_tokens_B().tolist())
    wanted = torch.cat([each[row][:-1] for row in order]).long()
    calls: dict[int, list[Tensor]] = {0: [], 1: []}
    for layer, part in enumerate(part for part in engine.model.modules() if hasattr(part, "gate_up_proj")):
        if layer < 2 and part.gate_up_proj.ndim == 3:
            part.register_forward_pre_hook(partial(note, calls[layer]))
    minibatch_gradients(
        engine, experience(rows), tiny.PolicyLoss(), tiny.denominators(experience(rows)), rule=tiny.ONE_BATCH
    )
    for layer, seen in calls.items():
        assert seen and all(torch.equal(call, wanted[:, layer]) for call in seen)
    shifted = rows.replace(routes_T=rows.routes_T.roll(1, 0))
    gaps = [gap(engine, given) for given in (rows, rows.with_routes(None), shifted)]
    assert gaps[0] < gaps[1] < gaps[2] and gaps[2] > 2 * gaps[1]
    rollout.shutdown()


def note(calls: list[Tensor], _: Any, given: tuple[Tensor, ...]) -> None:
    calls.append(given[1].clone())


def gap(engine: FSDPEngine, rows: Rollouts) -> float:
    trained_T = engine.forward(rows, want=frozenset({LOG_PROBS}), rule=tiny.ONE_BATCH)[LOG_PROBS]
    return float((trained_T - rows.rollout_log_probs_T).abs().mean())  # type: ignore[operator]
