"""Generation with transformers alone, for machines without vLLM: a full copy of the model, filled by the weight stream.

Requests are taken up in batches of at most max_num_seqs, left-padded, with a KV cache; rows leave it as they end.
Each request draws its random numbers from its own generator, one per token, so that tokens do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from verl_like.batch import pad_rows
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models import lora
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.families import padded_attention
from verl_like.models.loading import load_tokenizer
from verl_like.parallel.checksum import checksum, values_of
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.base import SteppedRolloutEngine
from verl_like.rollout.rng import preserve_rng
from verl_like.rollout.rollout_engine import Completion, FinishReason, GenerationRequest, WeightLoadError
from verl_like.rollout.sampling import completes_stop, draw, filtered_log_probs, shape_logits
from verl_like.rollout.step_loop import StepLoop

_SEED_MASK = 2**63 - 1


@dataclass(slots=True)
class _Row:
    """One response under way."""

    request: GenerationRequest
    uniform: Tensor  # float64 [max_tokens], the random number of each token
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def end(self, tokenizer: PreTrainedTokenizerBase | None) -> FinishReason | None:
        """Why the response is over after its last token, or None."""
        sampling = self.request.sampling
        if self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        may_stop = tokenizer is not None and sampling.stop and len(self.token_ids) > sampling.min_tokens
        if may_stop and completes_stop(tokenizer, self.token_ids, sampling.stop):
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_tokens else None


@dataclass(slots=True)
class _Batch:
    """Rows that are decoded together: b rows, S cached positions."""

    rows: list[_Row]
    cache: DynamicCache
    mask_bS: Tensor  # 1 where a cached position is real
    next_b1: Tensor  # the token that goes into the next forward pass

    def keep(self, index: list[int]) -> None:
        """Drop all other rows."""
        chosen = torch.tensor(index, device=self.mask_bS.device)
        self.rows = [self.rows[i] for i in index]
        self.cache.reorder_cache(chosen)  # also of states, which batch_select_indices leaves out
        self.mask_bS, self.next_b1 = self.mask_bS[chosen], self.next_b1[chosen]


class HFRolloutEngine(SteppedRolloutEngine):
    """One process's copy of the model. See RolloutEngine. Raises ValueError for tensor parallelism."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        process: ProcessInfo,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        tokenizer_size: int,
        max_model_len: int,
        seed: int,
        tokenizer: str,
    ) -> None:
        super().__init__(
            dtype=dtype,
            tokenizer_size=tokenizer_size,
            max_model_len=max_model_len,
            seed=seed + process.rank,
            keeps_adapters=lora.adapters_apart(model),
            reads_text=bool(rollout.stop),
        )
        if rollout.tensor_model_parallel_size > 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the hf rollout engine keeps "
                "the whole model in each process; set it to 1, or rollout.name=vllm"
            )
        self._device = process.device
        self._max_num_seqs = rollout.max_num_seqs
        self._tokenizer = load_tokenizer(tokenizer, model.trust_remote_code) if rollout.stop else None
        with preserve_rng():
            self._model: PreTrainedModel | None = _empty_model(
                hf_config, dtype, process.device, model.trust_remote_code
            )
            if self.keeps_adapters:
                _attach_adapters(self._model, model, dtype)
        self._stored = CheckpointNames(self._module)
        self._unseeded = torch.Generator().manual_seed((seed + process.rank) & _SEED_MASK)
        self._queue: list[_Row] = []
        self._batch: _Batch | None = None
        self._loop = StepLoop(self, device=process.device)

    # What the step loop calls.

    def add(self, request: GenerationRequest) -> None:
        generator = self._unseeded
        if request.seed is not None:
            generator = torch.Generator().manual_seed(request.seed & _SEED_MASK)
        uniform = torch.rand(request.sampling.max_tokens, generator=generator, dtype=torch.float64)
        self._queue.append(_Row(request, uniform))

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Prefill a new batch or decode one token of the current one."""
        if self._batch is None:
            rows, self._queue = self._queue[: self._max_num_seqs], self._queue[self._max_num_seqs :]
            self._batch, logits_bV = self._prefill(rows)
        else:
            logits_bV = self._decode(self._batch)
        self._sample(self._batch, logits_bV)
        return self._collect(self._batch)

    def has_unfinished(self) -> bool:
        return bool(self._queue) or self._batch is not None

    def abort(self) -> list[Completion]:
        rows = (self._batch.rows if self._batch is not None else []) + self._queue
        self._batch, self._queue = None, []
        return [self._completion(row, "abort") for row in rows]

    def _prefill(self, rows: list[_Row]) -> tuple[_Batch, Tensor]:
        prompts = [row.request.prompt_ids for row in rows]
        ids_bS = pad_rows(prompts, side="left", dtype=torch.int64).to(self._device)
        mask_bS = pad_rows(([1] * len(p) for p in prompts), side="left", dtype=torch.int64).to(self._device)
        cache = DynamicCache(config=self._module.config)
        logits_bV = self._forward(ids_bS, mask_bS, cache)
        return _Batch(rows=rows, cache=cache, mask_bS=mask_bS, next_b1=ids_bS[:, -1:]), logits_bV

    def _decode(self, batch: _Batch) -> Tensor:
        batch.mask_bS = torch.nn.functional.pad(batch.mask_bS, (0, 1), value=1)
        return self._forward(batch.next_b1, batch.mask_bS, batch.cache)

    def _forward(self, ids_bs: Tensor, mask_bS: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [b, V] of the token after the last of `ids_bs`."""
        positions_bS = (mask_bS.cumsum(dim=-1) - 1).clamp(min=0)
        output = self._module(
            input_ids=ids_bs,
            attention_mask=mask_bS,
            position_ids=positions_bS[:, -ids_bs.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1, : self.tokenizer_size]

    def _sample(self, batch: _Batch, logits_bV: Tensor) -> None:
        """One more token for each row; the log-prob is that of the distribution it was drawn from."""
        params = [row.request.sampling for row in batch.rows]
        vocab, device = logits_bV.shape[1], logits_bV.device
        greedy_b = torch.tensor([p.greedy for p in params], device=device)
        temperature_b = torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=device)
        top_k_b = torch.tensor([vocab if p.greedy or p.top_k < 1 else p.top_k for p in params], device=device)
        top_p_b = torch.tensor([1.0 if p.greedy else p.top_p for p in params], device=device)
        min_p_b = torch.tensor([0.0 if p.greedy else p.min_p for p in params], device=device)
        logits_bV = logits_bV.float()
        for logits_V, row in zip(logits_bV, batch.rows, strict=True):
            shape_logits(logits_V, row.request.sampling, row.request.prompt_ids, row.token_ids)
        log_probs_bV = filtered_log_probs(logits_bV, temperature_b, top_k_b, top_p_b, min_p_b)
        uniform_b = torch.stack([row.uniform[len(row.token_ids)] for row in batch.rows]).to(device)
        token_b = torch.where(greedy_b, log_probs_bV.argmax(dim=-1), draw(log_probs_bV, uniform_b))
        chosen_b = log_probs_bV.gather(1, token_b[:, None])[:, 0]
        for row, token, log_prob in zip(batch.rows, token_b.tolist(), chosen_b.tolist(), strict=True):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
        batch.next_b1 = token_b[:, None]

    def _collect(self, batch: _Batch) -> list[Completion]:
        """Take the rows that have ended out of the batch."""
        done, going = [], []
        for i, row in enumerate(batch.rows):
            reason = row.end(self._tokenizer)
            if reason is None:
                going.append(i)
            else:
                done.append(self._completion(row, reason))
        if not going:
            self._batch = None
        elif done:
            batch.keep(going)
        return done

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        return Completion(
            request_id=row.request.request_id,
            token_ids=row.token_ids,
            log_probs=row.log_probs,
            finish_reason=reason,
            weight_version=self._version if self._version is not None else -1,
        )

    # Weights and scoring: with the engine idle.

    @property
    def _module(self) -> PreTrainedModel:
        assert self._model is not None, "used after shutdown"
        return self._model

    @torch.no_grad()
    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        parameters = self._named_weights()
        if partial:
            parameters = {name: tensor for name, tensor in parameters.items() if lora.is_adapter(name)}
        missing = {id(parameter): name for name, parameter in reversed(parameters.items())}
        for name, tensor in stream:
            parameter = parameters.get(name)
            if parameter is None:
                raise WeightLoadError(f"the model has no {'adapter' if partial else 'weight'} {name}")
            if parameter.shape != tensor.shape:
                raise WeightLoadError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(tensor)
            missing.pop(id(parameter), None)
        if missing:
            raise WeightLoadError(f"weights that did not come: {sorted(missing.values())[:8]}")

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        named = {name: tensor for name, tensor in self._named_weights().items() if name in shapes}
        return list(zip(named, values_of([checksum(tensor) for tensor in named.values()]), strict=True))

    def _named_weights(self) -> dict[str, Tensor]:
        """Parameters under the names of checkpoints, all of them (tied ones have several), and the buffers that are
        saved. Experts are views into the parameter that holds them all."""
        named: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            named |= self._stored.views(name, parameter)
        saved = self._module.state_dict().keys()
        return named | {name: buffer for name, buffer in self._module.named_buffers() if name in saved}

    @torch.no_grad()
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scored: list[list[float]] = []
        for start in range(0, len(sequences), self._max_num_seqs):
            part = sequences[start : start + self._max_num_seqs]
            ids_bS = pad_rows(part, side="right", dtype=torch.int64).to(self._device)
            mask_bS = pad_rows(([1] * len(s) for s in part), side="right", dtype=torch.int64).to(self._device)
            output = self._module(input_ids=ids_bS, attention_mask=mask_bS, use_cache=False)
            log_probs = output.logits[:, :-1, : self.tokenizer_size].float().log_softmax(dim=-1)
            chosen_bS = log_probs.gather(2, ids_bS[:, 1:, None])[..., 0]
            scored += [row[: len(s) - 1].tolist() for row, s in zip(chosen_bS, part, strict=True)]
        return scored

    def shutdown(self) -> None:
        super().shutdown()
        self._model, self._batch, self._queue = None, None, []


def _empty_model(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The model with whatever its memory holds; buffers that are not saved (rotary frequencies) are computed."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=padded_attention(hf_config),
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _attach_adapters(hf: PreTrainedModel, model: ModelConfig, dtype: torch.dtype) -> None:
    """The trainer's adapters, to be filled by the weight stream, where B comes scaled."""
    for module in lora.attach(hf, model, dtype=dtype, seed=0).modules:
        module.scale = 1.0
    hf.requires_grad_(False)
