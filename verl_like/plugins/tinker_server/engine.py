"""The two engines behind the protocol: one that trains, one that samples, each with one copy of the base model.

Whose adapter acts is chosen for each call (adapters.py). What a call computes depends on its arguments and that adapter
alone: rows of two requests never share a pass, random numbers come from the request's seed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import Denominators, Experience, Metric, tokens
from verl_like.config import PPOConfig
from verl_like.config.micro_batches import MicroBatchRule
from verl_like.config.roles import ACTOR, every_role
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.models import blocks
from verl_like.models.heads import TOP_IDS, TOP_LOG_PROBS, PolicyModel
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import init_distributed, shutdown_distributed
from verl_like.plugins.tinker_server.adapters import Adapter, AdapterSpec, Places
from verl_like.plugins.tinker_server.losses import LOSSES
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams, request_seed

_CHOSEN = "chosen_log_probs"
_ONE = Denominators(num_tokens=1, num_sequences=1, max_response_length=1)  # losses are sums
_MOST_SNAPSHOTS = 32  # adapters of sampling clients that stay in memory; others are read again
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One datum: input tokens [T]; targets [T, K], of which each is predicted from the tokens up to its place.

    columns: inputs of the loss, [T, K] or [T].
    """

    ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    columns: Columns = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt, and all that is asked of a sampler about it.

    targets: ids [T - 1, K] to be scored behind its tokens; -1: none.
    last: number of the prompt's tokens, from its end, that are scored.
    """

    ids: list[int]
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
    """Rows of one request. weights_T: [T, K]; the others of Experience's columns are [T]."""

    weights_T: Tensor | None = tokens(default=None)
    clip_low_T: Tensor | None = tokens(default=None)
    clip_high_T: Tensor | None = tokens(default=None)
    place_B: Tensor  # int64


class _Recorded:
    """Loss function of the engine, which also keeps the log-probs that it saw, by place of the row."""

    wants = frozenset({_CHOSEN})

    def __init__(self, loss: str, settings: Mapping[str, float]) -> None:
        self._loss, self._settings = LOSSES[loss], settings
        self.log_probs: dict[int, Tensor] = {}

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Sum the loss over the tokens of a micro-batch."""
        assert isinstance(experience, _Pass)
        p_bRK = outputs[_CHOSEN]
        for place, length, p_RK in zip(
            experience.place_B.tolist(), experience.response_length_B.tolist(), p_bRK.detach().cpu(), strict=True
        ):
            self.log_probs[place] = p_RK[:length]
        columns: dict[str, Any] = {
            name: torch.tensor(value, device=p_bRK.device) for name, value in self._settings.items()
        }
        for name, field in _COLUMNS.items():
            if (value := getattr(experience, f"{field}_BR")) is not None:
                columns[name] = value if value.ndim == 3 else value[..., None]
        loss = self._loss.of_tokens(p_bRK, columns).sum()
        return loss, {"loss": Metric(value=float(loss.detach()), reduction="sum")}


_COLUMNS = {
    "weights": "weights",
    "logprobs": "old_log_probs",
    "advantages": "advantages",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
}


class _Trained(FSDPEngine):
    """Training engine whose base is frozen: gradients go to whatever adapter acts."""

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
    def adapted(self, adapter: Adapter | None, seed: int) -> Iterator[PolicyModel]:
        """Let an adapter act inside, with random numbers of its own."""
        model = self.model
        assert isinstance(model, PolicyModel)
        pair = None if adapter is None else adapter.pairs.get(self._head)
        model.low_rank = None if pair is None or adapter is None else (*pair, adapter.scale)
        with self.places.active(adapter), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                yield model
            finally:
                model.low_rank = None

    def gradient(self, batch: Experience, objective: Objective, adapter: Adapter) -> list[dict[str, Metric]]:
        """Add the gradient of a request to the adapter's, whole or not at all."""

        def attempt(rule: MicroBatchRule) -> list[dict[str, Metric]]:
            adapter.drop_pass()
            return self.accumulate(batch, objective, rule)

        try:
            with self._resident(optimizer=False):
                metrics = self._rescue.repeated("update", self.rule, batch, attempt)
        except BaseException:
            adapter.drop_pass()
            raise
        adapter.take_gradients()
        return metrics


class Engines:
    """Adapters in memory, and all that is computed with them. Not thread-safe: one thread calls.

    Raises ValueError where the configuration does not fit the model.
    """

    def __init__(self, config: PPOConfig, *, device: str, tokenizer_size: int, max_model_len: int, run_id: str) -> None:
        policy, seed = config.actor_rollout_ref, config.trainer.seed
        self._alpha, self._base, self._models = config.serve.lora_alpha, policy.model.path, dict[str, Adapter]()
        self._snapshots: OrderedDict[Path, Adapter] = OrderedDict()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()  # of the two sets: cancellations come from another thread
        with ExitStack() as stack:
            process = init_distributed(0, 1, 0, 1, "127.0.0.1", 0, device)
            stack.callback(shutdown_distributed)
            self._train = _Trained(config, process, tokenizer_size, seed)
            rollout = dataclasses.replace(policy.rollout, stop=["\0"])  # so that it has the tokenizer: requests stop
            sampler = build_rollout_engine(
                rollout,
                policy.model,
                process=process,
                hf_config=load_hf_config(policy.model),
                tokenizer_size=tokenizer_size,
                max_model_len=max_model_len,
                seed=seed,
                run_id=run_id,
                tokenizer=config.data.tokenizer or policy.model.path,
            )
            stack.callback(sampler.shutdown)
            assert isinstance(sampler, HFRolloutEngine)
            sampler.load_weights(self._train.export_weights(sampler.dtype), 0)
            self._sampler, self._sampled = sampler, Places(sampler._module, head=True)
            self._stack = stack.pop_all()
        self.device = self._train.device

    def close(self) -> None:
        """End both engines."""
        self._stack.close()

    # --- models of tenants -------------------------------------------------------------------------------------------

    def has(self, model: str) -> bool:
        """Return True where the model is in memory."""
        return model in self._models

    def check(self, spec: AdapterSpec) -> None:
        """Raise ValueError for an adapter that this base cannot have."""
        self._train.places.targets(spec)

    def create(self, model: str, spec: AdapterSpec) -> None:
        """Begin a model from the base."""
        self._models[model] = Adapter.new(spec, self._alpha, self._train.places, self.device)

    def load(self, model: str, folder: Path, *, optimizer: bool) -> AdapterSpec:
        """Begin a model, or go on with one, from a saved state. Raises ValueError for another rank or targets."""
        new, old = Adapter.load(folder, self.device, optimizer=optimizer), self._models.get(model)
        if old is not None and [a.shape for a in old.parameters()] != [a.shape for a in new.parameters()]:
            raise ValueError(f"the state is of rank {new.spec.rank} with other targets: it does not fit this model")
        self._models[model] = new
        return new.spec

    def save(self, model: str, folder: Path, *, optimizer: bool) -> None:
        """Write a model's adapter, and the states of its optimizer."""
        self._models[model].save(folder, self._base, optimizer=optimizer)

    def drop(self, model: str) -> None:
        """Forget a model that is in memory."""
        self._models.pop(model, None)

    def forward_backward(
        self, model: str, rows: Sequence[Row], loss: str, settings: Mapping[str, float], *, backward: bool, seed: int
    ) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
        """Compute log-probs [T, K] of each row's targets and the loss; with `backward` also add the gradient."""
        batch, recorded = _batch(rows), _Recorded(loss, settings)
        adapter, objective = self._models[model], Objective(recorded, _ONE, 1.0)
        with self._train.adapted(adapter, seed):
            if backward:
                told = self._train.gradient(batch, objective, adapter)
                value = sum(each["loss"].value for each in told if "loss" in each)
            else:
                found = self._train.forward(batch, want=recorded.wants, rule=self._train.rule)
                padded = {name: batch.padded(values) for name, values in found.items()}
                value = float(recorded(padded, batch, objective.denominators)[0])
        log_probs = [recorded.log_probs[place][:, : row.targets.shape[1]].numpy() for place, row in enumerate(rows)]
        return log_probs, {"loss:sum": value}

    def optim_step(self, model: str, params: dict[str, float]) -> dict[str, float]:
        """Take one step of the model's optimizer."""
        return self._models[model].step(params)

    def drop_gradient(self, model: str) -> None:
        """Drop what passes have added up since the last step."""
        if model in self._models:
            self._models[model].gradients = None

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, name: str, folder: Path | None, prompt: Prompt) -> Answer | None:
        """Answer one prompt with the adapter saved in `folder` (None: the base); None where it was cancelled."""
        adapter = None if folder is None else self._snapshot(folder)
        requests = [
            GenerationRequest(
                request_id=f"{name}/{i}",
                prompt_ids=prompt.ids,
                sampling=prompt.sampling,
                seed=request_seed(prompt.seed, i),
            )
            for i in range(prompt.num_samples)
        ]
        with self._lock:
            self._running.add(name)
        try:
            with self._sampled.active(adapter):
                done = [] if name in self._cancelled else self._sampler.generate(requests)
        finally:
            with self._lock:
                self._running.discard(name)
                cancelled = name in self._cancelled
                self._cancelled.discard(name)
        if cancelled:
            return None
        samples = [(c.sampled.token_ids, c.sampled.log_probs, c.finish_reason == "stop") for c in done]
        return self._scored(prompt, samples, adapter)

    def cancel(self, name: str) -> None:
        """End a request that is being sampled; from any thread."""
        with self._lock:
            if name not in self._running:
                return
            self._cancelled.add(name)
        self._sampler.abort(None)  # one request at a time: all of its samples

    def _snapshot(self, folder: Path) -> Adapter:
        if folder not in self._snapshots:
            self._snapshots[folder] = Adapter.load(folder, self.device, optimizer=False, trained=False)
            while len(self._snapshots) > _MOST_SNAPSHOTS:
                self._snapshots.popitem(last=False)
        self._snapshots.move_to_end(folder)
        return self._snapshots[folder]

    def _scored(self, prompt: Prompt, samples: list[Any], adapter: Adapter | None) -> Answer:
        """Score the prompt, and likeliest ids, with the training engine: the numbers that a training pass would see."""
        length = len(prompt.ids)
        if not (prompt.scored or prompt.topk or prompt.topk_sampled or prompt.targets is not None):
            return Answer(samples=samples)
        first = length - prompt.last if prompt.last else 1
        topk = targets = sampled = None
        log_probs = np.full(length, np.nan, np.float32)  # nothing comes before the first token
        with self._train.adapted(adapter, prompt.seed) as model:
            if (prompt.scored or prompt.topk) and length > 1:
                own, ids, values = self._likeliest(model, [np.asarray(prompt.ids, np.int32)], prompt.topk)[0]
                log_probs, topk = (_behind(part, first, length) for part in (own, (ids, values)))
            if prompt.topk_sampled:
                whole = [np.concatenate([np.asarray(prompt.ids, np.int32), sample[0]]) for sample in samples]
                found = self._likeliest(model, whole, prompt.topk_sampled)
                sampled = [(ids[length - 1 :], values[length - 1 :]) for _, ids, values in found]
            if prompt.targets is not None:
                wanted = prompt.targets
                row = Row(ids=np.asarray(prompt.ids[:-1], np.int32), targets=wanted.clip(min=0).astype(np.int32))
                found = self._train.forward(_batch([row]), want=frozenset({_CHOSEN}), rule=self._train.rule)
                targets = np.where(wanted >= 0, found[_CHOSEN].numpy(), np.float32(0)).astype(np.float32)
        return Answer(
            samples=samples,
            log_probs=log_probs if prompt.scored else None,
            topk=topk if prompt.topk else None,
            topk_sampled=sampled,
            targets=targets,
        )

    def _likeliest(
        self, model: PolicyModel, texts: Sequence[NDArray[np.int32]], k: int
    ) -> list[tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]]:
        """Compute, of tokens 1.. of each text, the log-prob [T - 1], and the k likeliest ids with theirs [T - 1, k]."""
        rows = [Row(ids=text[:-1], targets=text[1:, None]) for text in texts]
        model.top_k = k
        want = frozenset({"log_probs", TOP_LOG_PROBS, TOP_IDS} if k else {"log_probs"})
        found = self._train.forward(_batch(rows), want=want, rule=self._train.rule)
        lengths = [len(row.ids) for row in rows]
        empty = torch.zeros(sum(lengths), 0)
        columns = (found["log_probs"], found.get(TOP_IDS, empty.int()), found.get(TOP_LOG_PROBS, empty))
        parts = [[part.numpy() for part in column.split(lengths)] for column in columns]
        return list(zip(*parts, strict=True))


def _behind(part: Any, first: int, length: int) -> Any:
    """Numbers of tokens 1.. at the places of all tokens, with what stands for nothing before `first`."""
    if isinstance(part, tuple):
        ids, values = part
        whole = np.zeros((length, ids.shape[1]), np.int32), np.full((length, ids.shape[1]), -99999.0, np.float32)
        for target, source in zip(whole, (ids, values), strict=True):
            target[first:] = source[first - 1 :]
        return whole
    log_probs = np.full(length, np.nan, np.float32)
    log_probs[first:] = part[first - 1 :]
    return log_probs


def _batch(rows: Sequence[Row]) -> _Pass:
    """Make the engine's rows: a prompt of one token, then all others and the last target, which only stands there."""
    width = max(row.targets.shape[1] for row in rows)
    lengths = [len(row.ids) for row in rows]

    def column(values: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(dtype)

    def wide(values: NDArray[Any]) -> NDArray[Any]:
        return np.pad(values, ((0, 0), (0, width - values.shape[1])))

    def given(name: str) -> Tensor | None:
        if not rows or name not in rows[0].columns:
            return None
        return column([row.columns[name] for row in rows], torch.float32)

    weights = [wide(row.columns["weights"]) for row in rows if "weights" in row.columns]
    advantages = given("advantages")
    total = sum(lengths)
    return _Pass(
        prompt_ids_T=column([row.ids[:1] for row in rows], torch.int32),
        prompt_length_B=torch.ones(len(rows), dtype=torch.int64),
        response_ids_T=column([np.append(row.ids[1:], row.targets[-1, 0]) for row in rows], torch.int32),
        response_length_B=torch.tensor(lengths),
        response_mask_T=torch.ones(total, dtype=torch.bool),
        group_B=torch.arange(len(rows)),
        advantages_T=torch.zeros(total) if advantages is None else advantages,
        old_log_probs_T=given("logprobs"),
        clip_low_T=given("clip_low_threshold"),
        clip_high_T=given("clip_high_threshold"),
        weights_T=column(weights, torch.float32) if weights else None,
        teacher_ids_T=column([wide(row.targets) for row in rows], torch.int32),
        place_B=torch.arange(len(rows)),
    )
