"""Model of an engine without its passes: built and sharded, its weights exported, offloaded, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.config.actor import ReplayMode
from verl_like.config.fsdp import resolve_dtype
from verl_like.engine import state
from verl_like.engine.expert_load import ExpertLoad
from verl_like.engine.export import WeightExport
from verl_like.engine.muon import matrices_of
from verl_like.engine.optim import LossScale, Schedule, build_optimizer
from verl_like.engine.router_losses import RouterLosses, check_router
from verl_like.engine.state import BackgroundWriter, Part
from verl_like.engine.train_engine import WeightChanges, WeightForm
from verl_like.heartbeat import advance
from verl_like.models import blocks, families, loading, lora, stages, tensor_plan
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.families import num_experts
from verl_like.models.heads import HF_PREFIX, PolicyModel, TokenModel, dtype_of
from verl_like.models.lora_experts import stacks_of
from verl_like.models.routes import Routers
from verl_like.models.vision import processor_of
from verl_like.parallel import sharding
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.fsdp import Sharding
from verl_like.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from verl_like.config.roles import RoleConfig


class ShardedModel:
    """Sharded model of a role, with its optimizer. FSDPEngine adds forward passes and updates.

    role, process, tokenizer_size, seed: see FSDPEngine.
    schedule: the learning-rate schedule, whose steps are saved with the model; None where it is not trained.
    """

    def __init__(
        self, role: RoleConfig, process: ProcessInfo, schedule: Schedule | None, tokenizer_size: int | None, seed: int
    ) -> None:
        model, fsdp, optim = role.model, role.fsdp, role.optim
        self.role, self.kind, self.process, self.device = role, role.kind, process, process.device
        self.packed = loading.uses_packing(model)
        self.hf_config = loading.load_hf_config(model)
        loading.check_backend(model, self.hf_config, self.device)
        loading.check_ulysses(model, self.hf_config, role.ulysses)
        loading.check_context(model, self.hf_config, role.context, role.context_key)
        tensor_plan.check_engine(model, self.hf_config, fsdp, ulysses=role.ulysses)
        tensor_plan.check_experts(model, self.hf_config, fsdp.expert_parallel_size, trained=optim is not None)
        stages.check_stages(self.hf_config, fsdp, role.pipe_key)
        self._vision = processor_of(model, self.hf_config)
        self.compute_dtype = dtype_of(resolve_dtype(fsdp.dtype, self.device.type))
        self._adapters: lora.Adapters | None = None
        self.model = self._build_model(tokenizer_size, seed)
        if role.exact and isinstance(self.model, PolicyModel):
            self.model.make_exact()
        else:
            loading.replace_functions(self.model.hf, model, self.device, compiled=role.compile_blocks)
        self._expert_load: ExpertLoad | None = None
        whole_layers = not role.compile_blocks and fsdp.pipeline_parallel_size == 1  # a count would break compiled ones
        if optim is not None and self.packed and whole_layers:
            self._expert_load = ExpertLoad.of(self.model, num_experts(self.hf_config), self.device)
        check_router(self.model.hf, role.router)
        self._router_losses: RouterLosses | None = None
        if optim is not None and role.router.has_losses:
            self._router_losses = RouterLosses(self.model.hf, role.router, self.device)
        self._routers: Routers | None = None
        if role.routes_key:
            self._routers = Routers(self.model.hf, role.routes_key, replaces=role.replay != ReplayMode.disabled)
        self.sharding = self._shard()
        whole = partial(loading.build_meta_model, model, self.hf_config, kind=role.kind)
        self._export = WeightExport(self.sharding, self._adapters, self._stored, whole)
        self.optimizer = None
        if optim is not None:
            self.optimizer = build_optimizer(self.sharding.parameters(), optim, matrices_of(self.model.hf))
        # Asked once: stages agree on it, whatever each of them trains.
        self._exact = self.sharding.trained_dtypes() <= {torch.float32}
        self.schedule, self.changes = schedule, WeightChanges()
        self._loss_scale = LossScale(self.compute_dtype)
        self._params_offloaded = self._optimizer_offloaded = False
        self._writer: BackgroundWriter | None = None

    def _build_model(self, tokenizer_size: int | None, seed: int) -> TokenModel:
        role, config, training = self.role, self.role.model, self.role.optim is not None
        compute, master = self.compute_dtype, dtype_of(role.fsdp.model_dtype)
        with_lora = training and config.lora_rank > 0
        stored = master if training and not with_lora else compute  # a frozen base needs no master copy
        model = loading.build_token_model(
            config,
            self.hf_config,
            kind=role.kind,
            dtype=stored,
            vocab_size=tokenizer_size,
            seed=seed,
            empty=self.process.rank != 0,
        )
        if training and config.enable_gradient_checkpointing:
            blocks.enable_checkpointing(model.hf, selective=config.recompute_granularity == "selective")
        model.requires_grad_(training)
        tower = families.frozen_tower(model.hf, frozen=role.freeze_vision_tower)
        self._head_names, self._stored = model.head_names(), CheckpointNames(model.hf)
        if with_lora:
            self._adapters = lora.attach(model.hf, config, dtype=master, seed=seed, left_out=tower)
            if config.lora_adapter_path is not None and self.process.rank == 0:  # the others get theirs from there
                lora.load_adapter(model.hf, config)
        return model

    def _shard(self) -> Sharding:
        fsdp, precision = self.role.fsdp, self.role.fsdp.mixed_precision
        mesh = ParallelMesh(self.role.mesh(self.process.world_size), self.device)
        layers = loading.sharding_units(self.model, fsdp)
        if self.role.compile_blocks:
            blocks.compile_blocks(layers, self.device)
        sharding = Sharding(
            self.model,
            layers,
            fsdp,
            mesh,
            compute_dtype=self.compute_dtype,
            reduce_dtype=dtype_of(precision.reduce_dtype),
            buffer_dtype=None if precision.buffer_dtype is None else dtype_of(precision.buffer_dtype),
            device=self.device,
            tensor=tensor_plan.tensor_plan(self.model, self.hf_config, self.role.tensor),
            experts=[*stacks_of(self.model.hf)[0].values()] if mesh.tensor or mesh.expert else (),
            stages=None if mesh.pipe is None else stages.parts(self.model, mesh.sizes.pipe * mesh.sizes.virtual),
        )
        self.model.hands_on = mesh.pipe is not None and not mesh.pipe.is_last
        return sharding

    @property
    def adapters(self) -> lora.Adapters | None:
        """Adapters of LoRA; None where all weights are trained."""
        return self._adapters

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Switch the adapters of LoRA off for the forward passes inside. Raises ValueError without LoRA."""
        if self._adapters is None:
            raise ValueError("this engine trains all weights: only LoRA keeps the base model (model.lora_rank)")
        with self._adapters.disabled():
            yield

    # --- weights -----------------------------------------------------------------------------------------------------

    def export_weights(self, dtype: torch.dtype, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor on this rank's device), one at a time, the same order on all ranks.

        Adapters that travel for themselves are named as in peft without its prefix (`<module>.lora_A.weight`,
        `<module>.lora_B.weight`), and B comes multiplied by alpha / rank: the receiver adds B A x and nothing else.
        """
        for named in self._export.stream(dtype, form):
            advance(amount=named[1].nbytes)
            yield named
            del named  # before the next one is gathered

    def weight_names(self, form: WeightForm = "merged") -> dict[str, torch.Size]:
        """Names and shapes that `export_weights` must yield, computed from the model's config, not from the shards."""
        return self._export.names(form)

    def weight_checksums(self, dtype: torch.dtype, form: WeightForm = "merged") -> dict[str, int]:
        """Compute the checksum (parallel/checksum.py) of every tensor of `export_weights`, from the shards.

        Collective. Raises RuntimeError where an adapter to be merged is not what its shards hold.
        """
        return self._export.checksums(dtype, form)

    # --- memory ------------------------------------------------------------------------------------------------------

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        """Move shards and optimizer state to host memory; nothing to do on a CPU or under offload_policy."""
        if self.device.type == "cpu" or self.role.fsdp.offload_policy:
            return
        if optimizer and self.optimizer is not None and not self._optimizer_offloaded:
            sharding.move_optimizer(self.optimizer, torch.device("cpu"))
            self._optimizer_offloaded = True
        if params and not self._params_offloaded:
            self.sharding.move_params(torch.device("cpu"))
            self._params_offloaded = True

    def onload(self, optimizer: bool = True) -> None:
        """Undo `offload`, for the optimizer state only where it is wanted."""
        if self._params_offloaded:
            self.sharding.move_params(self.device)
            self._params_offloaded = False
        if optimizer and self._optimizer_offloaded and self.optimizer is not None:
            sharding.move_optimizer(self.optimizer, self.device)
            self._optimizer_offloaded = False

    @contextmanager
    def _resident(self, *, optimizer: bool) -> Iterator[None]:
        """Hold weights (and optimizer state) on the device inside; what the config wants offloaded goes back after."""
        self.onload(optimizer)
        yield
        self.offload(params=self.role.fsdp.param_offload, optimizer=self.role.fsdp.optimizer_offload)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: str, *, contents: Sequence[str], background: bool = False) -> list[str]:
        """Write a checkpoint; return the names of weights and optimizer states with NaN or infinite numbers here.

        Where any rank has such a number, nothing is written.

        Args:
            path: folder of the checkpoint.
            contents: parts out of "model", "optimizer", "extra" (schedule, RNG), "hf_model": each becomes a folder, the
                last one huggingface.
            background: copy the shards of "model" and "optimizer" now and write them while training goes on; the
                checkpoint is whole when `saved` says so on every rank.
        """
        folder = Path(path)
        with self._resident(optimizer="optimizer" in contents):  # states are made beside their parameters
            parts = self._parts(folder, contents)
            names, refused = state.not_finite(self._saved_tensors(parts), self.device)
            if refused:
                return names
            self._save_parts(parts, background=background)
            if "model" in contents:
                self._save_adapter(folder / "adapter")
        if "extra" in contents:
            state.save_extra(folder / "extra", self.process.rank, self._counters())
        if "hf_model" in contents:
            self.export_hf(str(folder / "huggingface"))
        elif self.process.rank == 0:
            state.write_config(self.model.hf, folder / "huggingface", dtype_of(self.role.fsdp.model_dtype))
        return []

    def load(self, path: str, *, contents: Sequence[str]) -> None:
        """Read what `save` wrote, also with another number of ranks. Raises ValueError when a part is lacking."""
        folder = Path(path)
        self.changes = self.changes.after_load()
        if "model" in contents:
            with self._resident(optimizer=False):
                state.load_sharded(self._model_state(), folder / "model")
        if self.optimizer is not None and "optimizer" in contents:
            with self._resident(optimizer=True):
                state.load_sharded(self.sharding.optimizer_state(self.optimizer), folder / "optimizer")
        if "extra" in contents:
            counters = state.load_extra(folder / "extra", self.process.rank)
            if self.schedule is not None:
                self.schedule.steps_done = counters["schedule_steps"]
                self._loss_scale.restore(counters)

    def _parts(self, folder: Path, contents: Sequence[str]) -> list[Part]:
        parts: list[Part] = []
        if "model" in contents:
            parts.append((self._model_state(), folder / "model"))
        if self.optimizer is not None and "optimizer" in contents:
            parts.append((self.sharding.optimizer_state(self.optimizer), folder / "optimizer"))
        return parts

    def _saved_tensors(self, parts: list[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that must be finite before these parts are written: always the weights, in any form."""
        if not any(folder.name == "model" for _, folder in parts):
            yield from self._model_state().items()
        for tensors, _ in parts:
            yield from tensors.items()

    def _save_parts(self, parts: list[Part], *, background: bool) -> None:
        if background:
            if self._writer is None:
                self._writer = BackgroundWriter()
            self._writer.write(parts)
            return
        for tensors, folder in parts:
            state.save_sharded(tensors, folder)

    def saved(self, *, wait: bool) -> bool:
        """True where this rank writes no checkpoint in the background any more; `wait`: wait until that is so."""
        if wait and self._writer is not None:
            self._writer.wait()
        return self._writer is None or self._writer.done()

    def _model_state(self) -> dict[str, Tensor]:
        """Tensors of the model in a checkpoint: only the adapters of LoRA where model.path has the base's weights."""
        tensors = self.sharding.model_state()
        if self._adapters is None or not loading.has_weights(self.role.model.path):
            return tensors
        return {name: tensor for name, tensor in tensors.items() if lora.is_trained(name)}

    def _save_adapter(self, folder: Path) -> None:
        """Write the adapter as the peft library reads it, beside the sharded state."""
        if self._adapters is None:
            return
        named = self.sharding.full_weights(torch.float32, lora.is_trained)
        tensors = ((lora.peft_name(name.removeprefix(HF_PREFIX)), tensor) for name, tensor in named)
        config = self._adapters.peft_config(self.role.model.path, is_value_model=self.kind == "value")
        state.export_adapter(tensors, config, folder, rank=self.process.rank)

    def _counters(self) -> dict[str, int]:
        done = 0 if self.schedule is None else self.schedule.steps_done
        return {"schedule_steps": done, **self._loss_scale.counters()}

    def export_hf(self, path: str) -> None:
        """Write config and safetensors that `from_pretrained` reads, in the precision of the shards."""
        dtype = dtype_of(self.role.fsdp.model_dtype)
        state.export_hf(self.model.hf, self.export_weights(dtype), Path(path), rank=self.process.rank, dtype=dtype)
