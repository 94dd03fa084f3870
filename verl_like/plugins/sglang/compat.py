"""The one place that knows SGLang (0.5.23): where it is, environment, start-up, and its private corners.

What is driven is its scheduler, in the process that imports this, without the processes that SGLang puts around it
(tokenizer, detokenizer, server). Source: sglang/srt/managers/scheduler.py, `event_loop_normal`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
import warnings
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_like.plugins.sglang import attention, images
from verl_like.rollout.rows import Row

TESTED = "0.5.23"
FOLDER_VARIABLE = "VERL_LIKE_SGLANG"
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_IO = "sglang.srt.managers.io_struct"
_USED = (  # module, name in it: what is looked for at the start
    *((_SCHEDULER, f"Scheduler.{name}") for name in ("get_next_batch_to_run", "run_batch", "process_batch_result")),
    *((_SCHEDULER, f"Scheduler.{name}") for name in ("abort_request", "pause_generation", "continue_generation")),
    *((_SCHEDULER, f"Scheduler.{name}") for name in ("flush_cache", "init_req_max_new_tokens")),
    (_SCHEDULER, "Scheduler._add_request_to_queue"),
    (_SCHEDULER, "Scheduler.get_output_streamer_class"),
    (_SCHEDULER, "Scheduler.init_ipc_channels"),
    ("sglang.srt.managers.load_snapshot", "shm_path_for"),
    (_SCHEDULER, "SchedulerOutputStreamer.stream_output"),
    *((_BATCH, f"Req.{name}") for name in ("update_finish_state", "finished")),
    *((_BATCH, f"FINISH_{name}") for name in ("LENGTH", "MATCHED_TOKEN")),
    *((_IO, name) for name in ("AbortReq", "PauseGenerationReqInput", "ContinueGenerationReqInput")),
    *((_IO, f"{name}MemoryOccupationReqInput") for name in ("Release", "Resume")),
    ("sglang.srt.sampling.sampling_params", "SamplingParams"),
    ("sglang.srt.server_args", "PortArgs.init_new"),
    ("sglang.srt.runtime_context", "SpawnRanks"),
    ("sglang.srt.runtime_context", "publish"),
    ("sglang.srt.layers.logits_processor", "LogitsProcessor._get_logits"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner.sample"),
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater.begin_weight_update"),
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater.end_weight_update"),
)
# Schemas that torchvision's compiled part declares, and its Python part looks up when it is imported.
_TORCHVISION = ("nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align")
_TORCHVISION += ("_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d")
_TORCHVISION += ("_deform_conv2d_backward",)
# Kernels that model files look up when they are imported, which never run on a CPU without them.
_KERNELS = ("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu")
_KERNELS += ("fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_moe_router_cpu")
_ROOM = 8  # positions beyond the longest sequence: SGLang keeps some for itself
_CPU_CACHE_BYTES = 2**30
_declared: list[torch.library.Library] = []


def folder() -> Path:
    """Return the folder where SGLang is looked for besides this environment: made by `pip install --target`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(sys.prefix) / "sglang")


def installed() -> str | None:
    """SGLang's version, in this environment or in `folder`; None. Imports nothing of it."""
    for found in importlib.metadata.distributions(name="sglang", path=[*sys.path, str(folder())]):
        return found.version
    return None


def installed_apart() -> str | None:
    """SGLang's version and folder, for people; None where it is not installed."""
    return f"sglang {version}, in {folder()}" if (version := installed()) else None


def require_installed(key: str = "rollout.name") -> str:
    """SGLang's version; raises ValueError, naming `key`, with what to do where there is none."""
    version = installed()
    if version is None:
        raise ValueError(
            f"{key}=sglang: SGLang is installed neither in this environment nor in "
            f"{folder()} (variable {FOLDER_VARIABLE}): WITH_SGLANG=1 bash scripts/setup_env.sh, or "
            "pip install 'verl_like[sglang]' for CUDA; or set "
            f"{key}=vllm"
        )
    return version


def starting(device: torch.device, sleeps: bool) -> AbstractContextManager[object]:
    """Around the start of the engine's process: what lets go of device memory must be loaded before all else."""
    if device.type != "cuda" or not sleeps:
        return nullcontext()
    memory_saver: Any = _import("torch_memory_saver", "rollout.free_cache_engine=True with rollout.name=sglang")
    return memory_saver.configure_subprocess()


def prepare(device: torch.device, *, quiet: bool, sees: bool = False) -> None:
    """Make SGLang importable here, and import what is used of it.

    Raises ValueError where SGLang is missing, or is another version whose private names are others.

    quiet: log errors alone.
    sees: for a vision-language model.
    """
    version = require_installed()
    if quiet:  # it tells of every model file that wants a kernel which is not there
        logging.getLogger("sglang").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="sglang")
    if importlib.util.find_spec("sglang") is None:
        sys.path.append(str(folder()))  # last: nothing of this environment is replaced
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # for _ROOM
    # Of requests among ranks, which Lockstep sees to; its shared memory would outlive a killed process.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
    on_cpu = device.type == "cpu"
    if on_cpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        torch.compiler.set_stance("force_eager")  # a C++ compiler would take a minute for a few rotations of positions
        _declare("torchvision", _TORCHVISION, needed=importlib.util.find_spec("torchvision") is not None)
        _stand_in_for_kernels()
    if sees:
        images.prepare()
    missing = [
        f"{module}.{name}"
        for module, name in (*_USED, *(attention.USED if on_cpu else ()), *(images.USED if sees else ()))
        if not _has(module, name)
    ]
    if missing:
        raise ValueError(f"SGLang {version} lacks {missing}: {TESTED} is the tested version; install that one")
    if on_cpu:
        attention.use_blocks()


def start(kwargs: dict[str, Any], *, device: torch.device, rank: int, port: int, host: str) -> Any:
    """A scheduler with its model, as rank `rank` of `kwargs["tp_size"]` that meet at host and port (collective)."""
    arguments: Any = _of("sglang.srt.server_args", "ServerArgs")
    ports: Any = _of("sglang.srt.server_args", "PortArgs")
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    unknown = [name for name in kwargs if name not in _names_of(arguments)]
    if unknown:
        raise ValueError(f"rollout.engine_kwargs.sglang: SGLang {installed()} knows no {unknown}")
    tp = kwargs["tp_size"]
    if device.type == "cpu" and tp > 1:
        cores = sorted(os.sched_getaffinity(0))
        each = [str(cores[i * len(cores) // tp % len(cores)]) for i in range(tp)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(each))
    args = arguments(**kwargs, nccl_port=port, **({"dist_init_addr": f"{host}:{port}"} if tp > 1 else {}))
    args.resolve_once()
    args.check_server_args()
    of_process = ports.init_new(args)
    for name in vars(of_process).values():
        if isinstance(name, str) and name.startswith("ipc://"):  # files that nobody connects to
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=rank, gpu_id=device.index or 0))
    scheduler = _silent_scheduler()(args, of_process)
    scheduler.ipc_channels.send_to_tokenizer.socket = None
    return scheduler


def _silent_scheduler() -> type[Any]:
    """A scheduler that tells nobody what is sampled, which is read from the requests, nor how much it has to do: that
    file in /dev/shm would stay there."""
    scheduler: Any = _of(_SCHEDULER, "Scheduler")
    streamer: Any = _of(_SCHEDULER, "SchedulerOutputStreamer")

    class Silent(streamer):
        def stream_output(self, *args: Any, **kwargs: Any) -> None: ...

    class SilentScheduler(scheduler):
        def init_ipc_channels(self, port_args: Any) -> None:
            super().init_ipc_channels(port_args)
            writer, self.load_snapshot_writer = self.load_snapshot_writer, None
            if writer is not None:
                writer.close()
                path_of = _of("sglang.srt.managers.load_snapshot", "shm_path_for")
                Path(path_of(port_args.instance_id)).unlink(missing_ok=True)

        def get_output_streamer_class(self) -> type[Any]:
            return Silent

    return SilentScheduler


def room_for_cache(max_seqs: int, max_model_len: int, token_bytes: int) -> int:
    """Tokens of the KV cache on a CPU, where SGLang's own choice is a share of all memory: as many as can be needed, up
    to 1 GB, and one sequence at least."""
    longest = max_model_len + _ROOM
    return max(longest, min(max_seqs * longest, _CPU_CACHE_BYTES // token_bytes))


def context_length(max_model_len: int) -> int:
    """SGLang's `context_length` for sequences of so many tokens."""
    return max_model_len + _ROOM


def runner_of(scheduler: Any) -> Any:
    """The model runner, whose `sample` may be replaced."""
    return scheduler.tp_worker.model_runner


def mask_scores(scheduler: Any, tokenizer_size: int) -> None:
    """Give ids that the tokenizer does not know probability 0 in the log-probs of prompts."""
    processor = _of("sglang.srt.layers.logits_processor", "LogitsProcessor")
    for module in runner_of(scheduler).model.modules():
        if isinstance(module, processor):
            module._get_logits = _masked(module._get_logits, tokenizer_size)


def _masked(get_logits: Callable[..., Tensor], tokenizer_size: int) -> Callable[..., Tensor]:
    def masked(*args: Any, **kwargs: Any) -> Tensor:
        logits = get_logits(*args, **kwargs)
        logits[..., tokenizer_size:] = -torch.inf
        return logits

    return masked


def request_class() -> type[Any]:
    """A request of SGLang's that takes its tokens from `drawn`, and ends when its `row` says so. Without a row, it ends
    with its first token."""
    base: Any = _of(_BATCH, "Req")
    length, matched = _of(_BATCH, "FINISH_LENGTH"), _of(_BATCH, "FINISH_MATCHED_TOKEN")

    class Request(base):
        row: Row | None = None
        drawn: tuple[int, float, int] = (0, 0.0, 0)  # token, log-prob, version of the weights
        tokenizer_of_row: Any = None

        def update_finish_state(self, new_accepted_len: int = 1) -> None:
            if self.finished() or self.to_finish:
                super().update_finish_state(new_accepted_len)
                return
            reason = "length"
            if self.row is not None:
                self.row.take(*self.drawn)
                reason = self.row.end(self.tokenizer_of_row)
            if reason is not None:
                count = len(self.output_ids)
                self.finished_reason = length(count) if reason == "length" else matched(self.output_ids[-1])
                self.finished_len = count

    return Request


def new_request(
    made: type[Any],
    name: str,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int = 1,
    vocab_size: int,
    priority: int = 0,
    scored: bool = False,
) -> Any:
    """Make a request for `add`.

    name: all names are of one length, because SGLang aborts by the beginnings of names.
    scored: the prompt's log-probs are wanted.
    """
    sampling = _of("sglang.srt.sampling.sampling_params", "SamplingParams")
    params = sampling(max_new_tokens=max_new_tokens, temperature=1.0, ignore_eos=True)
    params.normalize(None)
    more = {"vocab_size": vocab_size, "priority": priority, "return_logprob": scored}
    request = made(name, "", array("q", token_ids), params, **more)
    request.logprob_start_len = 0 if scored else -1
    return request


def scores_of(request: Any) -> list[float]:
    """Log-probs of the tokens 1.. of a scored prompt."""
    return [float(value) for value in request.logprob.input_token_logprobs_val[1:]]


def add(scheduler: Any, request: Any) -> None:
    """Queue a request. Raises ValueError when the cache has no room for it, ever."""
    wanted = request.sampling_params.max_new_tokens
    scheduler.init_req_max_new_tokens(request)
    if request.to_finish or request.finished() or request.sampling_params.max_new_tokens < wanted:
        raise ValueError(
            f"prompt of {len(request.origin_input_ids)} tokens + {wanted} does not fit SGLang's cache of "
            f"{scheduler.max_total_num_tokens} tokens: raise rollout.gpu_memory_utilization or "
            "rollout.engine_kwargs.sglang.max_total_tokens"
        )
    scheduler._add_request_to_queue(request)


def step(scheduler: Any, beginning: Callable[[Any], None]) -> list[Any]:
    """Run one forward pass; return the requests that were in it.

    beginning: is given the batch before the pass.
    """
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    reqs: list[Any] = []
    if batch:
        reqs = list(batch.reqs)
        beginning(batch)
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return reqs


def abort(scheduler: Any, names: Sequence[str]) -> None:
    """End requests: at once where they wait, with the next step where they run."""
    for name in names:
        scheduler.abort_request(_of(_IO, "AbortReq")(rid=name))


@contextmanager
def alone(scheduler: Any) -> Iterator[None]:
    """Hold the engine without any request: those in flight lose their cache, and are computed again afterwards."""
    scheduler.pause_generation(_of(_IO, "PauseGenerationReqInput")(mode="retract"))
    others, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue = [request for request in others if not request.to_finish]
        scheduler.continue_generation(_of(_IO, "ContinueGenerationReqInput")())


def load(scheduler: Any, stream: Iterator[tuple[str, Tensor]]) -> None:
    """Fill the model from `stream`, and forget what was computed with other weights; inside `alone`."""
    runner = runner_of(scheduler)
    runner.weight_updater.begin_weight_update()
    runner.model.load_weights(stream)
    runner.weight_updater.end_weight_update(run_post_load=False)
    forget(scheduler)


def forget(scheduler: Any) -> None:
    """Empty the caches of prefixes and of images' features; inside `alone`."""
    if not scheduler.flush_cache():
        raise RuntimeError("SGLang did not empty its cache: requests are still under way")
    images.forget()


def release(scheduler: Any, tags: Sequence[str]) -> None:
    """Let go of device memory (weights, kv_cache, cuda_graph); inside `alone`."""
    scheduler.weight_updater.release_memory_occupation(_of(_IO, "ReleaseMemoryOccupationReqInput")(tags=list(tags)))


def resume(scheduler: Any, tags: Sequence[str]) -> None:
    """Undo `release`; what was in the memory is lost."""
    scheduler.weight_updater.resume_memory_occupation(_of(_IO, "ResumeMemoryOccupationReqInput")(tags=list(tags)))


# What held_weights.py asks of modules.


def fused_parts(model: nn.Module) -> dict[str, list[str]]:
    """Modules that hold several Hugging Face modules."""
    usual = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    if hasattr(model, "visual"):
        usual["qkv"] = ["qkv"]
    return usual | (getattr(model, "packed_modules_mapping", {}) or {})


def stored_name(model: nn.Module, name: str, stored: Container[str]) -> str:
    """The checkpoint's name of a parameter's, or its beginning: the same, but for vision-language models. Source:
    load_weights of SGLang's Qwen-VL models."""
    if not hasattr(model, "visual"):
        return name
    old = "model.embed_tokens.weight" in stored
    if name.startswith("visual."):
        name = name.replace(".attn.qkv_proj", ".attn.qkv")
        return name if old else f"model.{name}"
    return name if old or not name.startswith("model.") else f"model.language_{name}"


def unpacked_linear(module: nn.Module) -> Tensor | None:
    """Return None: no layer has packed weights, as there are no kernels for this CPU."""
    return None


def unpacked_experts(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A layer's experts on CPU, gate and up in one; None on CUDA, whose kernels may have moved numbers about."""
    layer: Any = module
    if layer.w2_weight.device.type != "cpu":
        return None
    return layer.w13_weight.detach(), layer.w2_weight.detach()


def _import(name: str, what_for: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{what_for} needs the package {name}: pip install {name}, or switch it off") from error


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _has(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _names_of(arguments: Any) -> set[str]:
    return set(getattr(arguments, "__struct_fields__", ())) | set(getattr(arguments, "__dataclass_fields__", ()))


def _declare(library: str, names: Sequence[str], *, needed: bool) -> None:
    if needed and not any(each.ns == library for each in _declared):
        fragment = torch.library.Library(library, "FRAGMENT")
        for name in names:
            fragment.define(f"{name}(...) -> ...")
        _declared.append(fragment)


def _stand_in_for_kernels() -> None:
    """A package whose names SGLang imports on every CPU and calls only on those with AMX, after it has asked whether
    the operator convert_weight_packed is there. There is no build of the real one for CPUs on the package index."""
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    module: Any = types.ModuleType("sgl_kernel")
    module.__path__, module.__version__ = [], "0.0.0"
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__getattr__ = _absent
    sys.modules["sgl_kernel"] = module
    _declare("sgl_kernel", _KERNELS, needed=True)


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no kernel library on this machine")

    return absent
