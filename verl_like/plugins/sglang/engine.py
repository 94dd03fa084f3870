"""SGLang's scheduler, stepped request by request; one rank of a tensor-parallel replica of neighbouring ranks.

Starts with dummy weights and refuses to generate until `load_weights` succeeded. SGLang schedules, caches and computes
logits; tokens are drawn here (rows.py), so that seeds, log-probs and penalties are those of the hf engine. What depends
on SGLang's version is in compat.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models.loading import as_sent, load_tokenizer
from verl_like.models.lora import adapters_apart
from verl_like.plugins.sglang import compat, images
from verl_like.remote_storage import local_folder
from verl_like.rollout.base import SLEEPERS, EngineSpec, SteppedRolloutEngine
from verl_like.rollout.held_weights import Layout, checksums, held_by
from verl_like.rollout.orders import lockstep_of
from verl_like.rollout.placed_images import placed_images
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled, request_seed
from verl_like.rollout.rows import Knobs, Row, draw_tokens
from verl_like.rollout.step_loop import StepLoop

_PROBE_TOKENS = 64  # of the prompt that finds out whether the cache was emptied


class SGLangRolloutEngine(SteppedRolloutEngine):
    """One rank of an SGLang replica, for a process of its own. See RolloutEngine.

    The spec's address: host and port where the replica's ranks meet.
    """

    def __init__(self, spec: EngineSpec) -> None:
        rollout, model, process = spec.rollout, spec.model, spec.process
        tp = rollout.tensor_model_parallel_size
        seed = request_seed(spec.seed, 0, process.rank // tp, 0) % 2**31  # of this replica
        super().__init__(**spec.facts(), seed=seed)
        if adapters_apart(model):
            raise ValueError("model.lora.merge=False with rollout.name=sglang: set model.lora.merge=True")
        self._tp, self._rank = tp, process.rank % tp
        self._tokenizer = load_tokenizer(spec.tokenizer, model.trust_remote_code) if self._reads_text else None
        self._sleep_mode = rollout.free_cache_engine and process.device.type == "cuda"
        compat.prepare(process.device, quiet=rollout.disable_log_stats, sees=self._vision is not None)
        sizes = (spec.hf_config, self.dtype, self.max_model_len, seed)
        kwargs = engine_arguments(rollout, model, *sizes, process.device, sleep_mode=self._sleep_mode)
        assert spec.address is not None  # build_rollout_engine saw to it
        host, port = spec.address
        self._scheduler: Any = compat.start(kwargs, device=process.device, rank=self._rank, host=host, port=port)
        if self.tokenizer_size < self.vocab_size:
            compat.mask_scores(self._scheduler, self.tokenizer_size)
        compat.runner_of(self._scheduler).sample = self._sample
        self._request: Any = compat.request_class()
        self._rows: dict[str, Any] = {}  # SGLang's requests by their names there
        self._names: dict[str, str] = {}  # by request id
        self._in_step: list[Any] = []
        self._knobs: tuple[list[Row], Knobs] | None = None  # of the last step's rows
        self._places = itertools.count()
        self._lockstep = lockstep_of(self._rank, tp, tp) if tp > 1 else None
        self._loop = StepLoop(self, device=process.device, lockstep=self._lockstep)

    # What the step loop calls.

    def add(self, request: GenerationRequest) -> None:
        token_ids = request.prompt_ids + request.resume.token_ids.tolist()
        made = self._new(token_ids, max_new_tokens=request.num_left, priority=request.priority)
        made.row, made.tokenizer_of_row = Row(request, self._seed_of(request)), self._tokenizer
        if self._vision is not None and request.media:
            positions = self._vision.positions(len(token_ids) + 1, request.media)
            images.show(made, placed_images(request.media, self._vision), positions)
        compat.add(self._scheduler, made)
        self._rows[made.rid], self._names[request.request_id] = made, made.rid

    @torch.no_grad()
    def step(self) -> list[Completion]:
        done = [request for request in self._step() if request.finished() and request.rid in self._rows]
        return [self._ended(request) for request in done]

    def has_unfinished(self) -> bool:
        return bool(self._rows)

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        dropped = [self._forget(self._names[i]) for i in request_ids if i in self._names]
        compat.abort(self._scheduler, [request.rid for request in dropped])
        return [request.row.completion("abort", request.cached_tokens) for request in dropped]

    def progress(self) -> dict[str, Sampled]:
        return {i: self._rows[name].row.sampled for i, name in self._names.items()}

    def _ended(self, request: Any) -> Completion:
        self._forget(request.rid)
        row: Row = request.row
        reason = row.end(self._tokenizer)
        if reason is None:
            raise RuntimeError(f"SGLang ended request {row.request.request_id}: {request.finished_reason.to_json()}")
        return row.completion(reason, request.cached_tokens)

    def _forget(self, name: str) -> Any:
        request = self._rows.pop(name)
        del self._names[request.row.request.request_id]
        return request

    def _new(self, token_ids: Sequence[int], **how: Any) -> Any:
        name = f"{next(self._places):016x}"
        return compat.new_request(self._request, name, token_ids, vocab_size=self.vocab_size, **how)

    def _step(self) -> list[Any]:
        def beginning(batch: Any) -> None:
            self._in_step = list(batch.reqs)

        return compat.step(self._scheduler, beginning)

    def _sample(self, logits_output: Any, forward_batch: Any) -> Tensor:
        """Draw the next token of each request of the step, as SGLang's sampler would, and keep it with its log-prob."""
        logits_bV = logits_output.next_token_logits[:, : self.tokenizer_size].float()
        token_b, log_prob_b = logits_bV.argmax(dim=-1), logits_bV.new_zeros(len(logits_bV))
        drawn = [i for i, request in enumerate(self._in_step) if request.row is not None]
        if drawn:
            rows = [self._in_step[i].row for i in drawn]
            index_b = torch.tensor(drawn, device=logits_bV.device)
            found_b, log_probs_b = draw_tokens(rows, self._knobs_of(rows, logits_bV), logits_bV[index_b])
            token_b[index_b], log_prob_b[index_b] = found_b, log_probs_b
        for request, token, log_prob in zip(self._in_step, token_b.tolist(), log_prob_b.tolist(), strict=True):
            request.drawn = (token, log_prob, self._sampling_version)
        if forward_batch.return_logprob:
            logits_output.next_token_logprobs = log_prob_b
        return token_b

    def _knobs_of(self, rows: list[Row], logits_bV: Tensor) -> Knobs:
        if self._knobs is None or self._knobs[0] != rows:
            params = [row.request.sampling for row in rows]
            self._knobs = rows, Knobs.of(params, logits_bV.shape[1], logits_bV.device)
        return self._knobs[1]

    # Weights, scoring, memory: with no step running.

    @torch.no_grad()
    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        assert not partial, "adapters are merged"
        with compat.alone(self._scheduler):
            self._wake("weights")
            compat.load(self._scheduler, stream)
        self._wake("kv_cache")  # not before: until now the trainer's full tensors needed the room

    def _weights_changed(self) -> None:
        """Do nothing, as each row notes the version of every token."""

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """Compute the checksum of every whole weight that the engine holds; collective over its tensor-parallel ranks.

        Stacked experts on CUDA are left out: their kernels may have moved the numbers about.
        """
        layout = Layout(dict(shapes), rank=self._rank, size=self._tp)
        parts = held_by(compat.runner_of(self._scheduler).model, layout, compat)
        group = None if self._lockstep is None else self._lockstep.group
        with self._exclusive():
            return checksums(parts, layout, self.dtype, group)

    @torch.no_grad()
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        requests = [self._new(sequence, scored=True) for sequence in sequences]
        self._run(requests)
        return [compat.scores_of(request) for request in requests]

    @torch.no_grad()
    def _cached_tokens(self) -> int:
        length = min(_PROBE_TOKENS, self.max_model_len - 1)
        prompt = [(7919 * i + 1) % self.tokenizer_size for i in range(length)]
        request = self._new(prompt)
        self._run([request])
        return int(request.cached_tokens)

    def _run(self, requests: Sequence[Any]) -> None:
        """Compute these requests to their ends, before those already in flight."""
        with compat.alone(self._scheduler):
            for request in requests:
                compat.add(self._scheduler, request)
            while not all(request.finished() for request in requests):
                self._step()

    def sleep(self, discard: bool = False) -> None:
        """Release the engine's memory. Without CUDA or free_cache_engine the memory stays.

        discard: for the base class alone; the start decides whether weights are kept elsewhere (rollout.sleep_level).
        """
        super().sleep(discard=discard)
        if self._sleep_mode and not self._asleep:
            with self._exclusive(), compat.alone(self._scheduler):
                compat.release(self._scheduler, SLEEPERS)
            self._asleep = set(SLEEPERS)

    def _resume(self, tags: list[str]) -> None:
        compat.resume(self._scheduler, tags)

    def shutdown(self) -> None:
        super().shutdown()
        self._scheduler = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def engine_arguments(
    rollout: RolloutConfig,
    model: ModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    max_model_len: int,
    seed: int,
    device: torch.device,
    *,
    sleep_mode: bool,
) -> dict[str, Any]:
    """Arguments of SGLang's `ServerArgs`; `rollout.engine_kwargs.sglang` goes on top as it is (null values are left
    out)."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kwargs: dict[str, Any] = {
        "model_path": local_folder(model.path),
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": compat.context_length(max_model_len),
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": sleep_mode,
        "enable_weights_cpu_backup": sleep_mode and rollout.sleep_level == 1,
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "disable_overlap_schedule": True,  # a token is drawn from a row that has all tokens before it
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": rollout.enforce_eager,
        "log_level": "error" if rollout.disable_log_stats else "info",
        "random_seed": seed,
    }
    if rollout.cudagraph_capture_sizes is not None and not rollout.enforce_eager:
        kwargs["cuda_graph_bs_decode"] = list(rollout.cudagraph_capture_sizes)
    if overrides := as_sent(model):
        kwargs["json_model_override_args"] = json.dumps(overrides)
    if device.type == "cpu":
        token_bytes = 2 * text.num_hidden_layers * heads * width * dtype.itemsize
        kwargs |= {
            "attention_backend": "torch_native",
            "mm_attention_backend": "sdpa",
            "disable_cuda_graph": True,
            "max_total_tokens": compat.room_for_cache(rollout.max_num_seqs, max_model_len, token_bytes),
        }
    return kwargs | {name: value for name, value in rollout.engine_kwargs.sglang.items() if value is not None}
