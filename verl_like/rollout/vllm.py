"""vLLM in the worker's own process, driven request by request; tensor-parallel over neighbouring ranks.

Starts with dummy weights and refuses to generate until `load_weights` succeeded. What depends on vLLM's version is in
vllm_compat.py.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models.lora import adapters_apart, is_adapter
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout import vllm_compat as compat
from verl_like.rollout import vllm_lora
from verl_like.rollout.assemble import request_seed
from verl_like.rollout.base import BaseRolloutEngine
from verl_like.rollout.rng import preserve_rng
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams, WeightLoadError
from verl_like.rollout.step_loop import Lockstep, StepLoop
from verl_like.rollout.vllm_weights import Layout, checksums, held_by

logger = logging.getLogger(__name__)

_SLEEPERS = ("weights", "kv_cache")  # what vLLM can put to sleep, in the order it must come back for a weight load
_CACHED_BLOCKS = 3  # of the KV cache, in the prompt that finds out whether it was emptied
_FOLLOW_TIMEOUT_S = 600.0  # how long a rank waits for requests that its replica's first rank has already been given


class VLLMRolloutEngine(BaseRolloutEngine):
    """One rank of a vLLM replica. See RolloutEngine."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        process: ProcessInfo,
        dtype: torch.dtype,
        tokenizer_size: int,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        run_id: str,
        tokenizer: str,
    ) -> None:
        tp = rollout.tensor_model_parallel_size
        self._seed = request_seed(seed, 0, process.rank // tp, 0) % 2**31  # of this replica
        super().__init__(
            dtype=dtype,
            tokenizer_size=tokenizer_size,
            max_model_len=max_model_len,
            seed=self._seed,
            keeps_adapters=adapters_apart(model),
            reads_text=bool(rollout.stop),
        )
        compat.set_environment(process.device)
        self._sleep_mode = rollout.free_cache_engine and process.device.type == "cuda"  # vLLM on CPU has none
        self._asleep: set[str] = set()
        kwargs = engine_arguments(
            rollout, model, dtype, max_model_len, self._seed, sleep_mode=self._sleep_mode, tokenizer=tokenizer
        )
        self._lora_request: Any = vllm_lora.request() if self.keeps_adapters else None
        with preserve_rng():
            self._llm: Any = compat.start(kwargs, device=process.device, run_id=run_id)
        if self.keeps_adapters:
            vllm_lora.let_base_weights_in(self._llm)
            if process.device.type == "cpu":
                vllm_lora.compute_directly(self._llm)
        self._model: Any = compat.model_of(self._llm)
        if tokenizer_size < vocab_size:
            compat.mask_logits(self._model, tokenizer_size)
        self._tp = tp
        self._rank_in_replica = process.rank % tp
        self._lockstep = _lockstep(process, tp) if tp > 1 else None
        self._added: dict[str, GenerationRequest] = {}
        self._unseeded = itertools.count()
        self._loop = StepLoop(
            self,
            device=process.device,
            lockstep=self._lockstep,
            follow_timeout_s=_FOLLOW_TIMEOUT_S,
        )

    # What the step loop calls.

    def add(self, request: GenerationRequest) -> None:
        seed = request.seed
        if seed is None and self._tp > 1:  # ranks of a replica draw the same numbers only from a seed
            seed = request_seed(self._seed, 1, next(self._unseeded), 0)
        try:
            params = compat.sampling_params(request.sampling, seed=seed)
            compat.add_request(self._llm, request.request_id, request.prompt_ids, params, self._lora_request)
        except compat.refusals() as error:
            raise ValueError(f"request {request.request_id}: {error}") from error
        self._added[request.request_id] = request

    def step(self) -> list[Completion]:
        outputs = [output for output in self._llm.llm_engine.step() if output.finished]
        for output in outputs:
            del self._added[output.request_id]
        return [self._completion(output) for output in outputs]

    def has_unfinished(self) -> bool:
        return bool(self._added)

    def abort(self) -> list[Completion]:
        """vLLM does not hand out the tokens of an aborted request: it ends with none."""
        ids = list(self._added)
        self._llm.llm_engine.abort_request(ids)
        self._drain()
        self._added.clear()
        return [
            Completion(
                request_id=i, token_ids=[], log_probs=[], finish_reason="abort", weight_version=self._version or 0
            )
            for i in ids
        ]

    # Weights, scoring, memory: with the engine idle.

    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        compat.settle(self._llm)
        self._wake("weights")
        adapters: dict[str, Tensor] = {}
        if partial:
            adapters.update(stream)
        else:
            compat.reload(self._llm, self._base_weights(stream, adapters))
            meta = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
            if meta:
                raise WeightLoadError(f"vLLM got no weights for {meta[:8]}")
        if self.keeps_adapters:
            vllm_lora.put(self._llm, adapters)
        compat.drop_caches(self._llm)
        self._wake("kv_cache")  # not before: until now the trainer's full tensors needed the room

    def _base_weights(
        self, stream: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights that vLLM's loader takes; what belongs to adapters is put aside."""
        for name, tensor in stream:
            if self.keeps_adapters and is_adapter(name):
                adapters[name] = tensor
            else:
                yield name, tensor

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """See RolloutEngine. Left out: stacked experts on CUDA, whose kernels may have moved numbers about."""
        layout = Layout(dict(shapes), rank=self._rank_in_replica, size=self._tp)
        parts = held_by(self._model, layout)
        if self.keeps_adapters:
            parts = itertools.chain(parts, vllm_lora.held(self._llm, compat.fused_parts(self._model), layout))
        group = None if self._lockstep is None else self._lockstep.group
        with self._loop.exclusive():
            return checksums(parts, layout, self.dtype, group)

    def _cached_tokens(self) -> int:
        """What the cache has of one long prompt, the same at every call; a sleeping cache holds nothing."""
        block = compat.block_size(self._llm)
        length = min(_CACHED_BLOCKS * block + 1, self.max_model_len - 1)
        if self._asleep or not compat.caches_prefixes(self._llm) or length <= block:
            return 0  # what is cached is whole blocks
        prompt = [(7919 * i + 1) % self.tokenizer_size for i in range(length)]
        params = compat.sampling_params(SamplingParams(max_tokens=1, do_sample=False), seed=None)
        compat.add_request(self._llm, "cache-probe", prompt, params, self._lora_request)
        (output,) = self._drain()
        return int(output.num_cached_tokens or 0)

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        params = compat.scoring_params()
        for i, sequence in enumerate(sequences):
            compat.add_request(self._llm, f"score-{i}", list(sequence), params, self._lora_request)
        found = {output.request_id: output for output in self._drain()}
        prompts = [found[f"score-{i}"].prompt_logprobs for i in range(len(sequences))]
        return [
            compat.log_probs_of(entries, sequence[1:]) for entries, sequence in zip(prompts, sequences, strict=True)
        ]

    def _drain(self) -> list[Any]:
        engine, outputs = self._llm.llm_engine, []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        return outputs

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory (CUDA with free_cache_engine; else nothing)."""
        if self._sleep_mode and not self._asleep:
            with self._loop.exclusive():
                compat.settle(self._llm)
                self._llm.sleep(level=1)
            self._asleep = set(_SLEEPERS)

    def wake(self) -> None:
        if self._asleep:
            with self._loop.exclusive():
                self._wake(*_SLEEPERS)

    def _wake(self, *tags: str) -> None:
        """Bring back those of `tags` that are asleep; after a load that broke off only the cache is."""
        sleeping = [tag for tag in tags if tag in self._asleep]
        if sleeping:
            torch.cuda.empty_cache()  # vLLM maps this memory past torch's allocator, which must let go of it first
            self._llm.wake_up(tags=sleeping)
            self._asleep -= set(sleeping)

    def submit(self, request: GenerationRequest) -> Any:
        if self._asleep:
            self.wake()
        return super().submit(request)

    def shutdown(self) -> None:
        super().shutdown()
        if self._llm is not None:
            self._wake_to_die()
            compat.stop(self._llm)
            self._llm = self._model = None
            compat.free()

    def _wake_to_die(self) -> None:
        """vLLM cannot free memory that sleeps: it reports CUDA errors, and this process could start no other engine."""
        try:
            self._wake(*_SLEEPERS)
        except Exception:
            logger.warning("vLLM could not be woken before its end: CUDA errors may follow", exc_info=True)

    def _completion(self, output: Any) -> Completion:
        sampled = output.outputs[0]
        token_ids = list(sampled.token_ids)
        if sampled.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {sampled.finish_reason!r}")
        return Completion(
            request_id=output.request_id,
            token_ids=token_ids,
            log_probs=compat.log_probs_of(sampled.logprobs, token_ids),
            finish_reason=sampled.finish_reason,
            weight_version=self._version if self._version is not None else -1,
        )


def engine_arguments(
    rollout: RolloutConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    seed: int,
    *,
    sleep_mode: bool,
    tokenizer: str = "",
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; `rollout.engine_kwargs.vllm` goes on top as it is (null values are left out)."""
    kwargs: dict[str, Any] = {
        "model": os.path.expanduser(model.path),
        "skip_tokenizer_init": not rollout.stop,  # texts that end a response are all that is read
        "trust_remote_code": model.trust_remote_code,
        "generation_config": "vllm",  # sampling defaults and end tokens are ours, not the model folder's
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "enable_sleep_mode": sleep_mode,
        "disable_log_stats": rollout.disable_log_stats,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "seed": seed,
    }
    if rollout.stop:
        kwargs["tokenizer"] = os.path.expanduser(tokenizer)
    if adapters_apart(model):
        kwargs |= vllm_lora.engine_options(model.lora_rank)
    if model.override_config:
        kwargs["hf_overrides"] = dict(model.override_config)
    if rollout.cudagraph_capture_sizes is not None and not rollout.enforce_eager:
        kwargs["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    extra = {name: value for name, value in rollout.engine_kwargs.vllm.items() if value is not None}
    return kwargs | extra


def _lockstep(process: ProcessInfo, tp: int) -> Lockstep:
    """A CPU group of each replica's ranks; collective over all ranks, because group creation is."""
    mine = None
    for first in range(0, process.world_size, tp):
        group = dist.new_group(list(range(first, first + tp)), backend="gloo")
        if first <= process.rank < first + tp:
            mine = Lockstep(group, leader=first)
    assert mine is not None
    return mine
