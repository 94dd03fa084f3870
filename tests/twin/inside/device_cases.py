"""What the rest of the trainer does on cuda:0: figures, profiles, streams of threads, checks of a start, meters."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from tests.twin import as_cpu, stand_in
from tests.unit.rollout.test_step_loop import CountingEngine
from tests.unit.rollout.test_vllm_sleep import Recorder
from verl_like.cluster import local, resources
from verl_like.cluster.worker_group import RankEnv
from verl_like.config import PPOConfig, ProfilerConfig
from verl_like.config.reward import RewardRolloutConfig
from verl_like.config.trainer import ProfileTool
from verl_like.engine import state
from verl_like.kit.bench import ranks
from verl_like.kit.bench.meters import LiveBytes
from verl_like.kit.bench.report import hardware
from verl_like.kit.forecast import machine, memory
from verl_like.models import attention
from verl_like.models.attention_groups import Scoring, grouped_attention
from verl_like.models.blocks import check_compiler
from verl_like.models.fused_linear import _matmul
from verl_like.models.lean_model import check_liger
from verl_like.models.packing import Segments
from verl_like.observe.memory import PhaseMemory
from verl_like.observe.metrics import memory_metrics
from verl_like.parallel import device_peak, dist, sharding
from verl_like.plugins.reward_models import server
from verl_like.plugins.sglang import compat as sglang_compat
from verl_like.plugins.sglang.engine import SGLangRolloutEngine
from verl_like.plugins.vllm import compat
from verl_like.plugins.vllm.engine import VLLMRolloutEngine
from verl_like.rollout.base import preserve_rng
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams
from verl_like.rollout.step_loop import StepLoop
from verl_like.trainer.facts import resolve_world
from verl_like.trainer.nsight import check_nsight
from verl_like.weight_sync import broadcast
from verl_like.workers.host import WorkerProfiler

CUDA = torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def card() -> Iterator[stand_in.Card]:
    as_cpu.forget()
    yield stand_in.card()
    assert as_cpu.faults() == []


# --- figures ----------------------------------------------------------------------------------------------------------


def test_memory_metrics_are_the_cards(card: stand_in.Card) -> None:
    torch.cuda.reset_peak_memory_stats()
    held = torch.zeros(1 << 20, device=CUDA)
    more = torch.zeros(1 << 20, device=CUDA)
    del more
    found = memory_metrics()
    assert found["perf/max_memory_allocated_gb"] * GIB == torch.cuda.max_memory_allocated() >= 2 * held.nbytes
    assert found["perf/max_memory_reserved_gb"] == found["perf/max_memory_allocated_gb"]
    assert found["perf/memory_used_fraction"] == torch.cuda.max_memory_reserved() / card.capacity


def test_the_watch_of_a_phase_counts_its_own_bytes(card: stand_in.Card) -> None:
    kept = torch.zeros(1 << 20, device=CUDA)
    memory_of, before = PhaseMemory(CUDA), torch.cuda.memory_allocated()
    with memory_of.phase("a", without=before):
        torch.zeros(1 << 18, device=CUDA)
    assert memory_of.take() == {"perf/memory_peak/a": (1 << 20) / GIB}
    with LiveBytes(CUDA) as live:
        torch.zeros(1 << 16, device=CUDA)
    assert live.peak == 1 << 18
    assert kept.is_cuda


def test_the_peak_is_the_data_sheets_or_measured(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = device_peak.device_peak(CUDA, torch.bfloat16)
    assert sheet.source == "data sheet" and sheet.flops == 989e12 and sheet.bandwidth == 4.8e12
    seen = []
    monkeypatch.setattr(device_peak, "measured_peak", lambda device, dtype: seen.append(device))
    device_peak.device_peak(CUDA, torch.float32)
    assert seen == [CUDA]
    monkeypatch.undo()
    waited, work = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(len(work)))
    device_peak._best_seconds(lambda: work.append(1), CUDA, repeats=2)
    assert waited == [0, 1, 1, 2]  # before and after each


def test_a_benchmark_tells_the_card_and_waits_for_it(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware() == {"device": "NVIDIA H200", "devices": card.devices}
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    ranks._wait(CUDA)
    assert waited == [CUDA]


def test_doctor_and_forecast_know_the_card(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(machine._devices())
    assert found[0].name == "cuda:0" and "NVIDIA H200" in found[0].text and found[0].status == "ok"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Unheard")
    assert any("it is measured at the start" in each.text for each in machine._devices())
    assert memory.this_machine("cuda", 1, 1).capacity == card.capacity


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_trace_asks_for_the_cards_kernels(
    card: stand_in.Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_like.workers import host

    asked: list[Any] = []
    real = host.profile

    def profile(activities: list[Any]) -> Any:
        asked.extend(activities)
        return real(activities=activities[:1])  # a CPU build refuses the other

    monkeypatch.setattr(host, "profile", profile)
    recorder = WorkerProfiler({"actor": ProfilerConfig()}, rank=0, device=CUDA, folder=tmp_path, tool=ProfileTool.torch)
    recorder.start(3)
    with recorder.phase("actor", "update"):
        torch.ones(2, device=CUDA).sum()
    recorder.stop()
    assert [each.name for each in asked] == ["CPU", "CUDA"]
    with gzip.open(tmp_path / "step_3" / "rank0.json.gz") as file:
        assert any(event.get("name") == "verl_like::actor.update" for event in json.load(file)["traceEvents"])


def test_nsight_records_between_start_and_stop(card: stand_in.Card, tmp_path: Path) -> None:
    recorder = WorkerProfiler(
        {"actor": ProfilerConfig(discrete=True)}, rank=0, device=CUDA, folder=tmp_path, tool=ProfileTool.nsys
    )
    recorder.start(1)
    before = card.calls.copy()
    with recorder.phase("actor", "update"):
        assert card.calls["profiler.start"] == before["profiler.start"] + 1
        assert card.calls["profiler.stop"] == before["profiler.stop"]
    assert card.calls["profiler.stop"] == before["profiler.stop"] + 1
    recorder.stop()


def test_nsight_needs_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PPOConfig()
    config.trainer.profile_steps, config.trainer.profile_tool = [1], ProfileTool.nsys
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="no program nsys on the PATH"):
        check_nsight(config, "cuda")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    check_nsight(config, "cuda")


# --- processes, threads, random numbers -------------------------------------------------------------------------------


def test_a_rank_takes_its_own_device() -> None:
    process = dist.init_distributed(0, 1, 0, 1, "127.0.0.1", 0, "cuda", 60.0)
    try:
        assert process.device == CUDA and torch.cuda.current_device() == 0
        total = torch.ones(3, device=CUDA)
        torch.distributed.all_reduce(total)
        assert total.is_cuda and total.tolist() == [1.0] * 3
    finally:
        dist.shutdown_distributed()


def test_the_step_thread_works_on_the_stream_of_its_maker(card: stand_in.Card) -> None:
    streams: list[Any] = []

    class Engine(CountingEngine):
        def step(self) -> list[Any]:
            streams.append(torch.cuda.current_stream())
            return super().step()

    chosen = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(chosen):
        loop = StepLoop(Engine(), device=CUDA)
    loop.open()
    sampling = SamplingParams(max_tokens=3)
    loop.submit(GenerationRequest(request_id="a", prompt_ids=[1], sampling=sampling, seed=0)).result(60)
    loop.close()
    assert set(streams) == {chosen} and torch.cuda.current_stream() is torch.cuda.default_stream()


def test_random_states_are_saved_and_put_back(card: stand_in.Card) -> None:
    with preserve_rng():
        expected = torch.rand(3, device=CUDA)
    assert torch.equal(torch.rand(3, device=CUDA), expected)
    saved = state._rng_state()
    assert saved["cuda"] is not None
    expected = torch.rand(3, device=CUDA)
    state._set_rng_state(saved)
    assert torch.equal(torch.rand(3, device=CUDA), expected)


def test_memory_is_given_back_to_others(card: stand_in.Card) -> None:
    before = card.calls["empty_cache"]
    sharding.release(torch.device("cpu"))
    sharding.release(CUDA)
    compat.free()
    assert card.calls["empty_cache"] == before + 2


# --- a start ----------------------------------------------------------------------------------------------------------


def test_the_world_is_that_of_the_cards(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PPOConfig()
    assert resolve_world(config) == ("cuda", card.devices)
    config.trainer.device = cast(Any, "cuda")
    monkeypatch.setattr("verl_like.trainer.facts.has_further_pools", lambda config: True)
    with pytest.raises(ValueError, match="takes every GPU of a machine"):
        resolve_world(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device here"):
        resolve_world(config)


def test_the_users_choice_of_devices_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankEnv(
        **{**dict.fromkeys(RankEnv.__dataclass_fields__, 0), "device": "cuda", "master_address": "127.0.0.1"}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert local._variables(rank)["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES" not in local._variables(rank)


def test_a_rank_reserves_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resources, "_could_fit", lambda nnodes, bundle: asked.append(bundle))
    monkeypatch.setattr(resources, "_explain", lambda *_, **__: "no room")
    with pytest.raises(resources.ResourcesError):
        resources.allocate(1, 2, cpus_per_rank=3, device="cuda", timeout=1, may_grow=False)
    assert asked == [{"CPU": 6.0, "GPU": 2.0}]


def test_kernels_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(CUDA)
    known = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="qwen2"))
    check_liger(cast(Any, known), CUDA)
    unknown = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="unheard"))
    with pytest.raises(ValueError, match="not available for model type 'unheard'"):
        check_liger(cast(Any, unknown), CUDA)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'verl_like"):
        check_liger(cast(Any, known), CUDA)
    with pytest.raises(ValueError, match="needs the triton package"):
        check_compiler(CUDA)


def test_a_reward_models_server_gets_its_devices() -> None:
    assert server.server_environment("cuda", "1,2")["CUDA_VISIBLE_DEVICES"] == "1,2"
    rollout = RewardRolloutConfig(name="sglang", enforce_eager=False, cudagraph_capture_sizes=[1, 2])
    module, options, _ = server.sglang(rollout, "/model", "cuda")
    assert module == "sglang.launch_server" and options["cuda-graph-bs-decode"] == [1, 2]


# --- models and engines -----------------------------------------------------------------------------------------------


def test_attention_of_groups_repeats_shared_keys(card: stand_in.Card) -> None:
    """float32 on the card, by SDPA without grouped queries, as on a CPU: values and gradients."""
    results = []
    for device in (torch.device("cpu"), CUDA):
        g = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, h, 90, 16, generator=g).to(device).requires_grad_() for h in (4, 2, 2)]
        output = grouped_attention(*inputs, Segments([40, 1, 49], device), Scoring(window=7))  # type: ignore[misc]
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert results[1][0].is_cuda
    for expected, found in zip(*results, strict=True):
        assert float((found.cpu() - expected).abs().max() / expected.abs().max()) < 1e-6


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("package", [None, "flash_attn", "flash_attn_interface"])
def test_packed_attention_asks_the_kernel_that_is_there(
    card: stand_in.Card, package: str | None, sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16: torch's varlen operator, which sinks always need, FlashAttention 2, or 3; each with what it needs."""
    seen: list[dict[str, Any]] = []

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.append(options)
        bounds = [options[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))  # torch 2.11 has no grouped queries here
        output = varlen_attn(q, k, v, *bounds, window_size=options["window_size"])
        return (output, None) if package == "flash_attn_interface" else output

    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        if name in ("flash_attn", "flash_attn_interface"):
            return SimpleNamespace(origin="here") if name == package else None
        return real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    if package is not None:
        module = cast(Any, ModuleType(package))
        module.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, package, module)
    attention.flash_attention_version.cache_clear()
    try:
        g, segments = torch.Generator().manual_seed(0), Segments([40, 1, 49], CUDA)
        exact = [torch.randn(1, h, 90, 16, generator=g).bfloat16().to(CUDA).requires_grad_() for h in (4, 2, 2)]
        given = {"s_aux": None if sinks is None else sinks.to(CUDA).requires_grad_()}
        found, _ = attention.packed_attention(nn.Identity(), *exact, None, segments=segments, sliding_window=7, **given)  # type: ignore[misc]
        floats = [t.detach().float().requires_grad_() for t in exact]
        expected = grouped_attention(*floats, segments, Scoring(window=7, sinks=given["s_aux"]))[None]  # type: ignore[misc]
    finally:
        attention.flash_attention_version.cache_clear()
    if sinks is not None:  # through the operator's own backward, with arguments of our own
        weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(CUDA)
        theirs = torch.autograd.grad((expected * weight).sum(), [*floats, given["s_aux"]])
        for a, b in zip(torch.autograd.grad((found * weight).sum(), [*exact, given["s_aux"]]), theirs, strict=True):
            assert float((a.float() - b).norm() / b.norm()) < 0.02
    assert found.dtype == torch.bfloat16 and found.is_cuda
    assert float((found.float() - expected).norm() / expected.norm()) < 0.01
    assert [each["window_size"] for each in seen] == ([] if package is None or sinks is not None else [(6, 0)])


def test_values_narrower_than_keys_are_filled_up_for_the_kernel(card: stand_in.Card) -> None:
    """Latent attention: 24 numbers of a key, 16 of a value; against the CPU's own blocks."""
    g, lengths = torch.Generator().manual_seed(0), [40, 1, 49]
    halves = [torch.randn(1, 4, 90, size, generator=g).bfloat16() for size in (24, 24, 16)]
    on_card, on_host = Segments(lengths, CUDA), Segments(lengths, torch.device("cpu"))
    found, _ = attention.packed_attention(nn.Identity(), *(t.to(CUDA) for t in halves), None, segments=on_card)  # type: ignore[misc]
    expected = grouped_attention(*(t.float() for t in halves), on_host, Scoring())[None]  # type: ignore[misc]
    assert found.shape == (1, 90, 4, 16)
    assert float((found.float().cpu() - expected).norm() / expected.norm()) < 0.01


def test_dropout_needs_flash_attention(card: stand_in.Card) -> None:
    q, k, v = (torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16, device=CUDA) for _ in range(3))
    with pytest.raises(ValueError, match="needs flash-attn: install it"):
        attention._varlen(q, k, v, Segments([5], CUDA), Scoring(dropout=0.1))


def test_products_of_halves_into_float32(card: stand_in.Card) -> None:
    a, b = torch.randn(5, 7, device=CUDA).bfloat16(), torch.randn(7, 3, device=CUDA).bfloat16()
    found = _matmul(a, b, torch.float32)
    assert found.dtype == torch.float32 and found.is_cuda
    assert torch.equal(found, a.float() @ b.float())


def test_a_broadcast_that_nobody_takes_ends_at_the_deadline(card: stand_in.Card) -> None:
    aborted: list[int] = []
    work = SimpleNamespace(is_completed=lambda: False)
    group = SimpleNamespace(broadcast=lambda data, options: work, abort=lambda: aborted.append(1))
    with pytest.raises(RuntimeError, match="waited for until the deadline"):
        broadcast._broadcast(group, torch.zeros(2, device=CUDA), cast(Any, SimpleNamespace(left=0.0)))
    assert aborted == [1]


class Engine(VLLMRolloutEngine):
    """vLLM's engine around a recorder in vLLM's place."""

    def __init__(self) -> None:
        self._llm, self._model = cast(Any, Recorder()), cast(Any, nn.Linear(1, 1))
        self._sleep_mode, self._asleep, self._version = True, set(), None
        self.keeps_adapters, self._running = False, {}
        self._loop = StepLoop(self, device=CUDA)


def test_vllm_sleeps_and_wakes(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "reload", lambda llm, stream: None)
    monkeypatch.setattr(compat, "drop_caches", lambda llm: None)
    monkeypatch.setattr(compat, "stop", lambda llm: None)
    engine, before = Engine(), card.calls["empty_cache"]
    engine.sleep()
    assert engine._asleep
    engine.load_weights([], version=1)
    engine.wake()
    assert engine._llm.events == ["sleep", "weights", "kv_cache"] and not engine._asleep
    assert card.calls["empty_cache"] == before + 2  # before each wake
    engine.shutdown()


def test_vllm_stays_on_the_stream_it_starts_on(card: stand_in.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM moves a thread that has chosen no stream to a new one: the start chooses the current one."""
    chosen = torch.cuda.current_stream(CUDA)
    llm = SimpleNamespace(llm_engine=None, collective_rpc=lambda work: [None])
    module = cast(Any, ModuleType("vllm"))
    module.LLM = lambda **_: llm
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("require_engine", "_leave_global_generators_alone"):
        monkeypatch.setattr(compat, name, lambda *_: None)
    monkeypatch.setattr(compat, "_executor_class", lambda *_: None)
    assert card.here.stream is None
    compat.start({}, device=CUDA, run_id="twin")
    assert card.here.stream is chosen
    card.here.stream = None


def test_sglang_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    engine = SGLangRolloutEngine.__new__(SGLangRolloutEngine)
    engine._sleep_mode, engine._asleep = True, set()
    engine._scheduler = engine._loop = None  # type: ignore[assignment]
    monkeypatch.setattr(SGLangRolloutEngine, "_exclusive", lambda self: as_cpu.nullcontext())
    monkeypatch.setattr("verl_like.rollout.base.RolloutEngine.sleep", lambda self, discard=False: None)
    monkeypatch.setattr(sglang_compat, "alone", lambda scheduler: as_cpu.nullcontext())
    monkeypatch.setattr(sglang_compat, "release", lambda scheduler, tags: released.extend(tags))
    engine.sleep()
    engine.sleep()
    assert sorted(released) == sorted(engine._asleep) and released


def test_sglang_lets_go_of_memory_by_its_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = SimpleNamespace(configure_subprocess=lambda: as_cpu.nullcontext("saver"))
    monkeypatch.setattr(sglang_compat, "_import", lambda name, what_for: saver)
    with sglang_compat.starting(CUDA, sleeps=True) as found:
        assert found == "saver"
    layer = SimpleNamespace(w2_weight=torch.zeros(2, device=CUDA))
    assert sglang_compat.unpacked_experts(cast(nn.Module, layer)) is None
