"""`verl-like selfcheck`: is the gradient on the user's own model and settings the right one, however a batch is cut?

Right: one mini-batch of random rows goes through the loop's own functions and the training engine, and its log-probs,
loss and gradient are compared with those of the yardstick (plain.py, plain_loss.py). However it is cut: the same
mini-batch goes through the engine in ways that must not matter: in one micro-batch and in many, in another order,
packed and padded, reduced after each micro-batch or once, on one process and on two. Everything is float32, so that
differences are rounding (around 1e-6) or errors.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import tempfile
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.objectives import PolicyObjective, ValueObjective
from verl_like.batch import Denominators, Experience, Metric
from verl_like.cluster.environment import free_port, omp_threads
from verl_like.config import OptimConfig, PPOConfig
from verl_like.config.batch_plan import MicroBatchRule, two_policies
from verl_like.config.roles import RoleConfig
from verl_like.config.trainer import Parity
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.engine.rescue import OutOfMemory
from verl_like.engine.train_engine import LOG_PROBS, VALUES, LossFn
from verl_like.kit.selfcheck import parity
from verl_like.kit.selfcheck.driver import Share
from verl_like.kit.selfcheck.plain import TEMPERATURE, Measured, apart, scale_weights
from verl_like.kit.selfcheck.report import Finding
from verl_like.kit.selfcheck.work import (
    Case,
    Work,
    comparable,
    prepare,
    reference_scale,
    unchecked_routers,
    with_rows_apart,
)
from verl_like.models.families import why_padded
from verl_like.models.heads import HF_PREFIX
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.parallel.host_memory import return_freed_memory

PLAIN = "plain model: "
_OTHERS_S = 60.0  # how long the last process may take after the first has ended


class RecordedLoss:
    """A loss that adds up what it returns over micro-batches."""

    def __init__(self, loss: LossFn) -> None:
        self.loss, self.wants, self.total = loss, loss.wants, 0.0

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The loss's own answer."""
        value, metrics = self.loss(outputs, experience, denominators)
        self.total += float(value.detach())
        return value, metrics


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The check of one configuration. LoRA begins with adapters of noise: see `plain_adapters.with_noise`."""

    config: PPOConfig
    num_rows: int = 12

    def run(self, *, ranks: int = 2) -> tuple[list[Finding], list[str]]:
        """All findings, and what to say about them; `ranks` processes for the data-parallel ones, 1 leaves them out."""
        work = self.prepare(ranks=ranks)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        process = init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), device)
        try:
            findings, first = self.alone(process, work)
        finally:
            shutdown_distributed()
        gc.collect()  # FSDP's modules refer to each other
        return_freed_memory()
        if ranks > 1:
            findings += self.in_processes(ranks, work, first)
        return findings, [*work.notes, *unchecked_routers(self.config)]

    def prepare(self, *, ranks: int = 1) -> Work:
        """Rows, shares and the yardstick's answers."""
        return prepare(self.settings(), num_rows=self.num_rows, ranks=ranks)

    def settings(self) -> PPOConfig:
        """The user's settings where they can be compared."""
        return with_rows_apart(comparable(self.config))

    def alone(self, process: ProcessInfo, work: Work) -> tuple[list[Finding], Measured]:
        """All findings of one process, and the first way's gradient. The yardstick's gradients are let go of."""
        engine = self.policy(process, work, packed=self.config.actor_rollout_ref.model.use_remove_padding)
        main, few = work.policy[0], _few(work.policy[0])
        first = self.measure(engine, main, main.shares[1][0])
        findings = self.against_plain(engine, main, first)
        main.plain.gradient.clear()  # each is as large as the model
        for case in work.policy[1:]:
            findings += self.against_plain(engine, case, self.measure(engine, case, case.shares[1][0]))
            case.plain.gradient.clear()
        cuts = self.cuts(engine, process, work, first)
        if engine.role.exact:
            findings.append(parity.finding(self.settings(), engine, work.vocab_size))
        del engine
        if work.critic is not None:
            critic = self.critic(process)
            measured = self.measure(critic, work.critic, work.critic.shares[1][0], rule=few)
            findings += self.against_plain(critic, work.critic, measured)
            work.critic.plain.gradient.clear()
        return findings + cuts, first

    def against_plain(self, engine: FSDPEngine, case: Case, found: Measured) -> list[Finding]:
        """Log-probs (or values), loss and gradient of one mini-batch against the yardstick's."""
        want = VALUES if engine.kind == "value" else LOG_PROBS
        temperature = 1.0 if want == VALUES else TEMPERATURE
        rollouts = case.material.rollouts
        rule = MicroBatchRule(max_tokens=int(rollouts.num_tokens_B().sum()))
        answer_T = engine.forward(rollouts, want=frozenset({want}), rule=rule, temperature=temperature)[want]
        gap_T = (answer_T - rollouts.flat(case.column))[rollouts.response_mask_T].abs()
        loss_gap = abs(found.loss - case.plain.loss)
        name = PLAIN + case.name
        return [
            Finding(name=f"{name}{want.replace('_', '-')}", difference=float(gap_T.max())),
            Finding(name=f"{name}loss", difference=loss_gap / case.plain.scale),
            Finding(name=f"{name}gradient", difference=apart(case.plain.gradient, found.gradient)),
        ]

    def cuts(self, engine: FSDPEngine, process: ProcessInfo, work: Work, first: Measured) -> list[Finding]:
        """The main mini-batch in ways that must not matter on one process, against the first way."""
        main, few = work.policy[0], _few(work.policy[0])
        whole, denominators = main.shares[1][0]
        backwards = whole.select(range(len(whole) - 1, -1, -1))
        other = self.policy(
            process, work, packed=not engine.packed and not why_padded(engine.hf_config), fused=not engine.packed
        )
        name = f"{'packed' if other.packed else 'padded'} rows, {'full logits' if engine.packed else 'fused head'}"
        one_row = MicroBatchRule(max_sequences=1)
        ways = {
            "micro-batches of a few rows": (engine, whole, few),
            "micro-batches of one row": (engine, whole, one_row),
            "rows in another order": (engine, backwards, few),
            name: (other, whole, few),
        }
        found = ((n, self.measure(who, main, (rows, denominators), rule=rule)) for n, (who, rows, rule) in ways.items())
        return [Finding(name=n, difference=apart(first.gradient, each.gradient)) for n, each in found]

    def on_rank(self, process: ProcessInfo, work: Work, first: Measured) -> list[Finding]:
        """The main mini-batch shared out among ranks, against the first way on one process."""
        main, few = work.policy[0], _few(work.policy[0])
        whole, denominators = main.shares[1][0]
        mine = main.shares[process.world_size][process.rank]
        skewed = (whole.select(range(len(whole) if process.rank == 0 else 0)), denominators)
        packed = self.config.actor_rollout_ref.model.use_remove_padding
        prefix, findings = f"{process.world_size} processes: ", list[Finding]()

        def compare(name: str, engine: FSDPEngine, share: Share) -> None:
            gap = apart(first.gradient, self.measure(engine, main, share, rule=few).gradient)
            findings.append(Finding(name=prefix + name, difference=gap))

        engine = self.policy(process, work, packed=packed)
        compare("rows shared out", engine, mine)
        compare("all rows on the first", engine, skewed)
        once = dataclasses.replace(engine.role.fsdp, sync_every_micro_batch=False)
        engine.role = dataclasses.replace(engine.role, fsdp=once)  # read at each update
        compare("gradients reduced once", engine, mine)
        return findings

    def measure(self, engine: FSDPEngine, case: Case, share: Share, *, rule: MicroBatchRule | None = None) -> Measured:
        """Loss and gradient of this rank's rows, added up over the ranks; by default in one micro-batch."""
        rows, denominators = share
        rule = rule or MicroBatchRule(max_tokens=max(int(rows.num_tokens_B().sum()), 1))
        settings = self.settings()
        objective: PolicyObjective | ValueObjective = ValueObjective(settings.critic)
        apart_B = None
        if engine.kind == "policy":
            actor, correction = settings.actor_rollout_ref.actor, settings.algorithm.rollout_correction
            objective = PolicyObjective(actor, correction, two_policies=two_policies(actor, correction))
            apart_B = objective.without_gradient(rows)
        loss = RecordedLoss(objective)
        gradient = minibatch_gradients(
            engine,
            rows,
            loss,
            denominators,
            rule=rule,
            temperature=TEMPERATURE if engine.kind == "policy" else 1.0,
            without_gradient_B=apart_B,
        )
        return Measured(loss=loss.total, gradient=gradient)

    def policy(self, process: ProcessInfo, work: Work, *, packed: bool, fused: bool | None = None) -> FSDPEngine:
        """The actor as the configuration wants it, in float32, packed and fused or the reference path."""
        settings = self.settings()
        policy = settings.actor_rollout_ref
        fused = packed if fused is None else fused
        role = RoleConfig(
            model=dataclasses.replace(policy.model, use_remove_padding=packed, use_fused_kernels=fused),
            fsdp=policy.actor.fsdp_config,
            optim=OptimConfig(),
            freeze_vision_tower=policy.actor.freeze_vision_tower,
            exact=packed and self.config.trainer.parity == Parity.exact,
        )
        sizes: dict[str, Any] = {"tokenizer_size": work.vocab_size, "seed": self.config.trainer.seed}
        engine, scale = FSDPEngine(role, process, num_schedule_steps=1, **sizes), reference_scale(settings)
        if scale is not None and policy.model.lora_rank == 0:  # LoRA's reference is its own base
            reference = FSDPEngine(dataclasses.replace(role, optim=None), process, **sizes)
            scale_weights(reference.model, scale)
            engine.attach_reference(reference)
        return engine

    def critic(self, process: ProcessInfo) -> FSDPEngine:
        """The critic as the configuration wants it, in float32."""
        critic = self.settings().critic
        role = RoleConfig(kind="value", model=critic.model, fsdp=critic.model.fsdp_config, optim=OptimConfig())
        return FSDPEngine(role, process, num_schedule_steps=1, seed=self.config.trainer.seed)

    def in_processes(self, ranks: int, work: Work, first: Measured) -> list[Finding]:
        """Run `on_rank` in fresh processes: one GPU each, or the CPU where there are not enough."""
        context = multiprocessing.get_context("spawn")
        device, port = "cuda" if torch.cuda.device_count() >= ranks else "cpu", free_port()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(work, Path(folder) / "work.pt")
            torch.save(first, Path(folder) / "first.pt")
            first.gradient.clear()  # the ranks read the file
            processes = [
                context.Process(target=_rank_main, args=(self, rank, ranks, port, device, folder))
                for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            connection.wait([process.sentinel for process in processes])
            for process in processes:  # where one has failed, the others wait for it in a collective
                process.join(_OTHERS_S)
                process.kill()
                process.join()
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise RuntimeError(f"the self-check's processes ended with {codes}; the error is above")
            return torch.load(Path(folder) / "findings.pt", weights_only=False)


def _few(case: Case) -> MicroBatchRule:
    """Make the rule of a token budget that a few rows fit into, for some four micro-batches."""
    tokens_B = case.shares[1][0][0].num_tokens_B()
    return MicroBatchRule(max_tokens=max(int(tokens_B.sum()) // 3, int(tokens_B.max()) + 1))


def _rank_main(check: SelfCheck, rank: int, ranks: int, port: int, device: str, folder: str) -> None:
    process = init_distributed(rank, ranks, rank, ranks, "127.0.0.1", port, device)
    torch.set_num_threads(omp_threads(ranks, device))
    work = torch.load(Path(folder) / "work.pt", weights_only=False)
    first = torch.load(Path(folder) / "first.pt", weights_only=False, mmap=True)  # the ranks share its memory
    findings = check.on_rank(process, work, first)
    if rank == 0:
        torch.save(findings, Path(folder) / "findings.pt")
    shutdown_distributed()


def minibatch_gradients(
    engine: FSDPEngine,
    batch: Experience,
    loss_fn: LossFn,
    denominators: Denominators,
    *,
    rule: MicroBatchRule,
    temperature: float = 1.0,
    without_gradient_B: Tensor | None = None,
) -> dict[str, Tensor]:
    """Float32 gradient of a mini-batch by Hugging Face name, before clipping, on every rank's host (collective).

    batch: this rank's rows (may be none). denominators: of the whole mini-batch. Raises torch.OutOfMemoryError: the cut
    is what is checked, so that nothing is repeated with smaller micro-batches.
    """
    engine.onload()
    try:
        engine.accumulate(batch, Objective(loss_fn, denominators, temperature), rule, without_gradient_B)
    except OutOfMemory as error:
        raise torch.OutOfMemoryError(f"out of memory in {error}: take smaller micro-batches") from error
    gradients = engine.sharding.full_gradients()
    found = {name.removeprefix(HF_PREFIX): gradient.cpu().clone() for name, gradient in gradients}
    engine.sharding.drop_gradients()
    return found
