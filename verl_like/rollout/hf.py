"""Generation with transformers alone, for machines without vLLM: a full copy of the model, filled by the weight stream.

Batches are continuous: each step takes up what waits while fewer than max_num_seqs rows are under way, computes the new
ones' prompts alone, in parts of max_num_batched_tokens, and decodes one token of all others, whose keys and values stay
(hf_batch.py).
Each request draws its random numbers from its own generator, one per token, so that tokens do not depend on the batch.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from bisect import insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from verl_like.batch import pad_rows
from verl_like.config import ModelConfig
from verl_like.models import attention, exact, lora, vision
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.cost import ModelCost
from verl_like.models.families import model_class, padded_attention
from verl_like.models.loading import load_tokenizer, with_exact_biases
from verl_like.models.routes import Routers
from verl_like.models.vision import VisionInput
from verl_like.parallel.checksum import Slice, checksum, sketch, values_of
from verl_like.parallel.host_memory import is_out_of_memory
from verl_like.parallel.sharding import saved_buffers
from verl_like.registry import part
from verl_like.rollout import hf_cache
from verl_like.rollout.base import EngineSpec, SteppedRolloutEngine, preserve_rng
from verl_like.rollout.hf_batch import Batch
from verl_like.rollout.hf_decode import LeanDecoder
from verl_like.rollout.int8 import Int8Linear, quantise_linears
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled, WeightLoadError
from verl_like.rollout.rows import Proposer, Row, fixed_tokens
from verl_like.rollout.step_loop import StepLoop

log = logging.getLogger(__name__)

_ORDER = attrgetter("order")


class HFRolloutEngine(SteppedRolloutEngine):
    """Engine of transformers alone: one process's copy of the model. Raises ValueError for tensor parallelism."""

    def __init__(self, spec: EngineSpec) -> None:
        rollout, model, process = spec.rollout, spec.model, spec.process
        super().__init__(**spec.facts(), seed=spec.seed + process.rank, keeps_adapters=lora.adapters_apart(model))
        if rollout.tensor_model_parallel_size > 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the hf rollout engine keeps "
                "the whole model in each process; set it to 1, or rollout.name=vllm"
            )
        self._device = process.device
        self._max_num_seqs, self._max_prefill = rollout.max_num_seqs, rollout.max_num_batched_tokens
        self._tokenizer = load_tokenizer(spec.tokenizer, model.trust_remote_code) if self._reads_text else None
        with preserve_rng():
            self._model: PreTrainedModel | None = _empty_model(
                spec.hf_config, self.dtype, process.device, model.trust_remote_code
            )
            if self.keeps_adapters:
                _attach_adapters(self._model, model, self.dtype)
        self._exact = spec.exact
        if self._exact:
            attention.register()
            exact.put_in(self._module, attention.EXACT_NAME)
        self._stored = CheckpointNames(self._module)
        records = "rollout.enable_rollout_routing_replay=True"
        self._routers = Routers(self._module, records) if rollout.enable_rollout_routing_replay else None
        self._quantised: dict[str, Int8Linear] = {}  # by the names of checkpoints
        if rollout.quantization is not None:
            exchanged = quantise_linears(self._module)
            self._quantised = {self._stored_name(name): module for name, module in exchanged.items()}
        plain = self._vision is None and not self._exact
        self._lean = LeanDecoder.of(self._module) if plain else None
        storages = [parameter.untyped_storage() for parameter in self._module.parameters()]
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._places = itertools.count()
        self._waiting: list[Row] = []  # in the order in which they are taken up
        self._taken_up: list[Row] = []  # whose prompts are computed in the step under way
        self._batches: list[Batch] = []  # one, unless the model's caches cannot be joined (hf_batch.py)
        self.proposer: Proposer | None = None
        if rollout.speculative.method != "none":
            self.proposer = part("drafts", "lookup")(
                rollout.speculative, fixed_tokens(ModelCost.count(self._module), self._device)
            )
        self.prefilled_tokens = 0
        """Tokens of prompts, and of responses that were begun before, that were computed since the start: equal ones of
        rows that are taken up together once."""
        self._loop = StepLoop(self, device=process.device)

    def effective(self) -> Mapping[str, object]:
        return {"dtype": next(self._module.parameters()).dtype, "max_num_seqs": self._max_num_seqs}

    # What the step loop calls.

    def add(self, request: GenerationRequest) -> None:
        if self._vision is not None:
            for handle in request.media:
                self._vision.pixels(handle)  # one that is damaged fails this request, not the step that all are in
        insort(self._waiting, Row(request, self._seed_of(request), next(self._places)), key=_ORDER)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Sample one more token for each row: decode those under way, and take up waiting ones where there is room.

        Out of memory: half of the rows wait, from now on, and what was cached is computed again.
        """
        done: list[Completion] = []
        try:
            self._step(done)
        except (RuntimeError, MemoryError) as error:  # torch's own of a CPU has no class
            if not is_out_of_memory(error) or not self._fewer_rows():
                raise
            traceback.clear_frames(error.__traceback__)
        return done

    def _fewer_rows(self) -> bool:
        """Lower the number of rows at once, and begin all rows again, with the tokens that they have.

        False where it cannot be lowered.
        """
        running = len(self._rows()) - len(self._waiting)
        if running < 2:
            return False
        self._max_num_seqs, self.num_rescues = running // 2, self.num_rescues + 1
        log.warning(
            "out of memory with %d sequences at once: from now on at most %d (actor_rollout_ref.rollout.max_num_seqs); "
            "their tokens stay the same",
            *(running, self._max_num_seqs),
        )
        self._weights_changed()
        return True

    def _step(self, done: list[Completion]) -> None:
        """Run a step; rows that end go into `done`, also where it breaks off."""
        new = self._take_up()
        self._taken_up = new
        if self.proposer is not None and not new and len(self._batches) == 1:
            (batch,) = self._batches
            if any(drafts := self.proposer.propose(batch.rows)):
                self._decode_ahead(batch, drafts)
                self._collect(batch, done)
                self._batches = [each for each in self._batches if each.rows]
                for each in self._batches:
                    each.close_up()  # when who has ended is out: it needs memory, and may fail
                return
        stepped = [(batch, self._decode(batch)) for batch in self._batches]
        stepped += [self._prefill(part) for part in _parts(self._alike(new), self._max_prefill)]
        if len(stepped) > 1 and all(batch.can_join() for batch, _ in stepped):
            (running, _), *others = stepped
            running.join([batch for batch, _ in others])
            self._batches, self._taken_up = [running], []
            stepped = [(running, torch.cat([logits_bV for _, logits_bV in stepped]))]
        self._batches, self._taken_up = [batch for batch, _ in stepped], []
        for batch, logits_bV in stepped:
            batch.sample(logits_bV, self._sampling_version)
            self._collect(batch, done)
        self._batches = [batch for batch in self._batches if batch.rows]

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._batches)

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        ids = set(request_ids)
        dropped = [row for row in self._rows() if row.request.request_id in ids]
        self._waiting = [row for row in self._waiting if row.request.request_id not in ids]
        for batch in self._batches:
            staying = [i for i, row in enumerate(batch.rows) if row.request.request_id not in ids]
            if len(staying) < len(batch.rows):
                batch.keep(staying)
        self._batches = [batch for batch in self._batches if batch.rows]
        return [row.completion("abort") for row in dropped]

    def progress(self) -> dict[str, Sampled]:
        return {row.request.request_id: row.sampled for row in self._rows()}

    def _rows(self) -> list[Row]:
        return [row for batch in self._batches for row in batch.rows] + self._taken_up + self._waiting

    def _weights_changed(self) -> None:
        """Drop the cache, which the old weights computed: the next step computes it again, ahead of all that wait."""
        self._waiting, self._batches, self._taken_up = sorted(self._rows(), key=_ORDER), [], []

    def _take_up(self) -> list[Row]:
        room = self._max_num_seqs - sum(len(batch.rows) for batch in self._batches)
        rows, self._waiting = self._waiting[:room], self._waiting[room:]
        for row in rows:
            row.begun = True
        return rows

    def _alike(self, rows: list[Row]) -> list[list[Row]]:
        """Put rows together of which the same tokens are known: they are computed once. Models that see: each alone."""
        if self._vision is not None:
            return [[row] for row in rows]
        found: dict[Hashable, list[Row]] = {}
        for row in rows:
            found.setdefault(self._known(row), []).append(row)
        return [*found.values()]

    def _known(self, row: Row) -> Hashable:
        """Name what decides all that is computed for a row before its next token."""
        return tuple(row.known_ids)

    def _prefill(self, alike: list[list[Row]]) -> tuple[Batch, Tensor]:
        rows = [group[0] for group in alike]
        known = [row.known_ids for row in rows]
        self.prefilled_tokens += sum(map(len, known))
        ids_bS = pad_rows(known, side="left", dtype=torch.int64).to(self._device)
        length_b = torch.tensor([len(ids) for ids in known], device=self._device)
        width = ids_bS.shape[1]
        mask_bS = (torch.arange(width, device=self._device) >= width - length_b[:, None]).long()
        positions_bS = (mask_bS.cumsum(dim=-1) - 1).clamp(min=0)
        shift_b = torch.zeros_like(length_b)
        images = None
        if self._vision is not None:
            axes, features, media = self._vision.together([(len(row.known_ids), row.request.media) for row in rows])
            positions_bS = torch.stack([torch.nn.functional.pad(a, (width - a.shape[1], 0)) for a in axes], dim=1)
            positions_bS = positions_bS.to(self._device)
            shift_b = torch.stack([axis.max() + 1 - axis.shape[1] for axis in axes]).to(self._device)
            feature_ids = pad_rows(features, side="left", dtype=torch.int64, fill=-1)
            images = self._vision.load(feature_ids, media, self._device)
        cache = hf_cache.new_cache(self._module.config, whole=self._exact)
        batch = Batch(rows, cache, mask_bS, length_b, shift_b)
        logits_bV = self._forward(ids_bS, positions_bS, batch, alike, images)
        if all(len(group) == 1 for group in alike):
            return batch, logits_bV
        number_b = torch.tensor([i for i, group in enumerate(alike) for _ in group], device=self._device)
        batch.spread([row for group in alike for row in group], number_b)
        return batch, logits_bV[number_b]

    def _decode(self, batch: Batch) -> Tensor:
        assert batch.next_b1 is not None
        return self._forward(batch.next_b1, batch.widen(), batch, [[row] for row in batch.rows])

    def _decode_ahead(self, batch: Batch, drafts: Sequence[list[int]]) -> None:
        """Compute what follows each row's last token and each of its drafts, and sample as far as they are drawn."""
        assert batch.next_b1 is not None
        ids_bw = torch.cat([batch.next_b1, pad_rows(drafts, side="right", dtype=torch.int64).to(self._device)], dim=1)
        columns = ids_bw.shape[1]
        logits_bwV = self._logits(ids_bw, batch.widen(columns), batch, None, keep=columns)
        taken = batch.sample_ahead(logits_bwV, drafts, self._sampling_version, self._tokenizer)
        batch.settle(taken, columns)

    def _forward(
        self,
        ids_bs: Tensor,
        positions_bs: Tensor,
        batch: Batch,
        rows: list[list[Row]],
        images: VisionInput | None = None,
    ) -> Tensor:
        """Compute logits [b, V] of the token after the last of `ids_bs`, and note the routes of these for `rows`."""
        if self._routers is None:
            return self._logits(ids_bs, positions_bs, batch, images)[:, -1]
        with self._routers.noting() as noted:
            logits_bV = self._logits(ids_bs, positions_bs, batch, images)[:, -1]
        routes_bs = torch.stack(noted, 1).to(self._routers.dtype).unflatten(0, ids_bs.shape).cpu().numpy()
        for alike, routes_s, length in zip(rows, routes_bs, batch.length_b.tolist(), strict=True):
            for row in alike:
                row.went(routes_s[-min(length, len(routes_s)) :])  # prompts are padded on the left
        return logits_bV

    def _logits(
        self, ids_bs: Tensor, positions_bs: Tensor, batch: Batch, images: VisionInput | None, keep: int = 1
    ) -> Tensor:
        """Compute logits [b, keep, V] of the tokens after the last `keep` of `ids_bs`."""
        if self._vision is not None:
            output = vision.run(
                self._module,
                ids_bs,
                positions_bs.expand(3, *ids_bs.shape),
                images,
                collective=False,
                attention_mask=batch.mask_bS,
                past_key_values=batch.cache,
                use_cache=True,
            )
            logits_bkV = self._module.get_output_embeddings()(output.last_hidden_state[:, -keep:])
            return logits_bkV[..., : self.tokenizer_size]
        if self._lean is not None and ids_bs.shape[1] == 1 and self._lean.is_whole:
            logits_b1V = self._lean.logits(ids_bs, positions_bs, batch.mask_bS, batch.cache)
            return logits_b1V[..., : self.tokenizer_size]
        output = self._module(
            input_ids=ids_bs,
            **self._seen(batch.mask_bS, batch.mask_bS.shape[1] - batch.length_b),
            position_ids=positions_bs,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits[:, -keep:, : self.tokenizer_size]

    def _seen(self, mask_bS: Tensor, start_b: Tensor) -> dict[str, Any]:
        """Say which columns are a row's own: those of the mask, from `start_b` on."""
        return {"segments": exact.Columns(start_b)} if self._exact else {"attention_mask": mask_bS}

    def _collect(self, batch: Batch, done: list[Completion]) -> None:
        """Take the rows that have ended out of the batch, into `done`."""
        before, going = len(done), []
        for i, row in enumerate(batch.rows):
            reason = row.end(self._tokenizer)
            if reason is None:
                going.append(i)
            else:
                done.append(row.completion(reason))
        if len(done) > before:
            batch.keep(going)

    # Weights, scoring, memory: while no step runs.

    def sleep(self, discard: bool = False) -> None:
        """Give memory back; see RolloutEngine.

        Only thrown-away weights free any: a cache exists for requests under way alone.
        """
        super().sleep(discard=discard)
        if discard:
            with self._exclusive():
                for storage, _ in self._storages:
                    storage.resize_(0)

    @property
    def _module(self) -> PreTrainedModel:
        assert self._model is not None, "used after shutdown"
        return self._model

    @torch.no_grad()
    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)  # what `sleep` let go of
        parameters = self._named_weights()
        if partial:
            parameters = {name: tensor for name, tensor in parameters.items() if lora.is_adapter(name)}
        missing = {id(parameter): name for name, parameter in reversed(parameters.items())}
        missing |= {id(module): name for name, module in self._quantised.items()}
        for name, tensor in stream:
            quantised = self._quantised.get(name)
            if quantised is not None and quantised.weight_int8.shape == tensor.shape:
                quantised.take(tensor)
                missing.pop(id(quantised), None)
                continue
            parameter = parameters.get(name) if quantised is None else quantised.weight_int8
            if parameter is None:
                raise WeightLoadError(f"the model has no {'adapter' if partial else 'weight'} {name}")
            if parameter.shape != tensor.shape:
                raise WeightLoadError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(tensor)
            missing.pop(id(parameter), None)
            del tensor  # before the next is gathered
        if missing:
            raise WeightLoadError(f"weights that did not come: {sorted(missing.values())[:8]}")

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        named = {name: tensor for name, tensor in self._named_weights().items() if name in shapes}
        return list(zip(named, values_of([checksum(tensor) for tensor in named.values()]), strict=True))

    def weight_sketches(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, Tensor]]:
        return [
            (name, sketch(Slice(module.dequantised(), 0, 0)))
            for name, module in self._quantised.items()
            if name in shapes
        ]

    def _stored_name(self, name: str) -> str:
        """Name of a linear layer's weight in checkpoints."""
        return next(self._stored.views(name, torch.empty(0)))[0]

    def _named_weights(self) -> dict[str, Tensor]:
        """Parameters under the names of checkpoints (all names of tied ones), and the buffers that are saved.

        Experts are views into the parameter that holds them all.
        """
        named: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            named |= self._stored.views(name, parameter)
        for name, buffer in saved_buffers(self._module):
            named |= self._stored.views(name, buffer)
        return named

    @torch.no_grad()
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scored: list[list[float]] = []
        for start in range(0, len(sequences), self._max_num_seqs):
            part = sequences[start : start + self._max_num_seqs]
            ids_bS = pad_rows(part, side="right", dtype=torch.int64).to(self._device)
            mask_bS = pad_rows(([1] * len(s) for s in part), side="right", dtype=torch.int64).to(self._device)
            seen = self._seen(mask_bS, torch.zeros(len(part), dtype=torch.int64, device=self._device))
            output = self._module(input_ids=ids_bS, **seen, use_cache=False)
            log_probs = output.logits[:, :-1, : self.tokenizer_size].float().log_softmax(dim=-1)
            chosen_bS = log_probs.gather(2, ids_bS[:, 1:, None])[..., 0]
            scored += [row[: len(s) - 1].tolist() for row, s in zip(chosen_bS, part, strict=True)]
        return scored

    def shutdown(self) -> None:
        super().shutdown()
        self._model, self._lean, self._storages, self._batches, self._waiting = None, None, [], [], []


def _parts(alike: list[list[Row]], max_tokens: int) -> Iterator[list[list[Row]]]:
    """Cut rows into parts of about the same length, of at most `max_tokens` padded tokens; a longer row is alone.

    alike: rows of which the same tokens are known, which count once.
    """
    part: list[list[Row]] = []
    for group in sorted(alike, key=lambda group: len(group[0].known_ids), reverse=True):
        if part and (len(part) + 1) * len(part[0][0].known_ids) > max_tokens:
            yield part
            part = []
        part.append(group)
    if part:
        yield part


def _empty_model(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """Build the model with whatever its memory holds; buffers that are not saved (rotary frequencies) are computed."""
    hf_cache.register()
    attention = padded_attention(hf_config)
    with no_init_weights(), torch.device(device):
        model = model_class(hf_config).from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=hf_cache.ATTENTION_NAME if attention == "sdpa" else attention,
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return with_exact_biases(model).eval().requires_grad_(False)


def _attach_adapters(hf: PreTrainedModel, model: ModelConfig, dtype: torch.dtype) -> None:
    """Attach the trainer's adapters, to be filled by the weight stream, where B comes scaled."""
    for module in lora.attach(hf, model, dtype=dtype, seed=0).modules:
        module.scale = 1.0
    hf.requires_grad_(False)
