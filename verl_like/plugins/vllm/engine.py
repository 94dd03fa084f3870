"""Engine of vLLM in the worker's own process, driven request by request; tensor-parallel over neighbouring ranks.

Starts with dummy weights and refuses to generate until `load_weights` succeeded. What depends on vLLM's version is in
compat.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.rollout import reads_text
from verl_like.models.cost import ModelCost
from verl_like.models.loading import as_sent
from verl_like.models.lora import adapters_apart, is_adapter
from verl_like.models.routes import continued, route_type
from verl_like.plugins.vllm import compat, drafts, lora, models, reader, routes, versions, vision
from verl_like.registry import part
from verl_like.remote_storage import local_folder
from verl_like.rollout.base import SLEEPERS, EngineSpec, SteppedRolloutEngine, preserve_rng
from verl_like.rollout.held_weights import Layout, checksums, held_by, sketches
from verl_like.rollout.orders import lockstep_of
from verl_like.rollout.placed_images import placed_images
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    ResumeError,
    Sampled,
    SamplingParams,
    WeightLoadError,
    request_seed,
)
from verl_like.rollout.rows import fixed_tokens
from verl_like.rollout.step_loop import StepLoop

logger = logging.getLogger(__name__)

_CACHED_BLOCKS = 3  # of the KV cache, in the prompt that finds out whether it was emptied


class VLLMRolloutEngine(SteppedRolloutEngine):
    """Rank of a vLLM replica. See RolloutEngine."""

    def __init__(self, spec: EngineSpec) -> None:
        rollout, model, process = spec.rollout, spec.model, spec.process
        tp = rollout.tensor_model_parallel_size
        seed = request_seed(spec.seed, 0, process.rank // tp, 0) % 2**31  # of this replica
        super().__init__(**spec.facts(), seed=seed, keeps_adapters=adapters_apart(model))
        compat.set_environment(process.device)
        options = {"images": self._vision is not None, "speculates": rollout.own_drafts is not None}
        options["routes"] = rollout.enable_rollout_routing_replay
        versions.require_names(process.device, adapters=self.keeps_adapters, **options)
        self._sleep_mode = rollout.free_cache_engine and process.device.type == "cuda"  # vLLM on CPU has none
        sizes = (self.dtype, self.max_model_len, seed)
        kwargs = engine_arguments(rollout, model, *sizes, sleep_mode=self._sleep_mode, tokenizer=spec.tokenizer)
        if fields := models.missing_fields(spec.hf_config):
            kwargs["hf_overrides"] = fields | (kwargs.get("hf_overrides") or {})
        if self._vision is not None:
            kwargs |= vision.engine_options(rollout.limit_images)
            vision.prepare()
        for architecture in spec.hf_config.architectures or ():
            vision.let_text_in(architecture)
        if process.device.type == "cpu" and self.dtype != torch.bfloat16 and hasattr(spec.hf_config, "kv_lora_rank"):
            kwargs.setdefault("attention_backend", "CPU_MLA")  # a CPU with AMX would get the kernels of bfloat16
        if options["routes"] and process.device.type == "cuda":
            kwargs[routes.OPTION] = True
        self._lora_request: Any = lora.request() if self.keeps_adapters else None
        with preserve_rng():
            self._llm: Any = compat.start(kwargs, device=process.device, run_id=spec.run_id)
        if self.keeps_adapters:
            lora.let_base_weights_in(self._llm)
            if process.device.type == "cpu":
                lora.compute_directly(self._llm)
        self._model: Any = compat.model_of(self._llm)
        self._routes: routes.Captured | routes.Returned | None = None
        if options["routes"]:
            kind, on_cpu = route_type(spec.hf_config), process.device.type == "cpu"
            way: Any = routes.Captured if on_cpu else routes.Returned
            self._routes = way(self._llm, self._model, kind)
        self.proposer: drafts.Proposer | None = None
        if rollout.speculative.method != "none":
            self.proposer = proposer = compat.proposer_of(self._llm)
            cost = ModelCost.of(spec.hf_config, trust_remote_code=model.trust_remote_code)
            proposer.lookup = part("drafts", "lookup")(rollout.speculative, fixed_tokens(cost, process.device))
        if self.tokenizer_size < self.vocab_size:
            compat.mask_logits(self._model, self.tokenizer_size)
        self._tp = tp
        self._rank_in_replica = process.rank % tp
        self._lockstep = lockstep_of(process.rank, process.world_size, tp) if tp > 1 else None
        self._running: dict[str, _Running] = {}
        self._places = itertools.count()
        self._loop = StepLoop(self, device=process.device, lockstep=self._lockstep)

    def effective(self) -> Mapping[str, object]:
        return compat.effective(self._llm)

    # What the step loop calls.

    def add(self, request: GenerationRequest) -> None:
        self._add(dataclasses.replace(request, seed=self._seed_of(request)))

    def _add(self, request: GenerationRequest, cached_tokens: int | None = None) -> None:
        """Add a request to vLLM.

        A hot first token is a request of its own, after which the rest goes on as if it were resumed.
        """
        assert request.seed is not None
        sampling, seed, hot = request.sampling, request.seed, request.hot_start
        begun = request.resume.token_ids.tolist()
        if begun or hot is not None:
            sampling = _rest_of(request)
        if begun:
            seed = request_seed(seed, 2, len(begun), 0)
        if hot is not None:
            sampling = dataclasses.replace(hot, max_tokens=1, min_tokens=min(1, sampling.min_tokens))
        images = placed_images(request.media, self._vision)  # one that is damaged is no refusal of vLLM's
        try:
            params = compat.sampling_params(sampling, seed=seed, hot=hot is not None)
            compat.add_request(
                self._llm,
                request.request_id,
                request.prompt_ids + begun,
                params,
                lora_request=self._adapter_of(request),
                place=next(self._places),
                priority=request.priority,
                images=images,
            )
        except compat.refusals() as error:
            raise ValueError(f"request {request.request_id}: {error}") from error
        name = compat.own_name(self._llm, request.request_id)
        if self._routes is not None:
            self._routes.begin(name)
        running = _Running(request, [(0, self._sampling_version)], name, cached_tokens)
        self._running[request.request_id] = running
        if self.proposer is not None:
            self.proposer.rows[name] = drafts.Row(request)

    def _adapter_of(self, request: GenerationRequest) -> Any:
        """Tell vLLM's name of the adapter that a request uses; None: the base."""
        return self._lora_request

    def step(self) -> list[Completion]:
        done = []
        for output in [output for output in self._llm.llm_engine.step() if output.finished]:
            request = self._running[output.request_id].request
            completion = self._completion(output)
            if len(completion.sampled) < request.sampling.max_tokens and completion.finish_reason == "length":
                self._add(dataclasses.replace(request, resume=completion.sampled), completion.cached_tokens)
            else:
                done.append(completion)
        return done

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        ids = [i for i in request_ids if i in self._running]
        so_far = self.progress()
        self._llm.llm_engine.abort_request(ids)
        return [self._aborted(self._running.pop(i), so_far[i]) for i in ids]

    def _aborted(self, running: _Running, sampled: Sampled) -> Completion:
        drafted, kept = self._guessed(running, len(sampled))
        return Completion(
            request_id=running.request.request_id,
            sampled=self._routed(sampled, running),
            finish_reason="abort",
            drafted=drafted,
            kept=kept,
        )

    def progress(self) -> dict[str, Sampled]:
        found = {}
        for i, running in self._running.items():
            token_ids, log_probs = compat.sampled_so_far(self._llm, i)
            found[i] = running.all_of(token_ids, log_probs)
        return found

    # Weights, scoring, memory: with the engine idle.

    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        self._rest()
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
            lora.put(self._llm, adapters)
        compat.drop_caches(self._llm)  # also those of requests under way, which are computed again
        self._wake("kv_cache")  # not before: until now the trainer's full tensors needed the room

    def _weights_changed(self) -> None:
        for i, running in self._running.items():
            running.versions.append((len(compat.sampled_so_far(self._llm, i)[0]), self._sampling_version))

    def _base_weights(
        self, stream: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that vLLM's loader takes; those of adapters are put into `adapters`."""
        for name, tensor in stream:
            if self.keeps_adapters and is_adapter(name):
                adapters[name] = tensor
            else:
                yield name, tensor

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """Compute checksums; see RolloutEngine.

        Left out are stacked experts on CUDA, whose kernels may have moved numbers about.
        """
        layout = Layout(dict(shapes), rank=self._rank_in_replica, size=self._tp)
        parts = held_by(self._model, layout, reader)
        if self.keeps_adapters:
            parts = itertools.chain(parts, lora.held(self._llm, reader.fused_parts(self._model), layout))
        group = None if self._lockstep is None else self._lockstep.group
        with self._exclusive():
            return checksums(parts, layout, self.dtype, group)

    def weight_sketches(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, Tensor]]:
        layout = Layout(dict(shapes), rank=self._rank_in_replica, size=self._tp)
        group = None if self._lockstep is None else self._lockstep.group
        with self._exclusive():
            return sketches(held_by(self._model, layout, reader, quantised=True), layout, group)

    def _cached_tokens(self) -> int:
        """Count the cached tokens of one long prompt, the same at every call; a sleeping cache holds none."""
        block = compat.block_size(self._llm)
        length = min(_CACHED_BLOCKS * block + 1, self.max_model_len - 1)
        if self._asleep or not compat.caches_prefixes(self._llm) or length <= block:
            return 0  # what is cached is whole blocks
        prompt = [(7919 * i + 1) % self.tokenizer_size for i in range(length)]
        params = compat.sampling_params(SamplingParams(max_tokens=1, do_sample=False), seed=None)
        with self._alone():
            self._add_apart("cache-probe", prompt, params)
            (output,) = self._drain(1)
        return int(output.num_cached_tokens or 0)

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        params = compat.scoring_params()
        with self._alone():
            for i, sequence in enumerate(sequences):
                self._add_apart(f"score-{i}", list(sequence), params)
            found = {output.request_id: output for output in self._drain(len(sequences))}
        prompts = [found[f"score-{i}"].prompt_logprobs for i in range(len(sequences))]
        return [
            compat.log_probs_of(entries, sequence[1:]) for entries, sequence in zip(prompts, sequences, strict=True)
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the requests added here alone: those under way in a paused engine stay, and lose their cache."""
        if not self._running:
            yield
            return
        with compat.others_aside(self._llm):
            yield

    def _rest(self) -> None:
        """Let go of the step that asynchronous scheduling may have launched ahead, before memory or weights change."""
        if self._running:
            compat.drop_caches(self._llm)  # what that step gives is thrown away, and its requests begin again
        else:
            compat.settle(self._llm)

    def _add_apart(self, name: str, token_ids: list[int], params: Any) -> None:
        place = next(self._places)
        compat.add_request(self._llm, name, token_ids, params, place=place, lora_request=self._lora_request)

    def _drain(self, count: int) -> list[Any]:
        """Collect outputs of the engine's own requests."""
        outputs: list[Any] = []
        while len(outputs) < count:
            outputs += [output for output in self._llm.llm_engine.step() if output.finished]
        return outputs

    def sleep(self, discard: bool = False) -> None:
        """Give memory back; see RolloutEngine. Without CUDA or free_cache_engine the memory stays."""
        super().sleep(discard=discard)
        if self._sleep_mode and not self._asleep:
            with self._exclusive():
                self._rest()
                level = 2 if discard else 1
                self._llm.sleep(level=level, mode="keep")  # by default vLLM would abort what is under way
            self._asleep = set(SLEEPERS)

    def _resume(self, tags: list[str]) -> None:
        torch.cuda.empty_cache()  # vLLM maps this memory past torch's allocator, which must let go of it first
        self._llm.wake_up(tags=tags)

    def shutdown(self) -> None:
        super().shutdown()
        if self._llm is not None:
            self._wake_to_die()
            compat.stop(self._llm)
            self._llm = self._model = None
            compat.free()

    def _wake_to_die(self) -> None:
        """Wake before shutdown, because vLLM cannot free memory that sleeps.

        It reports CUDA errors then, and this process could start no other engine.
        """
        try:
            self._wake(*SLEEPERS)
        except Exception:
            logger.warning("vLLM could not be woken before its end: CUDA errors may follow", exc_info=True)

    def _completion(self, output: Any) -> Completion:
        sampled, running = output.outputs[0], self._running.pop(output.request_id)
        token_ids = list(sampled.token_ids)
        if sampled.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {sampled.finish_reason!r}")
        all_tokens = running.all_of(token_ids, compat.log_probs_of(sampled.logprobs, token_ids))
        drafted, kept = self._guessed(running, len(all_tokens))
        return Completion(
            request_id=output.request_id,
            sampled=self._routed(all_tokens, running, output),
            finish_reason=sampled.finish_reason,
            cached_tokens=int(output.num_cached_tokens or 0)
            if running.cached_tokens is None
            else running.cached_tokens,
            drafted=drafted,
            kept=kept,
        )

    def _guessed(self, running: _Running, num_sampled: int) -> tuple[int, int]:
        """Forget the guesses of a request that ends; how many there were, and how many of them are in its tokens."""
        row = None if self.proposer is None else self.proposer.rows.pop(running.name)
        return (0, 0) if row is None else (row.drafted, row.kept_of(num_sampled))

    def _routed(self, sampled: Sampled, running: _Running, output: Any = None) -> Sampled:
        """Add the routes of a request that ends."""
        if self._routes is None:
            return sampled
        found = continued(running.request.resume.routes, self._routes.take(running.name, output))
        return dataclasses.replace(sampled, routes=found)


@dataclass(frozen=True, slots=True)
class _Running:
    """Request in vLLM.

    versions: (tokens sampled before, version of the weights since).
    name: vLLM's own of the request.
    cached_tokens: of the prompt, if its first token was a request of its own.
    """

    request: GenerationRequest
    versions: list[tuple[int, int]]
    name: str
    cached_tokens: int | None = None

    def all_of(self, token_ids: list[int], log_probs: list[float]) -> Sampled:
        """Join the tokens that the request resumed from and those that vLLM has sampled."""
        counts = [first for first, _ in self.versions[1:]] + [len(token_ids)]
        versions = np.repeat([v for _, v in self.versions], np.diff([0, *counts]))
        new = Sampled.of(token_ids, log_probs, versions.tolist())
        return self.request.resume + new if len(self.request.resume) else new


def _rest_of(request: GenerationRequest) -> SamplingParams:
    """Sampling parameters of a response that is begun already: to vLLM, the beginning is part of the prompt."""
    sampling, done = request.sampling, len(request.resume)
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words or sampling.stop:
        what, fix = "resumes a response", "sample it anew"
        if not done:
            what, fix = "has a first token of its own temperature", "use rollout.name=hf or sglang"
        raise ResumeError(
            f"request {request.request_id} {what} with presence_penalty, frequency_penalty, bad_words or "
            f"stop: vLLM would not count the tokens of its beginning; leave these out, or {fix}"
        )
    return dataclasses.replace(sampling, max_tokens=request.num_left, min_tokens=max(0, sampling.min_tokens - done))


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
    """Build the arguments of `vllm.LLM`; `rollout.engine_kwargs.vllm` goes on top as it is (null values are left out).

    Args:
        rollout: rollout section of the configuration.
        model: model section.
        dtype: precision of the weights.
        max_model_len: most tokens of prompt + response.
        seed: seed of the engine.
        sleep_mode: vLLM can give its memory back.
        tokenizer: folder or name, where vLLM reads texts; empty: none.
    """
    kwargs: dict[str, Any] = {
        "model": local_folder(model.path),
        "skip_tokenizer_init": not reads_text(rollout),  # texts that end a response are all that is read
        "trust_remote_code": model.trust_remote_code,
        "generation_config": "vllm",  # sampling defaults and end tokens are ours, not the model folder's
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "scheduling_policy": "priority",
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "enable_sleep_mode": sleep_mode,
        "disable_log_stats": rollout.disable_log_stats,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "seed": seed,
    }
    if reads_text(rollout):
        kwargs["tokenizer"] = local_folder(tokenizer)
    if adapters_apart(model):
        kwargs |= lora.engine_options(model.lora_rank)
    if overrides := as_sent(model):
        kwargs["hf_overrides"] = overrides
    if rollout.quantization is not None:
        kwargs["quantization"] = rollout.quantization  # of what `reload` brings, layer by layer
    if rollout.cudagraph_capture_sizes is not None and not rollout.enforce_eager:
        kwargs["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    if rollout.own_drafts is not None:
        kwargs["speculative_config"] = rollout.own_drafts
    extra = {name: value for name, value in rollout.engine_kwargs.vllm.items() if value is not None}
    return kwargs | extra
