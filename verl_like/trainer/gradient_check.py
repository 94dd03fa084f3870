"""`verl-like selfcheck`: on the user's own model and settings, nothing about how a batch is cut changes its gradient.

One mini-batch of random rows goes through the training engine in several ways that must not matter: in one micro-batch
and in many, in another order, packed and padded, reduced after each micro-batch or once, on one process and on two.
Gradients are compared with the first way's, and log-probs with a plain forward pass of the Hugging Face model, row by
row. Everything is float32, so that differences are rounding (around 1e-6) or errors.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Denominators, Experience, pad_rows
from verl_like.cluster.environment import free_port
from verl_like.config import ActorConfig, OptimConfig, PPOConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.enums import KLKind
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.gradients import minibatch_gradients
from verl_like.engine.train_engine import LossFn
from verl_like.models.families import why_padded
from verl_like.models.loading import has_weights, load_hf_config, load_tokenizer
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

TOLERANCE = 1e-4  # of the gradient's size; float32 rounding of other matrix shapes stays well below
TEMPERATURE = 0.8  # not 1, so that a path that forgets it shows

_FIRST = "one micro-batch"
_LOG_PROBS = "log-probs of a plain forward pass"

MakeLoss = Callable[[ActorConfig], LossFn]
Count = Callable[[Experience, Experience, int], Denominators]  # whole mini-batch, this rank's rows, maximum length


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way of computing the same thing, and how far it is from the first."""

    name: str
    difference: float

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE


def whole_batch(whole: Experience, mine: Experience, max_response_length: int) -> Denominators:
    """Denominators as the driver counts them: over the whole mini-batch and all ranks."""
    return denominators_of(whole, max_response_length)


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The check of one configuration. `make_loss` and `count` are exchanged by tests, to plant faults."""

    config: PPOConfig
    num_rows: int = 10
    make_loss: MakeLoss = PolicyObjective
    count: Count = whole_batch

    def run(self, *, ranks: int = 2) -> list[Finding]:
        """All findings; `ranks` processes for the data-parallel ones, 1 leaves them out."""
        with tempfile.TemporaryDirectory() as folder:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            alone = self.in_processes(1, device, Path(folder))[0]
            shared = self.in_processes(ranks, self.device_of(ranks), Path(folder))[0] if ranks > 1 else {}
        return self.findings(alone, {f"{ranks} processes: {name}": found for name, found in shared.items()})

    def findings(
        self, alone: dict[str, dict[str, Tensor]], shared: dict[str, dict[str, Tensor]] | None = None
    ) -> list[Finding]:
        """Every way against the first one; `alone` and `shared` are what `on_rank` found on one and on more ranks."""
        ways = {name: found for name, found in alone.items() if name not in (_FIRST, _LOG_PROBS)} | (shared or {})
        return [
            Finding(name=_LOG_PROBS, difference=self.against_plain(alone[_LOG_PROBS])),
            *(Finding(name=name, difference=apart(alone[_FIRST], found)) for name, found in ways.items()),
        ]

    def device_of(self, ranks: int) -> str:
        """One GPU a process, or the CPU where there are not enough."""
        return "cuda" if torch.cuda.device_count() >= ranks else "cpu"

    def in_processes(self, ranks: int, device: str, folder: Path) -> list[dict[str, dict[str, Tensor]]]:
        """Run `on_rank` in fresh processes; what each found."""
        context = multiprocessing.get_context("spawn")
        port = free_port()
        processes = [
            context.Process(target=_rank_main, args=(self, rank, ranks, port, device, str(folder)))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the self-check's processes ended with {codes}; the error is above")
        return [torch.load(folder / f"found_{ranks}_{rank}.pt", weights_only=False) for rank in range(ranks)]

    def on_rank(self, process: ProcessInfo) -> dict[str, dict[str, Tensor]]:
        """The gradients of every way, on this rank. Alone: also the rows, and the first way's gradient."""
        engine = self.engine(process, packed=self.config.actor_rollout_ref.model.use_remove_padding)
        whole = self.rows(engine)
        one = MicroBatchRule(max_tokens=int(whole.num_tokens_B().sum()))
        few = MicroBatchRule(max_tokens=int(whole.num_tokens_B().max()) + 1)
        if process.world_size > 1:
            mine = whole.select(range(process.rank, len(whole), process.world_size))
            skewed = whole.select(range(len(whole) if process.rank == 0 else 0))
            found = {
                "rows shared out": self.gradient(engine, mine, whole, few),
                "all rows on the first": self.gradient(engine, skewed, whole, few),
            }
            once = self.engine(process, packed=engine.packed, reduce_once=True)
            return found | {"gradients reduced once": self.gradient(once, mine, whole, few)}
        backwards = whole.select(range(len(whole) - 1, -1, -1))
        padded_only = bool(why_padded(engine.hf_config))
        other = self.engine(process, packed=not engine.packed and not padded_only, fused=not engine.packed)
        name = f"{'packed' if other.packed else 'padded'} rows, {'full logits' if engine.packed else 'fused head'}"
        return {
            _LOG_PROBS: {"log_probs": self.log_probs(engine, whole, few)},
            _FIRST: self.gradient(engine, whole, whole, one),
            "micro-batches of a few rows": self.gradient(engine, whole, whole, few),
            "micro-batches of one row": self.gradient(engine, whole, whole, MicroBatchRule(max_sequences=1)),
            "rows in another order": self.gradient(engine, backwards, backwards, few),
            name: self.gradient(other, whole, whole, few),
        }

    def engine(
        self, process: ProcessInfo, *, packed: bool, fused: bool | None = None, reduce_once: bool = False
    ) -> FSDPEngine:
        """The actor as the configuration wants it, in float32, packed and fused or the reference path."""
        policy = self.config.actor_rollout_ref
        fused = packed if fused is None else fused
        fsdp = dataclasses.replace(policy.actor.fsdp_config, dtype="float32", model_dtype="float32")
        if reduce_once:
            fsdp = dataclasses.replace(fsdp, sync_every_micro_batch=False)
        return FSDPEngine(
            kind="policy",
            process=process,
            model=dataclasses.replace(policy.model, use_remove_padding=packed, use_fused_kernels=fused),
            fsdp=fsdp,
            optim=OptimConfig(),
            grad_clip=None,
            num_schedule_steps=1,
            strategy=policy.actor.strategy,
            tokenizer_size=self.vocab_size(),
            seed=self.config.trainer.seed,
        )

    def gradient(
        self, engine: FSDPEngine, mine: Experience, whole: Experience, rule: MicroBatchRule
    ) -> dict[str, Tensor]:
        """The gradient of this rank's rows, added up over the ranks."""
        actor = self.actor()
        return minibatch_gradients(
            engine,
            mine,
            self.make_loss(actor),
            self.count(whole, mine, self.config.data.max_response_length),
            rule=rule,
            temperature=TEMPERATURE,
        )

    def actor(self) -> ActorConfig:
        """The user's loss; KL over the whole vocabulary needs a second model and is checked as low_var_kl."""
        actor = self.config.actor_rollout_ref.actor
        return dataclasses.replace(actor, kl_loss_type=KLKind.low_var_kl) if actor.kl_loss_type == "full" else actor

    def vocab_size(self) -> int:
        policy, data = self.config.actor_rollout_ref, self.config.data
        return len(load_tokenizer(data.tokenizer or policy.model.path, policy.model.trust_remote_code))

    def log_probs(self, engine: FSDPEngine, rows: Experience, rule: MicroBatchRule) -> Tensor:
        return engine.forward(rows, want=frozenset({"log_probs"}), rule=rule, temperature=TEMPERATURE)["log_probs"]

    def rows(self, engine: FSDPEngine) -> Experience:
        """Random rows with everything a loss may read: ratios away from 1, a gap of tool text, several groups."""
        plain = random_rows(self.num_rows, self.vocab_size())
        rule = MicroBatchRule(max_sequences=len(plain))
        alone = engine.process.world_size == 1
        log_probs_BR = self.log_probs(engine, plain if alone or engine.process.rank == 0 else plain.select([]), rule)
        if not alone:
            log_probs_BR = _from_first_rank(log_probs_BR, plain.response_ids_BR.shape)
        generator = torch.Generator().manual_seed(1)

        def near(scale: float) -> Tensor:
            noise = torch.randn(log_probs_BR.shape, generator=generator)
            return (log_probs_BR + scale * noise) * plain.response_mask_BR

        actor = self.actor()
        rows = plain.replace(old_log_probs_BR=near(0.2), ref_log_probs_BR=near(0.3) if actor.use_kl_loss else None)
        return prepare_minibatch(prepare_batch(rows, actor), actor, (1, 1, 0, 0))

    def against_plain(self, found: dict[str, Tensor]) -> float:
        """Largest difference to log softmax(logits / temperature) of the Hugging Face model itself, row by row."""
        rows, vocab = random_rows(self.num_rows, self.vocab_size()), self.vocab_size()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.trainer.seed)
            model = _plain_model(self.config)
        largest = 0.0
        for row in range(len(rows)):
            prompt = rows.prompt_ids_BP[row, rows.prompt_ids_BP.shape[1] - int(rows.prompt_length_B[row]) :]
            response = rows.response_ids_BR[row, : int(rows.response_length_B[row])]
            with torch.no_grad():
                logits = model(input_ids=torch.cat([prompt, response])[None].long()).logits[0, len(prompt) - 1 : -1]
            plain = (logits[:, :vocab].float() / TEMPERATURE).log_softmax(dim=-1)
            plain = plain.gather(1, response[:, None].long())[:, 0]
            kept = rows.response_mask_BR[row, : len(response)]
            gap = (plain - found["log_probs"][row, : len(response)])[kept].abs()
            largest = max(largest, float(gap.max()) if len(gap) else 0.0)
        return largest


def random_rows(count: int, vocab_size: int) -> Experience:
    """Rows of 5 to 40 tokens; two to a prompt; in every third row part of the response was not sampled (tool text)."""
    generator = torch.Generator().manual_seed(0)

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def tokens(sizes: list[int]) -> list[list[int]]:
        return [torch.randint(vocab_size, (size,), generator=generator).tolist() for size in sizes]

    prompts, responses = tokens(lengths(2, 12)), lengths(3, 29)
    prompts = [prompts[row - row % 2] for row in range(count)]
    response_ids_BR = pad_rows(tokens(responses), side="right", dtype=torch.int32)
    response_length_B = torch.tensor(responses)
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < response_length_B[:, None]
    mask_BR[::3, 1:3] = False
    return Experience(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids_BR=response_ids_BR,
        response_length_B=response_length_B,
        response_mask_BR=mask_BR,
        group_B=torch.arange(count) // 2,
        advantages_BR=torch.randn(count, 1, generator=generator) * mask_BR,
        score_B=torch.rand(count, generator=generator),
        truncated_B=torch.zeros(count, dtype=torch.bool),
        difficulty_B=torch.rand(count, generator=generator),
    )


def apart(reference: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two gradients by the size of the tensor's, or by a thousandth of the largest one's.

    Some gradients are zero by symmetry (the bias of attention keys): what rounding leaves there is no yardstick.
    """
    if reference.keys() != other.keys():
        raise ValueError(f"gradients of different weights: {sorted(reference.keys() ^ other.keys())[:5]}")
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in reference.values())
    return max(
        float((reference[name] - other[name]).abs().max()) / max(float(reference[name].abs().max()), floor)
        for name in reference
    )


def table(findings: list[Finding]) -> str:
    """One line a finding, the largest difference at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{f.name:<{width}}  {f.difference:9.1e}  {'ok' if f.passed else 'DIFFERENT'}" for f in findings]
    largest = max(finding.difference for finding in findings)
    verdict = "passed" if all(finding.passed for finding in findings) else "FAILED"
    return "\n".join([*lines, f"largest relative difference {largest:.1e} (limit {TOLERANCE:.0e}): {verdict}"])


def _plain_model(config: PPOConfig) -> torch.nn.Module:
    """The model as transformers itself runs it, with the weights that the engine starts from."""
    model = config.actor_rollout_ref.model
    hf_config = load_hf_config(model)
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": model.trust_remote_code}
    path = str(Path(model.path).expanduser())
    if has_weights(path):
        return AutoModelForCausalLM.from_pretrained(path, config=hf_config, **settings).eval()
    return AutoModelForCausalLM.from_config(hf_config, **settings).eval()


def _from_first_rank(values: Tensor, shape: torch.Size) -> Tensor:
    full = values if values.shape == shape else torch.zeros(shape)
    full = full.contiguous()
    torch.distributed.broadcast(full, src=0)
    return full


def _rank_main(check: SelfCheck, rank: int, ranks: int, port: int, device: str, folder: str) -> None:
    process = init_distributed(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_address="127.0.0.1",
        master_port=port,
        device=device,
        timeout_s=600,
    )
    torch.save(check.on_rank(process), Path(folder) / f"found_{ranks}_{rank}.pt")
    shutdown_distributed()
