"""The two engines behind the protocol: one that trains, one that samples, each with one copy of the base model.

Whose adapter acts is chosen for each call (adapters.py). A call with one request depends on its arguments and that
adapter alone: random numbers come from the request's seed. Requests that are given together share a pass of the base.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import Denominators, Experience, MediaHandle, Metric, Sequences, tokens
from verl_like.config import PPOConfig
from verl_like.config.micro_batches import MicroBatchRule
from verl_like.config.roles import ACTOR, every_role
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.engine.train_engine import CHOSEN
from verl_like.flat_columns import on_rows
from verl_like.models import blocks
from verl_like.models.heads import TOP_IDS, TOP_LOG_PROBS, PolicyModel
from verl_like.models.loading import load_hf_config
from verl_like.models.packing import ModelInput
from verl_like.parallel.dist import init_distributed, shutdown_distributed
from verl_like.plugins.tinker_server.adapters import Adapter, Places
from verl_like.plugins.tinker_server.bodies import AdapterSpec
from verl_like.plugins.tinker_server.losses import HIGH, LOSSES, LOW
from verl_like.plugins.tinker_server.samplers import MOST_SNAPSHOTS, SAMPLERS
from verl_like.rollout.base import EngineSpec
from verl_like.rollout.build import rollout_dtype
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams, request_seed

_COLUMNS = ("weights", "logprobs", "advantages", LOW, HIGH)
_READ = (CHOSEN, TOP_IDS, TOP_LOG_PROBS)
_ONE = Denominators(num_tokens=1, num_sequences=1, max_response_length=1)  # losses are sums
_NOT_FINITE = "a number of a pass that several models share is not finite"
Columns = Mapping[str, NDArray[Any]]
Result = tuple[list[NDArray[np.float32]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One datum: input tokens [T]; targets [T, K], of which each is predicted from the tokens up to its place.

    columns: inputs of the loss, [T, K] or [T]. media: images, placed in ids.
    """

    ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    columns: Columns = dataclasses.field(default_factory=dict)
    media: tuple[MediaHandle, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rows of one request, and the loss that they are for: its name in LOSSES, and its numbers."""

    model: str
    rows: Sequence[Row]
    loss: str
    settings: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt, and all that is asked of a sampler about it.

    targets: ids [T - 1, K] to be scored behind its tokens; -1: none.
    last: number of the prompt's tokens, from its end, that are scored.
    """

    ids: list[int]
    media: tuple[MediaHandle, ...] = ()
    sampling: SamplingParams
    seed: int
    num_samples: int = 1
    scored: bool = False
    last: int | None = None
    topk: int = 0
    topk_sampled: int = 0
    targets: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Samples as (ids, log-probs, whether they stopped by themselves), and what was asked about the prompt."""

    samples: list[tuple[NDArray[np.int32], NDArray[np.float32], bool]]
    log_probs: NDArray[np.float32] | None = None  # [T], NaN where nothing was scored
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None  # [T, k]
    topk_sampled: list[tuple[NDArray[np.int32], NDArray[np.float32]]] | None = None
    targets: NDArray[np.float32] | None = None  # [T - 1, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass(Experience):
    """Rows of requests. given_T: [T, C, K], what losses read, by _COLUMNS. owner_B: numbers of adapters."""

    given_T: Tensor = tokens()
    place_B: Tensor  # int64
    owner_B: Tensor


class _Recorded:
    """Loss function of the engine, a sum over requests.

    It also keeps the log-probs that it saw, by place of the row, and the losses by request.
    """

    wants = frozenset({CHOSEN})

    def __init__(self, asked: Sequence[Work]) -> None:
        self._asked = asked
        self._request_B = torch.arange(len(asked)).repeat_interleave(torch.tensor([len(each.rows) for each in asked]))
        self.begin()

    def begin(self) -> None:
        """Forget what a pass that broke off gave."""
        self.log_probs: dict[int, Tensor] = {}
        self.losses = [0.0] * len(self._asked)

    def is_finite(self) -> bool:
        """Return True where all losses are numbers."""
        return all(map(math.isfinite, self.losses))

    def results(self) -> list[Result]:
        """Log-probs [T, K] of each row's targets and the metrics, by request, after a whole pass."""
        rows = iter(row for _, row in sorted(self.log_probs.items()))
        parts = [[next(rows)[:, : row.targets.shape[1]].numpy() for row in each.rows] for each in self._asked]
        return [(part, {"loss:sum": loss}) for part, loss in zip(parts, self.losses, strict=True)]

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Sum the loss over the tokens of a micro-batch."""
        assert isinstance(experience, _Pass)
        p_bRK = outputs[CHOSEN]
        for place, length, p_RK in zip(
            experience.place_B.tolist(), experience.response_length_B.tolist(), p_bRK.detach().cpu(), strict=True
        ):
            self.log_probs[place] = p_RK[:length]
        loss, request_b = p_bRK.new_zeros(()), self._request_B[experience.place_B]
        for number in request_b.unique().tolist():
            asked, mine = self._asked[number], (request_b == number).nonzero()[:, 0].to(p_bRK.device)
            width = max(row.targets.shape[1] for row in asked.rows)
            columns: dict[str, Any] = {n: torch.tensor(v, device=p_bRK.device) for n, v in asked.settings.items()}
            given_bRCK = experience.given_BR[mine]
            columns |= {name: given_bRCK[..., _COLUMNS.index(name), :width] for name in asked.rows[0].columns}
            own = LOSSES[asked.loss].of_tokens(p_bRK[mine][..., :width], columns).sum()
            self.losses[number] += float(own.detach())
            loss = loss + own
        return loss, {}


class _Trained(FSDPEngine):
    """Training engine whose base is frozen: gradients go to whatever adapters act."""

    _acting: Sequence[Adapter | None] = ()

    def __init__(self, config: PPOConfig, process: Any, tokenizer_size: int, seed: int) -> None:
        role = every_role(config)[ACTOR]
        problems: list[str] = []
        self.rule: MicroBatchRule = role.passes["update"].rule(problems, 1)
        super().__init__(dataclasses.replace(role, optim=None), process, tokenizer_size=tokenizer_size, seed=seed)
        self.shares_prompts = False  # every row is its own
        if role.model.enable_gradient_checkpointing:
            blocks.enable_checkpointing(self.model.hf, selective=role.model.recompute_granularity == "selective")
        self.places = Places(self.model.hf, head=False)
        self._head = self.places.kinds["train_unembed"][0] if self.places.kinds["train_unembed"] else ""

    @contextmanager
    def adapted(self, adapters: Sequence[Adapter | None], seed: int) -> Iterator[PolicyModel]:
        """Let adapters act inside, each on its own rows, with random numbers of their own."""
        model = self.model
        assert isinstance(model, PolicyModel)
        self._acting = adapters
        self._rescue.forget()  # what ran out of memory before was another's
        model.low_rank = self._of_head(None)
        with self.places.active(adapters), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                yield model
            finally:
                model.low_rank = None

    def _of_head(self, owner_N: Tensor | None) -> tuple[Tensor, Tensor, Any] | None:
        """Join the adapters' pairs at the output head side by side: a token's scale is 0 at those of others."""
        found = [(i, each) for i, each in enumerate(self._acting) if each is not None and self._head in each.pairs]
        if not found:
            return None
        if owner_N is None:
            return *found[0][1].pairs[self._head], found[0][1].scale
        pairs = [each.pairs[self._head] for _, each in found]
        scale_Nr = [(owner_N == i)[:, None].float().expand(-1, each.spec.rank) * each.scale for i, each in found]
        a_rH, b_Vr = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
        return a_rH, b_Vr, torch.cat(scale_Nr, 1).to(self.device)

    def decode(self, media: Iterable[MediaHandle]) -> None:
        """Read the pixels of images, which stay in memory for the passes. Raises MediaError for a damaged one."""
        for handle in media:
            assert self._vision is not None
            self._vision.pixels(handle)

    def image_places(self, media: Iterable[MediaHandle]) -> list[int]:
        """List the places of images' tokens among the tokens that they are placed in."""
        spans = [(handle.starts[0], self._vision.num_tokens(handle)) for handle in media if self._vision is not None]
        return [place for start, count in spans for place in range(start, start + count)]

    def _owners(self, rows: Sequences) -> Tensor | None:
        return rows.owner_B if isinstance(rows, _Pass) else None

    def _model_input(self, rows: Sequences | None, *, notes_routes: bool = False) -> ModelInput:
        """Make the input, and say whose each of its tokens is where several adapters act."""
        inputs = super()._model_input(rows, notes_routes=notes_routes)
        if len(self._acting) > 1 and isinstance(rows, _Pass):
            owner_N = on_rows(rows.owner_B, rows.response_length_B)[inputs.out_N.cpu()]
            owner_S = torch.zeros(inputs.input_ids.numel(), dtype=torch.int64)
            owner_S[inputs.select_N.cpu()] = owner_N
            self.places.arrange(owner_S, self.device)
            assert isinstance(self.model, PolicyModel)
            self.model.low_rank = self._of_head(owner_N)
        return inputs

    def gradient(self, batch: Experience, recorded: _Recorded, adapters: Sequence[Adapter]) -> None:
        """Add the gradients of requests to those of their adapters, whole or not at all.

        Raises FloatingPointError where several share the pass and a number is not finite: it may be others' too.
        """

        def dropped() -> None:
            recorded.begin()
            for adapter in adapters:
                adapter.drop_pass()

        def attempt(rule: MicroBatchRule) -> list[dict[str, Metric]]:
            dropped()
            return self.accumulate(batch, Objective(recorded, _ONE, 1.0), rule)

        try:
            with self._resident(optimizer=False):
                self._rescue.repeated("update", self.rule, batch, attempt)
            finite = recorded.is_finite() and all(adapter.is_finite() for adapter in adapters)
            if len(adapters) > 1 and not finite:
                raise FloatingPointError(_NOT_FINITE)
        except BaseException:
            dropped()
            raise
        for adapter in adapters:
            adapter.take_gradients()


class Engines:
    """Adapters in memory, and all that is computed with them. Not thread-safe: one thread calls.

    Raises ValueError where the configuration does not fit the model.
    """

    def __init__(self, config: PPOConfig, *, device: str, **facts: Any) -> None:
        """facts: tokenizer_size, max_model_len (tokens) and run_id."""
        policy, seed = config.actor_rollout_ref, config.trainer.seed
        self._alpha, self._base, self.models = config.serve.lora_alpha, policy.model.path, dict[str, Adapter]()
        self._snapshots: OrderedDict[Path, Adapter] = OrderedDict()
        self._running: dict[str, list[str]] = {}  # requests, with the sampler's for each of their samples
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()  # of these two: cancellations come from another thread
        with ExitStack() as stack:
            process = init_distributed(0, 1, 0, 1, "127.0.0.1", 0, device)
            stack.callback(shutdown_distributed)
            self._train = _Trained(config, process, facts["tokenizer_size"], seed)
            rollout = dataclasses.replace(policy.rollout, stop=["\0"])  # so that it has the tokenizer: requests stop
            facts |= {"process": process, "hf_config": load_hf_config(policy.model), "seed": seed}
            facts |= {"tokenizer": config.data.tokenizer or policy.model.path, "model": policy.model}
            spec = EngineSpec(rollout=rollout, dtype=rollout_dtype(rollout, process.device), **facts)
            self.sampler = SAMPLERS[rollout.engine.code](spec, config.serve, self._train.places)
            stack.callback(self.sampler.shutdown)
            self.sampler.load_weights(self._train.export_weights(self.sampler.dtype), 0)
            self._stack = stack.pop_all()
        self.device = self._train.device

    def close(self) -> None:
        """End both engines."""
        self._stack.close()

    # --- models of tenants -------------------------------------------------------------------------------------------

    def has(self, model: str) -> bool:
        """Return True where the model is in memory."""
        return model in self.models

    def check(self, spec: AdapterSpec) -> None:
        """Raise ValueError for an adapter that this base cannot have."""
        if strange := [name for name in self._train.places.targets(spec) if name in self.sampler.unadapted]:
            raise ValueError(
                f"{strange[:4]} get adapters in training, and none in the engine that samples (rollout.name=vllm): "
                "create the model with train_attn=False or train_mlp=False, or start the server with rollout.name=hf"
            )

    def create(self, model: str, spec: AdapterSpec) -> None:
        """Begin a model from the base."""
        self.models[model] = Adapter.new(spec, self._alpha, self._train.places, self.device)

    def load(self, model: str, folder: Path, *, optimizer: bool) -> None:
        """Begin a model, or go on with one, from a saved state. Raises ValueError for another rank or targets."""
        new, old = Adapter.load(folder, self.device, optimizer=optimizer), self.models.get(model)
        if old is not None and [a.shape for a in old.parameters()] != [a.shape for a in new.parameters()]:
            raise ValueError(f"the state is of rank {new.spec.rank} with other targets: it does not fit this model")
        self.models[model] = new

    def saver(self, model: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        """Give what writes a model's adapter, and the states of its optimizer, in any thread.

        The model stays as it is until that is done.
        """
        return partial(self.models[model].save, folder, self._base, optimizer=optimizer)

    def drop(self, model: str) -> None:
        """Forget a model that is in memory."""
        self.models.pop(model, None)

    def forward_backward(self, asked: Sequence[Work], *, backward: bool, seed: int) -> list[Result]:
        """Compute log-probs [T, K] of each row's targets and the losses; with `backward` also add the gradients.

        Several requests share the pass, whole or not at all. Raises FloatingPointError where a number of a pass that
        models share is not finite: compute each alone.
        """
        self._train.decode(handle for each in asked for row in each.rows for handle in row.media)
        recorded, models = _Recorded(asked), list(dict.fromkeys(each.model for each in asked))
        owners = [models.index(each.model) for each in asked for _ in each.rows]
        adapters = [self.models[model] for model in models]
        batch = _batch([row for each in asked for row in each.rows], owners)
        with self._train.adapted(adapters, seed):
            if backward:
                self._train.gradient(batch, recorded, adapters)
            else:
                found = self._train.forward(batch, want=recorded.wants, rule=self._train.rule)
                recorded({name: batch.padded(values) for name, values in found.items()}, batch, _ONE)
                if len(models) > 1 and not recorded.is_finite():
                    raise FloatingPointError(_NOT_FINITE)
        return recorded.results()

    def optim_step(self, model: str, params: dict[str, float]) -> dict[str, float]:
        """Take one step of the model's optimizer."""
        return self.models[model].step(params)

    def drop_gradient(self, model: str) -> None:
        """Drop what passes have added up since the last step."""
        if model in self.models:
            self.models[model].gradient = None

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, asked: Sequence[tuple[str, Path | None, Prompt]]) -> list[Answer | None]:
        """Answer prompts together: of each its name, the folder of its adapter (None: the base) and what is asked.

        None where a request was cancelled. Raises ValueError where an adapter gives no numbers.
        """
        self._train.decode(handle for _, _, prompt in asked for handle in prompt.media)
        adapters = {folder: None if folder is None else self._snapshot(folder) for _, folder, _ in asked}
        if len(adapters) > 1 and not all(each is None or each.is_finite() for each in adapters.values()):
            raise FloatingPointError(_NOT_FINITE)
        requests = [_requests(name, prompt) for name, _, prompt in asked]
        with self._lock:
            self._running = {asked[i][0]: [r.request_id for r in own] for i, own in enumerate(requests)}
        try:
            owners = {r.request_id: asked[i][1] for i, own in enumerate(requests) for r in own}
            with self.sampler.adapted(adapters, owners):
                done = iter(self.sampler.generate([request for own in requests for request in own]))
        finally:
            with self._lock:
                self._running, cancelled, self._cancelled = {}, self._cancelled, set()
        answers: list[Answer | None] = []
        for (name, folder, prompt), own in zip(asked, requests, strict=True):
            found = [next(done) for _ in own]
            samples = [(c.sampled.token_ids, c.sampled.log_probs, c.finish_reason == "stop") for c in found]
            if any(np.isnan(log_probs).any() for _, log_probs, _ in samples):
                raise ValueError("the model's log-probs are not numbers: its weights diverged; load an earlier state")
            answers.append(None if name in cancelled else self._scored(prompt, samples, adapters[folder]))
        return answers

    def cancel(self, name: str) -> None:
        """End a request that is being sampled; from any thread."""
        with self._lock:
            ids = self._running.get(name, [])
            self._cancelled |= {name} if ids else set()
        self.sampler.abort(ids)

    def _snapshot(self, folder: Path) -> Adapter:
        if folder not in self._snapshots:
            self._snapshots[folder] = Adapter.load(folder, self.device, optimizer=False, trained=False)
            while len(self._snapshots) > MOST_SNAPSHOTS:
                self._snapshots.popitem(last=False)
        self._snapshots.move_to_end(folder)
        return self._snapshots[folder]

    def _scored(self, prompt: Prompt, samples: list[Any], adapter: Adapter | None) -> Answer:
        """Score the prompt, and likeliest ids, with the training engine: the numbers that a training pass would see."""
        if not (prompt.scored or prompt.topk or prompt.topk_sampled or prompt.targets is not None):
            return Answer(samples=samples)
        ids, wanted, media = np.asarray(prompt.ids, np.int32), prompt.targets, prompt.media
        first, unscored = len(ids) - prompt.last if prompt.last else 1, self._train.image_places(media)
        log_probs = topk = targets = sampled = None
        with self._train.adapted([adapter], prompt.seed) as model:
            if prompt.scored or prompt.topk or wanted is not None:
                behind = np.append(ids[1:], 0)[:, None]  # and any token, so that a prompt of one is a row too
                if wanted is not None:
                    behind = np.concatenate([behind, np.pad(wanted.clip(min=0), ((0, 1), (0, 0)))], 1)
                row = Row(ids=ids, targets=behind.astype(np.int32), media=media)
                own, best, values = (part[:-1] for part in self._read(model, [row], prompt.topk)[0])
                log_probs = _behind(own[:, 0], first, unscored, np.nan) if prompt.scored else None
                if prompt.topk:
                    topk = _behind(best, first, unscored, 0), _behind(values, first, unscored, -99999.0)
                targets = None if wanted is None else np.where(wanted >= 0, own[:, 1:], np.float32(0))
            if prompt.topk_sampled:
                texts = [np.concatenate([ids, sample[0]]) for sample in samples]
                rows = [Row(ids=text[:-1], targets=text[1:, None], media=media) for text in texts]
                found = self._read(model, rows, prompt.topk_sampled)
                sampled = [(best[len(ids) - 1 :], values[len(ids) - 1 :]) for _, best, values in found]
        return Answer(samples=samples, log_probs=log_probs, topk=topk, topk_sampled=sampled, targets=targets)

    def _read(
        self, model: PolicyModel, rows: Sequence[Row], k: int
    ) -> list[tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]]:
        """Compute of each row the log-probs of its targets [T, K], and the k likeliest ids with theirs [T, k]."""
        model.top_k = k
        found = self._train.forward(_batch(rows), want=frozenset(_READ if k else _READ[:1]), rule=self._train.rule)
        lengths = [len(row.ids) for row in rows]
        columns = [found.get(name, torch.zeros(sum(lengths), 0)).split(lengths) for name in _READ]
        return [tuple(part.numpy() for part in parts) for parts in zip(*columns, strict=True)]


def _requests(name: str, prompt: Prompt) -> list[GenerationRequest]:
    """Make the sampler's requests, one for each sample."""
    asked: dict[str, Any] = {"prompt_ids": prompt.ids, "sampling": prompt.sampling, "media": prompt.media}
    seeds = [request_seed(prompt.seed, i) for i in range(prompt.num_samples)]
    return [GenerationRequest(request_id=f"{name}/{i}", seed=seed, **asked) for i, seed in enumerate(seeds)]


def _behind(part: NDArray[Any], first: int, unscored: list[int], nothing: float) -> NDArray[Any]:
    """Numbers of tokens 1.. at the places of all tokens, with what stands for nothing before `first` and in images."""
    found = np.concatenate([np.full((first, *part.shape[1:]), nothing, part.dtype), part[first - 1 :]])
    found[unscored] = nothing
    return found


def _batch(rows: Sequence[Row], owners: Sequence[int] | None = None) -> _Pass:
    """Make the engine's rows: a prompt of one token, then all others and the last target, which only stands there.

    A column that a row does not have is zero.
    """
    width, lengths = max(row.targets.shape[1] for row in rows), [len(row.ids) for row in rows]

    def column(values: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(dtype)

    def wide(values: NDArray[Any]) -> NDArray[Any]:
        values_TK = values.reshape(len(values), -1)
        return np.pad(values_TK, ((0, 0), (0, width - values_TK.shape[1])))

    def given(row: Row) -> NDArray[Any]:
        nothing = np.zeros(len(row.ids), np.float32)
        return np.stack([wide(row.columns.get(name, nothing)) for name in _COLUMNS], 1)

    return _Pass(
        prompt_ids_T=column([row.ids[:1] for row in rows], torch.int32),
        prompt_length_B=torch.ones(len(rows), dtype=torch.int64),
        response_ids_T=column([np.append(row.ids[1:], row.targets[-1, 0]) for row in rows], torch.int32),
        response_length_B=torch.tensor(lengths),
        response_mask_T=torch.ones(sum(lengths), dtype=torch.bool),
        media=[[*row.media] for row in rows] if any(row.media for row in rows) else None,
        group_B=torch.arange(len(rows)),
        advantages_T=torch.zeros(sum(lengths)),  # they are in given_T
        given_T=column([given(row) for row in rows], torch.float32),
        teacher_ids_T=column([wide(row.targets) for row in rows], torch.int32),
        place_B=torch.arange(len(rows)),
        owner_B=torch.tensor(owners or [0] * len(rows)),
    )
