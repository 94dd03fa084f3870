"""Which tests of tests/gpu run without a card, at which sizes, and which do not, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# test -> why it is left out; the beginning of its name is enough
LEFT_OUT = {
    "test_memory_gpu.py::test_a_model_of_1_5b": "1.5 billion parameters",
    "test_fused_triton_gpu.py": "Triton's kernels, which are compiled ahead elsewhere; a head of 152k ids",
    "test_liger_gpu.py": "Liger's kernels are Triton's",
    "test_train_engine_gpu.py::test_recomputed_and_compiled_layers_keep_the_gradient[compiled]": "inductor's kernels",
    "test_memory_forecast_gpu.py": "models of 0.5 billion parameters, whose memory is measured",
    "test_main_job_gpu.py": "vLLM on a card, a model of 0.5 billion parameters",
    "test_async_gpu.py": "vLLM on a card",
    "test_router_replay_gpu.py": "vLLM on a card",
    "test_tinker_server_gpu.py": "not tried on the stand-in; its tests without a card are tests/unit/tinker_server",
    "test_vllm_drafts_gpu.py": "vLLM on a card",
    "test_pools_gpu.py": "vLLM on a card, with a second one",
    "test_engines_gpu.py": "vLLM's and SGLang's own kernels and servers on a card",
    "test_rollout_gpu.py::test_all_names_of_vllm_are_there": "vLLM on a card",
    "test_vision_gpu.py::test_engines_see_the_same": "vLLM and SGLang on a card",
    "test_vision_gpu.py::test_packed_rows_as_on_a_cpu[dtype1": "half precision of the tower costs a CPU a minute",
}
# parametrised by engine: those with an engine that needs a card
ENGINES = ("vllm", "sglang")
# (file, test) -> how many of its parameters' cases run here; the rest are the same lines again
FEWER = {
    ("test_attention_gpu.py", "test_values_and_gradients"): ("[4-1-256-None-None]", "[8-8-64-3-30.0]"),
    ("test_memory_gpu.py", "test_activation_offload_moves_bytes_and_keeps_the_gradient"): ("[True]",),
    ("test_memory_gpu.py", "test_offloaded_shards_come_back"): ("[4]",),
    ("test_train_engine_gpu.py", "test_an_offloaded_engine_saves_resumes_and_trains_on"): ("[0]",),
    ("test_ragged_gpu.py", "test_there_and_back_as_on_a_cpu"): ("[dtype0-left]", "[dtype3-right]"),
    ("test_replay_gpu.py", "test_a_step_is_made_again"): ("[True]",),
    ("test_vision_gpu.py", "test_packed_rows_as_on_a_cpu"): ("[dtype0-0.001-qwen2_5_vl]",),
}
# module -> its sizes here
SIZES: dict[str, dict[str, Any]] = {"test_attention_gpu": {"LENGTHS": [1, 70, 33, 129]}}


@dataclass(frozen=True, slots=True)
class Suite:
    """Files that run in one process with so many devices. at_least: tests that must have passed."""

    files: tuple[str, ...]
    devices: int
    at_least: int


SUITES = {
    "one": Suite(
        (
            "test_train_engine_gpu.py",
            "test_memory_gpu.py",
            "test_attention_gpu.py",
            "test_ragged_gpu.py",
            "test_replay_gpu.py",
            "test_vision_gpu.py",
            "test_drafts_gpu.py",
        ),
        devices=1,
        at_least=26,
    ),
    "two": Suite(("test_weight_channels_gpu.py", "test_rollout_gpu.py"), devices=2, at_least=7),
}
