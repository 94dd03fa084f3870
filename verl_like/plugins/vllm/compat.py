"""The one place that knows vLLM (0.26 to 0.32, versions.py): environment, start-up, private corners, shutdown.

vLLM runs inside the worker's own process (no engine core process), so that it shares the GPU's memory pool and the
weights can be handed over as tensors. Source: vLLM's external launcher, vllm/v1/executor/uniproc_executor.py.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_like.plugins.vllm.versions import is_second_runner, require_engine
from verl_like.plugins.vllm.vision import with_images
from verl_like.rollout.placed_images import PlacedImage
from verl_like.rollout.rollout_engine import SamplingParams

_engine_number = itertools.count()


def set_environment(device: torch.device) -> None:
    """Set the variables that vLLM reads when it is imported or started; what the user has set stays where it can."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's own choice is a share of all memory
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the same threads
        # What 0.32 saves of a model compiled for a CPU it cannot load, and compiles anew; torch's own cache it can use
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("the vllm rollout engine needs torch.distributed: call init_distributed first")


def start(kwargs: dict[str, Any], *, device: torch.device, run_id: str) -> Any:
    """Start a `vllm.LLM` on this rank. Unknown names in `kwargs` raise vLLM's own TypeError."""
    from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

    if device.type == "cpu":
        _do_not_compile_token_ranks()
        _look_at_dictionaries_alone()
        rotate_all_heads()
    set_num_threads = torch.set_num_threads
    try:
        with _shared_classes() as own_class:
            llm = LLM(**kwargs, distributed_executor_backend=_executor_class(device, run_id))
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a function that does nothing
    for module in model_of(llm).modules() if own_class else ():
        module.__class__ = own_class.get(type(module), type(module))
    require_engine(llm.llm_engine, llm.collective_rpc(lambda worker: worker.model_runner)[0], device)
    if device.type == "cuda":
        # vLLM's own `current_stream` moves a thread that has not chosen a stream to a new one, in the midst of its work
        torch.cuda.set_stream(torch.cuda.current_stream(device))
    else:
        _draw_nothing_for_cut_prompts(llm)
    _leave_global_generators_alone(llm, device)
    if device.type == "cpu" and "speculative_config" in kwargs:
        _expand_in_torch()
    return llm


@contextmanager
def _shared_classes() -> Iterator[dict[type, type]]:
    """Give transformers' classes back as they were after a start, and yield those that vLLM's modules take instead.

    For a type without a model of its own (OLMo 2) vLLM 0.32 runs transformers', whose class it rewrites in place so
    that it compiles: the trainer's model in the same process is of that class, and could neither be made nor called.
    Source: vLLM 0.32, compilation/decorators.py, _support_torch_compile.
    """
    try:
        from vllm.model_executor.models.transformers import base

        decorator = base.support_torch_compile
    except (ImportError, AttributeError):  # an earlier one compiles a class of its own
        yield {}
        return
    own_class: dict[type, type] = {}
    before: dict[type, tuple[dict[str, Any], tuple[type, ...]]] = {}

    def remembering(**options: Any) -> Any:
        def decorated(shared: type) -> type:
            before.setdefault(shared, (dict(vars(shared)), shared.__bases__))
            return decorator(**options)(shared)

        return decorated

    patched: Any = base
    patched.support_torch_compile = remembering
    try:
        yield own_class
    finally:
        patched.support_torch_compile = decorator
        for shared, (names, bases) in before.items():
            added = {name: value for name, value in vars(shared).items() if names.get(name) is not value}
            more = tuple(each for each in shared.__bases__ if each not in bases)
            for name in added:
                setattr(shared, name, names[name]) if name in names else delattr(shared, name)
            shared.__bases__ = bases
            own_class[shared] = type(shared.__name__, (shared, *more), added | {"__module__": shared.__module__})


def _look_at_dictionaries_alone() -> None:
    """Make vLLM's search for kernels skip objects without a dictionary.

    As it starts on a CPU, vLLM 0.32 looks for kernels in the attributes of all that is imported, and falls over
    objects whose `__dict__` is none: llvmlite's, once numba is there, which its own n-gram proposals import.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # 0.26 has no such search
        return

    def attributes(value: Any) -> Any:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    vars_of: Any = dispatcher
    vars_of.vars = attributes  # found before the builtin one


@functools.cache
def rotate_all_heads() -> None:
    """Let queries with an axis of heads (latent attention, LFM2) be rotated by vLLM's formula in torch. On CPU alone.

    The kernel there (vLLM 0.32) takes each head for a token: it rotates by positions of other tokens, and reads and
    writes beyond the end of positions and keys. Flat queries, as of other models, come out right.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    ways: dict[bool, Any] = {True: RotaryEmbedding.forward_native, False: RotaryEmbedding.forward_cpu}
    replaced: Any = RotaryEmbedding
    replaced.forward_cpu = lambda rotary, at, query, key=None: ways[query.ndim > at.ndim + 1](rotary, at, query, key)


class _OwnDraws(TorchFunctionMode):
    """Mode of this thread in which draws from the global generator come from `own`."""

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.rand, torch.randint, Tensor.exponential_) and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._own}
        return func(*args, **kwargs)


def _leave_global_generators_alone(llm: Any, device: torch.device) -> None:
    """Give rows without a generator one (of greedy requests, and of those whose prompt is cut), which all share: their
    draws are thrown away. The global one is the trainer's, which may draw in another thread meanwhile.

    On CPU vLLM 0.32 draws a number for each row from the global generator even where all rows have their own. Source:
    TopKTopPSampler.forward_cpu, random_sample.
    """
    own = torch.Generator(device=device)
    draws = _OwnDraws(own) if device.type == "cpu" else nullcontext()
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    if (rejection := getattr(runner, "rejection_sampler", None)) is not None:  # with speculative decoding
        _constrain_no_drafts()
        reject = rejection.forward

        def chosen(*args: Any, **kwargs: Any) -> Any:
            with _OwnDraws(own):
                return reject(*args, **kwargs)

        rejection.forward = chosen
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)
    if sampler is None:  # the second model runner: its noise is a function of seeds alone
        return
    forward = sampler.forward

    def sample(logits: Tensor, generators: dict[int, torch.Generator], *args: Any, **kwargs: Any) -> Any:
        with draws:
            filled = {row: generators.get(row, own) for row in range(logits.shape[0])}
            return forward(logits, filled, *args, **kwargs)

    sampler.forward = sample


def _draw_nothing_for_cut_prompts(llm: Any) -> None:
    """Let a request's own generator rest in the steps that compute but a part of its prompt, on CPU.

    vLLM samples for such a request too, throws the token away and winds the generator back by an offset, which CPU
    generators do not have: it raises RuntimeError. With the generator out of reach meanwhile, the token thrown away is
    drawn from another one, and the noise stays a function of (seed, position). Source: vLLM 0.32,
    GPUModelRunner._bookkeeping_sync and InputBatch.generators (row of the batch -> generator).
    """
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    if is_second_runner(runner):  # it keeps no generators
        return
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        cut = set(runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist())
        resting = {row: batch.generators.pop(row) for row in cut & batch.generators.keys()}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            batch.generators.update(resting)

    runner.sample_tokens = sample


def _expand_in_torch() -> None:
    """Replace vLLM's expansion of draft temperatures on CPU by one in torch.

    vLLM 0.32 writes the temperatures of draft tokens into a copy there, rounded to whole numbers, and throws it
    away: drafts are then accepted by chance. Source: vllm/utils/cpu_triton_utils.py, _expand_kernel_impl.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
    ) -> Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        put = torch.where(x == replace_from, torch.full_like(x, replace_to), x) if replace_from != replace_to else x
        return put.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


@functools.cache
def _constrain_no_drafts() -> None:
    """Leave the logits of no drafts as they are, in a step in which no row has any: vLLM 0.32's top_k fails on them."""
    from vllm.v1.sample import rejection_sampler

    some = rejection_sampler.apply_sampling_constraints
    rejection_sampler.apply_sampling_constraints = lambda logits, *args: some(logits, *args) if len(logits) else logits


def _do_not_compile_token_ranks() -> None:
    """Replace a comparison that vLLM compiles on CPU (the rank of the sampled token) by plain torch.

    vLLM compiles it with a C++ compiler at the first request: 7 to 25 seconds, and an error where there is no compiler.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    compiled = logprobs.batched_count_greater_than
    plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    for module in (logprobs, sampler):
        module.batched_count_greater_than = plain


def _executor_class(device: torch.device, run_id: str) -> type:
    """Make vLLM's external launcher with this process's GPU and a name for its shared memory that no other run has.

    vLLM names shared memory after the part of the init method behind the last colon; with its own name ("//") the
    leftovers of a killed run make the next start fail.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    init_method = f"env://x:verl_like-{run_id}-{next(_engine_number)}"
    local_rank = device.index or 0

    class InProcessExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return init_method, dist.get_rank(), local_rank

    return InProcessExecutor


def sampling_params(sampling: SamplingParams, *, seed: int | None, hot: bool = False) -> Any:
    """Make vLLM's parameters of one request; the log-prob of the sampled token and of no other.

    hot: any temperature, where vLLM takes 2 at most.
    """
    params = _params(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=-1 if sampling.greedy else sampling.top_k,
        min_p=0.0 if sampling.greedy else sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,  # nothing is cut off, text or token
        seed=seed,  # also of greedy ones: the second model runner would draw one from numpy's global generator
        logprobs=0,
        hot=hot,
    )
    # Where vLLM puts the tokens of its own bad_words, which it takes as text
    params._bad_words_token_ids = [list(word) for word in sampling.bad_words] or None
    return params


def scoring_params() -> Any:
    """Make vLLM's parameters of a request for the log-prob of each prompt token, and of no other."""
    return _params(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)


@functools.cache
def _hot_params() -> Any:
    """Make SamplingParams of any temperature: where they are checked, this one is 1 meanwhile."""
    from vllm.sampling_params import SamplingParams

    class HotParams(SamplingParams):
        def _verify_args(self) -> None:
            temperature, self.temperature = self.temperature, 1.0
            try:
                super()._verify_args()
            finally:
                self.temperature = temperature

    return HotParams


def _params(*, hot: bool = False, **options: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    parameters: Any = _hot_params() if hot else SamplingParams
    return parameters(
        ignore_eos=True,  # the end tokens are stop_token_ids: vLLM's own idea of EOS plays no part
        flat_logprobs=True,  # lists of numbers: no dict and no object for every token of every response
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **options,
    )


def log_probs_of(entries: Any, token_ids: Sequence[int]) -> list[float]:
    """Read the log-probs of these tokens out of vLLM's FlatLogprobs. Raises RuntimeError if they are of other tokens.

    FlatLogprobs hold one number for each token and no other (the first token of a prompt has none).
    """
    if entries.token_ids != list(token_ids):
        raise RuntimeError(
            f"vLLM gave log-probs of {len(entries.token_ids)} tokens, not of the {len(token_ids)} asked for"
        )
    return list(entries.logprobs)


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions that vLLM raises to refuse a request: ValueError, and in later versions a class of its own."""
    import vllm.exceptions as errors

    own = getattr(errors, "VLLMClientError", None)
    return (ValueError,) if own is None else (ValueError, own)


def add_request(
    llm: Any,
    request_id: str,
    prompt_ids: list[int],
    params: Any,
    *,
    place: int,
    lora_request: Any = None,
    priority: int = 0,
    images: Sequence[PlacedImage] = (),
) -> None:
    """Queue one request of token ids between two steps.

    Args:
        llm: the vLLM engine.
        request_id: name of the request.
        prompt_ids: token ids of the prompt.
        params: vLLM's sampling parameters.
        place: among equal priorities, requests of a lower place are taken up earlier (vLLM's own clock differs between
            ranks).
        lora_request: names the adapter that the request uses.
        priority: lower ones are taken up earlier.
        images: images of the prompt.
    """
    from vllm import TokensPrompt  # pyright: ignore[reportAttributeAccessIssue]

    prompt: Any = TokensPrompt(prompt_token_ids=prompt_ids)
    if images:
        prompt = with_images(prompt_ids, images)
    llm.llm_engine.add_request(
        request_id, prompt, params, arrival_time=float(place), lora_request=lora_request, priority=priority
    )


def sampled_so_far(llm: Any, request_id: str) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a request under way, which vLLM would give out at its end.

    Source: vLLM 0.26 and 0.32, OutputProcessor.request_states: each state gathers them for its last output.
    """
    state = llm.llm_engine.output_processor.request_states[own_name(llm, request_id)]
    token_ids = list(state.detokenizer.output_token_ids)
    return token_ids, log_probs_of(state.logprobs_processor.logprobs, token_ids)


def own_name(llm: Any, request_id: str) -> str:
    """Return vLLM's own name of a request under way."""
    return llm.llm_engine.output_processor.external_req_ids[request_id][0]


def settle(llm: Any) -> None:
    """Take in the step that asynchronous scheduling (vLLM's default on CUDA) has launched ahead.

    Nobody waits for that step any more once the last request has ended: until then its cache blocks may count as used.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while getattr(core, "batch_queue", None):
        llm.llm_engine.step()


def model_of(llm: Any) -> nn.Module:
    """Return this rank's shard of the model."""
    return llm.llm_engine.apply_model(lambda model: model)[0]


def proposer_of(llm: Any) -> Any:
    """Return the proposer that vLLM made of our class, with the runner whose batch it proposes for."""
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    if (found := getattr(runner, "drafter", None)) is None:
        raise ValueError(
            "rollout.speculative.method: the model runner of this vLLM takes no guesses of ours; set it to none"
        )
    found.runner = runner
    return found


def effective(llm: Any) -> dict[str, Any]:
    """Settings as vLLM has them, whatever its arguments were, by our names, and by its own where we have none."""
    config = llm.llm_engine.vllm_config
    return {
        "dtype": config.model_config.dtype,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "enforce_eager": config.model_config.enforce_eager,
        "kv_cache_dtype": config.cache_config.cache_dtype,
    }


def mask_logits(model: nn.Module, tokenizer_size: int) -> None:
    """Give ids that the tokenizer does not know probability 0, in sampling and in scoring."""
    compute_logits = model.compute_logits

    def masked(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute_logits(*args, **kwargs)
        if logits is not None:
            logits[..., tokenizer_size:] = -torch.inf
        return logits

    model.compute_logits = masked  # an attribute of the instance: survives reloading of weights


def reload(llm: Any, stream: Iterator[tuple[str, Tensor]]) -> None:
    """Exchange all weights (adapters aside); `drop_caches` must follow.

    vLLM's layer-wise reload lets each layer be processed (fused, packed for the kernel) as on a first load; the
    model's own load_weights would fail on packed layers. An error must not pass through it: layers caught half loaded
    would stay so, and a later reload would fail or mix both streams. So an error of the stream ends the stream, vLLM
    puts its layers in order, and then the error is raised.
    """
    failure: list[Exception] = []

    def until_failure() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from stream
        except Exception as error:
            failure.append(error)

    _forget_packed_experts(model_of(llm))
    for parameter in model_of(llm).parameters():
        if isinstance(loader := getattr(parameter, "weight_loader", None), functools.partial):
            vars(loader).setdefault("__name__", "partial")  # 0.32 asks every loader for it (MiniMax-M2 has such ones)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": until_failure()})
    except Exception:
        _finish_reload(llm)
        raise
    if failure:
        raise failure[0]
    _repack_tied_heads(model_of(llm))


def drop_caches(llm: Any) -> None:
    """Drop everything computed with the old weights, also for requests under way. Raises RuntimeError if that fails.

    Requests under way begin again with a prefill of prompt and tokens.
    """
    if not llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not reset its prefix cache: blocks are still in use")
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()  # features of images: a reload empties the workers' half alone


@contextmanager
def others_aside(llm: Any) -> Iterator[None]:
    """Set the requests aside that are there now: steps inside leave them alone; those under way begin again afterwards.

    Caches are dropped only where requests run: right after a load none does, and what is still cached must be seen.
    Source: vLLM 0.26 and 0.32, Scheduler.running and waiting.
    """
    from vllm.v1.core.sched.request_queue import create_request_queue

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if scheduler.running:
        drop_caches(llm)
    waiting, scheduler.waiting = scheduler.waiting, create_request_queue(scheduler.policy)
    try:
        yield
    finally:
        scheduler.waiting = waiting


def _forget_packed_experts(model: nn.Module) -> None:
    """Drop the packed weights of experts on CPU before a reload.

    vLLM (0.32) computes with packed weights there, and packs them on the first load alone: a later one would leave
    plain numbers where packed ones are read. Without its kernel a layer is set up as at first.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        on_cpu = any(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _finish_reload(llm: Any) -> None:
    """Put vLLM's layers in order after its own loader failed: forget what is half loaded, keep the old tensors."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    model = model_of(llm)
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, llm.llm_engine.model_config)


def _repack_tied_heads(model: nn.Module) -> None:
    """Pack tied heads anew on CPU after a load.

    A linear layer computes with a packed copy of its weight there, which vLLM makes anew for each layer that got
    tensors. A head that shares the embedding's weight gets none: without this it keeps the copy of the old weights.
    """
    owner_of: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or owner_of.setdefault(id(weight), module) is module:
            continue
        if hasattr(module, "cpu_linear"):
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)


def block_size(llm: Any) -> int:
    """Tokens of one block of the KV cache."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


def caches_prefixes(llm: Any) -> bool:
    """True where prompts may begin with cached blocks."""
    return bool(llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)


def stop(llm: Any) -> None:
    """Shut the engine down and leave torch.distributed's default group, which is not vLLM's, alone. `free` follows."""
    import vllm.envs as envs
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    clean_up = getattr(core, "cleanup_dist_env_and_memory", _nothing)
    core.cleanup_dist_env_and_memory = _nothing  # it would destroy the default group too
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = clean_up
    envs.disable_envs_cache()  # an engine after this one reads the environment anew
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def _nothing() -> None:
    """Do nothing, in place of what vLLM does when its own process ends."""


def free() -> None:
    """Free what a stopped engine held, once nobody refers to it.

    vLLM keeps the model as long as the engine, and its memory pool takes no second engine before.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
