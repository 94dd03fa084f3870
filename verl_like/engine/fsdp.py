"""The training engine: one Hugging Face model, sharded over all ranks, packed input, per-token output."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from verl_like.batch import Denominators, Experience, Metric, Sequences, merge_metrics
from verl_like.config.micro_batches import Lowered
from verl_like.engine import microbatch, packing_check
from verl_like.engine.microbatch import Batch, Objective
from verl_like.engine.optim import Schedule
from verl_like.engine.rescue import Rescue
from verl_like.engine.sharded_model import ShardedModel
from verl_like.engine.train_engine import CHOSEN, COMPARISONS, ENTROPY, LOG_PROBS, SUM_PI_SQUARED, VALUES, LossFn
from verl_like.flat_columns import on_rows, take_rows
from verl_like.models import loading, packing, tensor_plan
from verl_like.models.fused_linear import Head, Reference
from verl_like.models.heads import HIDDEN, TOP_IDS, TOP_LOG_PROBS, PolicyModel
from verl_like.models.routes import ROUTES
from verl_like.parallel import sharding
from verl_like.parallel.activation_offload import ActivationOffload
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.pipeline import Pipe, order_of, turns

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule
    from verl_like.config.roles import RoleConfig

log = logging.getLogger(__name__)
Part = TypeVar("Part")

_OFFERS = {
    "policy": frozenset({LOG_PROBS, ENTROPY, SUM_PI_SQUARED, CHOSEN, TOP_LOG_PROBS, TOP_IDS, ROUTES}),
    "value": frozenset({VALUES}),
}


class FSDPEngine(ShardedModel):
    """Training engine of one sharded model: forward passes, optimizer steps, weight export, checkpoints.

    All methods, and the constructor, are collective: every rank calls them, in the same order. Rows may differ between
    ranks and may be none.

    role: the model, how it is sharded and trained. Without `optim` the engine is forward only, as the reference's; its
        shards are kept in the compute precision.
    num_schedule_steps: length of the learning-rate schedule, unless `optim.total_training_steps` sets another.
    tokenizer_size: token ids from here on are masked out of the softmax; None keeps the whole vocabulary.
    lowered: sizes of micro-batches that an earlier start of the run had to lower.
    changes: how often the weights have changed, the same on all ranks.
    """

    def __init__(
        self,
        role: RoleConfig,
        process: ProcessInfo,
        *,
        num_schedule_steps: int | None = None,
        tokenizer_size: int | None = None,
        seed: int = 1,
        lowered: Lowered | None = None,
    ) -> None:
        schedule = None if role.optim is None else Schedule(role.optim, num_schedule_steps)
        super().__init__(role, process, schedule, tokenizer_size, seed)
        self.shares_prompts = loading.shares_prompts(role.model, role.router)
        self._mesh = self.sharding.mesh
        self._pipe = self._mesh.pipe
        self._row_group, self._is_split = self._mesh.rows, self._mesh.tensor is not None
        moves = role.optim is not None and role.model.enable_activation_offload and self.device.type == "cuda"
        self._activations = ActivationOffload(self.device) if moves else None
        self._seed, self._updates = seed, 0  # updates since the schedule's last step
        lowered = lowered or Lowered(role=role.name)
        self._rescue = Rescue(self.sharding, lowered, alone=process.world_size == 1, shares=self.shares_prompts)
        self._segments: packing.Segments | None = None  # of the last pass
        self._l2_coeff = 0.0 if role.optim is None else role.optim.l2_coeff
        self._references: tuple[FSDPEngine, ...] = ()
        if self.packed:
            self.sharding.root.eval()
            checked = (self._known_pass, self.model, self.hf_config, self.device, self.compute_dtype)
            packing_check.check_packing(*checked, self._row_group if self._is_split else None, self._vision)
            self.sharding.reshard()
        if role.fsdp.param_offload:
            self.offload(params=True, optimizer=False)

    def attach_reference(self, *references: FSDPEngine) -> None:
        """Offer "full_kl" and "jsd": divergences of this policy from `references`, whose weights must not change.

        Of several each is compared with the rows whose teacher_B is its number.
        """
        if {self.kind, *(each.kind for each in references)} != {"policy"}:
            raise ValueError("full_kl compares two policies")
        self._references = references

    @contextmanager
    def _comparison(self, want: frozenset[str]) -> Iterator[list[Head]]:
        """Hold the references on the device, and yield their gathered heads, while a comparison is wanted.

        LoRA: this model's base, where no reference is attached.
        """
        if not want & COMPARISONS:
            yield []
            return
        if not self._references:
            yield [self._gathered_head()]
            return
        with ExitStack() as stack:
            for each in self._references:
                stack.enter_context(each._resident(optimizer=False))
                each.sharding.root.eval()
            yield [each._gathered_head() for each in self._references]
            for each in self._references:
                each.sharding.reshard()

    @torch.no_grad()
    def _gathered_head(self) -> Head:
        """Gather the whole output head on this rank (collective)."""
        assert isinstance(self.model, PolicyModel)
        found = dict(self.sharding.full_weights(self.compute_dtype, lambda name: name in self._head_names))
        weight, bias = (found.get(name) for name in self._head_names)
        assert weight is not None
        return dataclasses.replace(self.model.head(), weight_VH=weight, bias_V=bias)

    # --- forward -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, batch: Sequences, *, want: frozenset[str], rule: MicroBatchRule, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Compute per-token outputs without gradients: float32 CPU [T], one for each response token of the rows.

        The likeliest ids, [T, K], are int32.

        Args:
            batch: this rank's rows; may be none.
            want: names of outputs. "log_probs", "entropy" and "sum_pi_squared" (sum over the vocabulary of squared
                probabilities) of a policy, at response_mask (0 elsewhere); "top_log_probs" and "top_ids" [T, K] of the
                model's `top_k` likeliest ids; "full_kl" and "jsd" (to the attached reference over the whole vocabulary)
                where one is attached; "values" of a value model inside response_length: entry t predicts the state
                BEFORE response token t. "routes" [S, L, k] are of all tokens, prompts included (models/routes.py).
            rule: largest size of a micro-batch.
            temperature: logits are divided by it.

        Raises ValueError for an output that this kind of model does not have.
        """
        self._check_want(want)
        self.sharding.root.eval()
        batch = batch.to("cpu")

        def attempt(rule: MicroBatchRule) -> tuple[list[int], dict[str, list[Tensor]]]:
            cut = self._cut(batch, rule)
            found: dict[str, list[Tensor]] = {name: [] for name in sorted(want)}
            with self._comparison(want) as other:
                for part in self._in_turn(cut):
                    with microbatch.told(part), self._forward_pass(other):
                        answers = self._answers(part and part[1], want, temperature, other)
                        answers = {n: v.float() if v.is_floating_point() else v for n, v in answers.items()}
                    if part is not None and not self.model.hands_on:
                        for name, parts in found.items():
                            parts.append(answers[name])
            return [row for part in cut if part is not None for row in part[0]], found

        with self._resident(optimizer=False):
            order, found = self._rescue.repeated("forward pass", rule, batch, attempt)
            self.sharding.reshard()
        back = torch.argsort(torch.tensor(order)).tolist()
        lengths = {ROUTES: batch.num_tokens_B()[order]}
        # One transfer a column: the host would wait for the device at each.
        joined = {name: torch.cat(parts or [torch.zeros(0)]).cpu() for name, parts in found.items()}
        if self._pipe is not None:
            self._pipe.finish()
            joined = self._pipe.of_last(joined)
        length_B = batch.response_length_B[order]
        return {name: take_rows(values_T, lengths.get(name, length_B), back) for name, values_T in joined.items()}

    def _forward_pass(self, others: list[Head]) -> AbstractContextManager[None]:
        """Rescue of a forward pass; none in a pipeline, whose stages are at different micro-batches."""
        if self._pipe is not None:
            return nullcontext()
        return self._rescue.forward(gathers_alone=self._gathers_alone(others))

    def _gathers_alone(self, others: list[Head]) -> bool:
        """True where FSDP's gathers are the only messages that a forward pass exchanges with other ranks."""
        plain = self._row_group is None and self._mesh.expert is None
        return plain and not others and self._vision is None  # ranks count parts of the tower

    def _in_turn(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield micro-batches in the order of their forward passes: in a pipeline once for each piece of the stage."""
        if self._pipe is None:
            yield from parts
            return
        for piece, i in turns(self._pipe.size, len(parts), self._pipe.pieces):
            self._turn_to(self._pipe, piece)
            yield parts[i]

    def _turn_to(self, pipe: Pipe, piece: int) -> None:
        pipe.piece = piece
        self.model.hands_on = not pipe.is_last

    def _cut(self, batch: Batch, rule: MicroBatchRule) -> list[tuple[list[int], Batch] | None]:
        return microbatch.cut(batch, rule, share_prompts=self.shares_prompts)

    def _answers(
        self, rows: Sequences | None, want: frozenset[str], temperature: float, others: Sequence[Head] = ()
    ) -> dict[str, Tensor]:
        """Compute the outputs [T] of one micro-batch's response tokens (collective).

        Args:
            rows: the micro-batch; None where this rank has no rows left: it then runs a placeholder with the others.
            want: names of outputs, as in `forward`.
            temperature: logits are divided by it.
            others: heads of the references, for "full_kl" and "jsd".
        """
        inputs, more = self._model_input(rows, notes_routes=ROUTES in want), dict[str, Any]()
        self._segments = inputs.segments
        if CHOSEN in want:
            more["chosen_NK"] = _of_answers(rows, "teacher_ids_T", inputs, torch.zeros(1, 1)).long()
        if others:
            teacher_N, found = None, []
            if len(others) > 1:
                teacher_N = _of_answers(rows, "teacher_B", inputs, torch.zeros(1))
            for number, (engine, head) in enumerate(zip(self._references or (self,), others, strict=True)):
                with torch.no_grad(), self.base_model() if engine is self else nullcontext():
                    own = dataclasses.replace(inputs, routes=None)  # another policy, routers included
                    hidden_NH = engine._pass(own, frozenset({HIDDEN}), temperature)[HIDDEN]
                mine_N = None if teacher_N is None else teacher_N == number
                found.append(Reference(hidden_NH=hidden_NH, head=head, mine_N=mine_N))
            more["references"] = tuple(found)
        if self.model.hands_on:
            return self._pass(inputs, want, temperature)
        group = self._row_group
        routers = self._routers if ROUTES in want else None
        with nullcontext([]) if routers is None else routers.noting() as noted:
            values = self._pass(inputs, want - {ROUTES}, temperature, **more)
        answers = {name: inputs.unpack(values_N) for name, values_N in values.items()}
        answers = answers if group is None else {name: group.join(answers[name]) for name in sorted(answers)}
        if routers is not None and rows is not None:
            answers[ROUTES] = inputs.routes_of_rows(noted, routers.dtype, group)
        return answers

    def _pass(
        self, inputs: packing.ModelInput, want: frozenset[str], temperature: float, **more: Any
    ) -> dict[str, Tensor]:
        """Run the model; routes that came with the rows are replayed, now and where layers are computed again."""
        if self._routers is not None:
            self._routers.replay(inputs.routes)
        if self._pipe is None:
            return self.sharding.root(inputs, want, temperature, **more)
        shape = (*inputs.input_ids.shape, self.hf_config.hidden_size)
        received = self._pipe.receive(shape, self.compute_dtype, self.device)
        answers = self.sharding.root(inputs, want, temperature, received=received, **more)
        if self.model.hands_on:
            self._pipe.send(answers[HIDDEN])
        return answers

    def _known_pass(self, inputs: packing.ModelInput, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """Run the model once, with answers on every rank, also those whose stage gives none."""
        answers = dict[str, Tensor]()
        for _ in self._in_turn([None]):
            answers = self._pass(inputs, want, temperature)
        if self._pipe is not None:
            self._pipe.finish()
            answers = {name: value.to(self.device) for name, value in self._pipe.of_last(answers).items()}
        return answers

    def _model_input(self, rows: Sequences | None, *, notes_routes: bool = False) -> packing.ModelInput:
        device = self.device if self._row_group is None else torch.device("cpu")  # slices are cut there
        if rows is None:
            inputs = packing.placeholder(device, packed=self.packed, vision=self._vision)
        else:
            inputs = self._whole_input(rows, device, notes_routes)
        if self._row_group is None:
            return inputs
        take_slice = tensor_plan.take_slice if self._is_split else packing.take_slice
        return take_slice(inputs, self._row_group).to(self.device)

    def _whole_input(self, rows: Sequences, device: torch.device, notes_routes: bool) -> packing.ModelInput:
        wanted_T = packing.response_positions(rows, sampled_only=self.kind == "policy")
        if isinstance(self.model, PolicyModel):
            microbatch.check_vocabulary(rows.response_ids_T[wanted_T], self.model.vocab_size)
        if not self.packed:
            return packing.pad(rows, wanted_T, device, vision=self._vision)
        options = {"share_prompts": self.shares_prompts, "notes_routes": notes_routes}
        return packing.pack(rows, wanted_T, device, vision=self._vision, owner_B=self._owners(rows), **options)

    def _owners(self, _: Sequences) -> Tensor | None:
        """Number the rows that are to be neighbours in a packed input; None: any may be."""
        return None

    def _check_want(self, want: frozenset[str]) -> None:
        compares = self.kind == "policy" and (self._references or self._adapters is not None)
        offers = _OFFERS[self.kind] | COMPARISONS if compares else _OFFERS[self.kind]
        if not want <= offers:
            raise ValueError(f"a {self.kind} engine gives {sorted(offers)}, not {sorted(want)}")

    # --- update ------------------------------------------------------------------------------------------------------

    def train_minibatch(
        self,
        batch: Experience,
        loss_fn: LossFn,
        denominators: Denominators,
        *,
        rule: MicroBatchRule,
        temperature: float = 1.0,
        without_gradient_B: Tensor | None = None,
    ) -> dict[str, Metric]:
        """Take one optimizer step over this rank's rows; all ranks step together. Returns the metrics.

        Adds "grad_norm" (before clipping), "lr" and "skipped_steps" (1 when the gradient norm was not finite and no
        weight was changed) to the loss's metrics.

        Args:
            batch: this rank's rows of the mini-batch; may be none.
            loss_fn: objective of a micro-batch.
            denominators: counts over the whole mini-batch and all ranks.
            rule: largest size of a micro-batch.
            temperature: logits are divided by it.
            without_gradient_B: bool; rows known to add nothing to the gradient get a forward pass for the metrics and
                no backward pass. Either all ranks pass it or none.
        """
        if self.optimizer is None:
            raise ValueError("this engine is forward only (it was built with optim=None)")

        objective = Objective(loss_fn, denominators, temperature)

        def attempt(rule: MicroBatchRule) -> list[dict[str, Metric]]:
            counted = nullcontext({}) if self._expert_load is None else self._expert_load.counted()
            with self._own_noise(), counted as load:
                metrics = self.accumulate(batch, objective, rule, without_gradient_B)
            return [*metrics, load]

        with self._resident(optimizer=True):
            metrics = self._rescue.repeated("update", rule, batch, attempt)
            metrics.append(self._route_metrics())
            self._updates += 1
            metrics += [self._step(), self._rescue.metrics()]
            self.sharding.drop_gradients()
        return merge_metrics(metrics)

    @contextmanager
    def _own_noise(self) -> Iterator[None]:
        """Draw dropout from (seed, rank, step, update): the same after a resume, whoever else drew in between.

        Ranks of a tensor group draw alike, because they hold the same activations.
        """
        assert self.schedule is not None
        rank = self.process.rank if self._mesh.tensor is None else self._mesh.tensor.first
        place = f"{self._seed}/{self.kind}/{rank}/{self.schedule.steps_done}/{self._updates}"
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "little"))
            yield

    def accumulate(
        self, batch: Experience, objective: Objective, rule: MicroBatchRule, without_gradient_B: Tensor | None = None
    ) -> list[dict[str, Metric]]:
        """Run the backward passes of all micro-batches into fresh gradients, which stay until a step.

        Returns the metrics of each micro-batch.
        """
        self._check_want(objective.loss_fn.wants)
        self.sharding.root.train()
        with self._comparison(objective.loss_fn.wants) as other:
            self.sharding.drop_gradients()
            apart_B = without_gradient_B if self._router_losses is None else None  # routers learn from all rows
            learning, watched = microbatch.set_apart(batch.to("cpu"), apart_B)
            metrics = self._watch(watched, objective, rule, other)
            parts = self._cut(learning, rule) or [None]  # the collectives of backward must run once at least
            if self._router_losses is not None:
                length_B = (learning.num_tokens_B() - 1).clamp(min=1)  # a row's last token has no place in the model
                self._router_losses.begin(length_B, self._first_pass(parts, objective.temperature))
            sync_every = self.role.fsdp.sync_every_micro_batch and not self.sharding.reduces_once
            if self._pipe is not None:
                metrics += self._backward_in_stages(self._pipe, parts, objective, sync_every=sync_every)
            else:
                for i, part in enumerate(parts):
                    self.sharding.set_gradient_sync(sync_every or i == len(parts) - 1)
                    with microbatch.told(part):
                        metrics.append(self._backward(part and part[1], objective, other))
            self._rescue.agree()
            self.sharding.reshard()  # first: the shards hold the gradients, also where weights were kept gathered
            self.sharding.complete_gradients()
            self._loss_scale.undo(self.sharding.parameters())
            return [*metrics, microbatch.fill_metrics(parts, watched, rule, share_prompts=self.shares_prompts)]

    @torch.no_grad()
    def _first_pass(self, parts: list[tuple[list[int], Experience] | None], temperature: float) -> list[Tensor]:
        """Count the tokens of each expert before anything learns, where a loss needs it; of each micro-batch [L, E]."""
        losses, counts = self._router_losses, list[Tensor]()
        assert losses is not None
        for part in parts if losses.needs_fractions else ():
            with microbatch.told(part), self._rescue.forward(gathers_alone=self._gathers_alone([])), losses.noted():
                self._pass(self._model_input(part and part[1]), frozenset({HIDDEN}), temperature)
                self._rescue.model_done()
                counts.append(losses.count() * (part is not None))
        return counts

    def _route_metrics(self) -> dict[str, Metric]:
        """Share of tokens and layers of the last update whose router chose other experts than the routes given."""
        differing, compared = (0, 0) if self._routers is None else self._routers.differing()
        if not compared:
            return {}
        return {"router/differing_share": Metric(value=differing / compared, weight=compared)}

    def _watch(
        self, rows: Experience | None, objective: Objective, rule: MicroBatchRule, other: list[Head]
    ) -> list[dict[str, Metric]]:
        """Run forward passes alone, for the metrics of rows without a gradient (collective unless `rows` is None)."""
        if rows is None:
            return []
        metrics = []
        with torch.no_grad():
            for part in self._in_turn(self._cut(rows, rule)):
                with microbatch.told(part), self._forward_pass(other):
                    outputs = self._answers(part and part[1], objective.loss_fn.wants, objective.temperature, other)
                    self._rescue.model_done()
                    if part is not None and not self.model.hands_on:
                        metrics.append(self._counted_once(self._loss(objective, outputs, part[1])[1]))
        if self._pipe is not None:
            self._pipe.finish()
        return metrics

    def _counted_once(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Keep the metrics on the first of the ranks that share their rows: all of them compute the same loss."""
        return {} if self._row_group is not None and self._row_group.rank > 0 else metrics

    def _backward(self, rows: Experience | None, objective: Objective, other: list[Head]) -> dict[str, Metric]:
        """Run forward and backward of one micro-batch; without rows a loss of zero through the whole model."""
        with self._rescue.forward(gathers_alone=self._gathers_alone(other)):
            noted = nullcontext() if self._router_losses is None else self._router_losses.noted()
            with noted, nullcontext() if self._activations is None else self._activations.active():
                outputs = self._answers(rows, objective.loss_fn.wants, objective.temperature, other)
            self._rescue.model_done()
            loss, metrics = self._loss(objective, outputs, rows)
            if not loss.requires_grad:  # it selected no token: the collectives of backward must run all the same
                loss = loss + microbatch.zero_loss(outputs)
            if self._router_losses is not None and rows is not None and self._segments is not None:
                added, found = self._router_losses.of(self._segments)
                loss, metrics = loss + added, metrics | found
            graph = [self._loss_scale.of(loss)]
            del outputs, loss
        self._rescue.backward(graph)
        return self._counted_once(metrics)

    def _backward_in_stages(
        self,
        pipe: Pipe,
        parts: list[tuple[list[int], Experience] | None],
        objective: Objective,
        *,
        sync_every: bool,
    ) -> list[dict[str, Metric]]:
        """Run this stage's forward and backward passes of all micro-batches; the last stage has loss and metrics."""
        metrics, outputs = list[dict[str, Metric]](), dict[tuple[int, int], list[Tensor]]()
        schedule = self.role.fsdp.pipeline_schedule
        for kind, piece, i in order_of(schedule, pipe.rank, pipe.size, len(parts), pipe.pieces):
            part = parts[i]
            self._turn_to(pipe, piece)
            with microbatch.told(part):
                if kind == "weights":
                    self.sharding.weights_pass()
                    continue
                if kind == "backward":
                    self.sharding.backward_begins()
                    last = (piece, i) == (0, len(parts) - 1)  # it adds up what all the pieces have
                    self.sharding.set_gradient_sync(sync_every or last)
                    graph = outputs.pop((piece, i))
                    pipe.backward(graph[0], partial(self._rescue.backward, graph))
                    continue
                rows = part and part[1]
                answers = self._answers(rows, objective.loss_fn.wants, objective.temperature)
                if self.model.hands_on:
                    outputs[piece, i] = [answers[HIDDEN]]
                    continue
                loss, found = self._loss(objective, answers, rows)
                loss = loss if loss.requires_grad else loss + microbatch.zero_loss(answers)
                outputs[piece, i] = [self._loss_scale.of(loss)]
                metrics.append(self._counted_once(found))
        pipe.finish()
        return metrics

    def _loss(
        self, objective: Objective, outputs: dict[str, Tensor], rows: Experience | None
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the objective of one micro-batch, for which everything is padded; zero without rows."""
        if rows is None:
            return microbatch.zero_loss(outputs), {}
        rows = rows.with_forms(self.device)
        padded = {name: rows.padded(values_T) for name, values_T in outputs.items()}
        return objective.loss_fn(padded, rows, objective.denominators)

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one step. Call it once after all mini-batches of a rollout batch.

        The schedule counts training steps (one rollout batch each), as verl's does.
        """
        if self.schedule is not None:
            self.schedule.steps_done += 1
        self._updates = 0

    def _step(self) -> dict[str, Metric]:
        """Clip the gradient and step, unless it is not finite: then no rank changes a weight."""
        assert self.optimizer is not None and self.schedule is not None
        sharding.add_l2_gradient(self.sharding.parameters(), self._l2_coeff)
        norm, rate = self.sharding.gradient_norm(), self.schedule.rate()
        size = float(norm)  # waits for the device: once a step
        finite = math.isfinite(size)
        if finite:
            if self.role.grad_clip is not None and self.role.grad_clip > 0:
                sharding.clip_gradients(self.sharding.parameters(), norm, self.role.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.role.router.bias_update_rate > 0 and self._expert_load is not None:
                self._expert_load.correct_biases(self.role.router.bias_update_rate)
            self.changes = self.changes.after_step(lr=rate, grad_norm=size, exact=self._exact)
        elif not self._loss_scale.settles:
            log.warning("gradient norm %s: optimizer step skipped (schedule step %d)", size, self.schedule.steps_done)
        skipped = float(not finite and not self._loss_scale.settles and self.process.rank == 0)  # once, not per rank
        metrics = {"grad_norm": Metric(value=size), "lr": Metric(value=rate), **self._loss_scale.stepped(finite)}
        return metrics | {"skipped_steps": Metric(value=skipped, reduction="sum")}


def _of_answers(rows: Sequences | None, name: str, inputs: packing.ModelInput, nothing: Tensor) -> Tensor:
    """Take a column of the rows ([T, ...], or [B] once for each token) where answers are wanted: [N, ...].

    nothing: the answer of a placeholder, without rows.
    """
    value = nothing if rows is None else getattr(rows, name)
    if value is None:
        raise ValueError(f"the loss needs {name} of the teachers, but the batch has none")
    if rows is not None and name.endswith("_B"):
        value = on_rows(value.cpu(), rows.response_length_B.cpu())
    return value.to(inputs.out_N.device, non_blocking=True)[inputs.out_N]
