"""A checkpoint of verl's FSDP trainer written anew as one of ours, which any number of ranks load.

    global_step_<n>/{actor,critic}/model_world_size_<W>_rank_<R>.pt, optim_..., extra_state_..., huggingface/

Taken: weights; AdamW's averages, of FSDP2 by parameter, of FSDP1 cut out of the flat tensors of each layer; the place
in the learning-rate schedule. What cannot be taken begins afresh, and is told. Nothing is unpickled but tensors and
numbers.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import collect
from verl_like.checkpoint.harmless import AFRESH, OF_NUMPY
from verl_like.kit.stored_weights import StoredWeights, VerlFiles
from verl_like.models.heads import HF_PREFIX
from verl_like.models.lora import is_adapter

_LAYER = re.compile(r"(.*?\.\d+)\.")  # what FSDP1 makes a flat tensor of; the rest of the model is one more
_AVERAGES = ("exp_avg", "exp_avg_sq")


def is_verl_step(path: Path) -> bool:
    """True where verl wrote this global_step_<n>."""
    actor = path / layout.ACTOR
    return not (path / layout.STATE_FILE).exists() and actor.is_dir() and VerlFiles.is_in(actor)


def converted(source: Path, root: Path) -> tuple[Path, list[str]]:
    """Convert verl's checkpoint to one of ours below `root`, unless it is there already; return what was not taken too.

    Raises ValueError for files that are not whole or hold what torch does not know to be harmless.
    """
    out, step = layout.step_dir(root, layout.step_of(source)), layout.step_of(source)
    if out.is_dir() and layout.read_trainer_state(out).get("verl") == str(source):
        return out, []
    written, left = layout.prepare_step_dir(root, step), ["its place in the data: it begins with the first row"]
    for role in (layout.ACTOR, layout.CRITIC):
        if (source / role).is_dir():
            left += [f"the {role}'s {what}" for what in _convert(source / role, written / role, step)]
    state = {"step": step, "weight_version": step}
    layout.write_trainer_state(written, {"state": state, "source": None, "run": None, "verl": str(source)})
    collect(written)
    return layout.commit(written), left


def _convert(folder: Path, out: Path, step: int) -> list[str]:
    """Convert one role, and list what was not taken."""
    weights, left = VerlFiles(folder), ["random states"]
    _write(weights, out / "model")
    if (folder / "huggingface").is_dir():
        shutil.copytree(folder / "huggingface", out / "huggingface")
    if (folder / "lora_adapter").is_dir():
        shutil.copytree(folder / "lora_adapter", out / "adapter")
    try:
        _write(_averages(folder, weights), out / "optimizer")
    except (ValueError, KeyError) as error:  # a state that is there for some parameters only
        shutil.rmtree(out / "optimizer", ignore_errors=True)
        (out / "optimizer").mkdir()
        (out / "optimizer" / AFRESH).write_text(str(error))
        left.append(f"optimizer: {error}")
    counters = {"schedule_steps": _schedule_steps(folder, step, left)}
    (out / "extra").mkdir()
    for rank in range(len(weights.ranks)):
        torch.save({"counters": counters, "rng": None}, out / "extra" / f"rank_{rank}.pt")
    return left


def _schedule_steps(folder: Path, step: int, left: list[str]) -> int:
    """Read the steps of the learning-rate schedule, which counts rollout batches in verl as here.

    Where they cannot be read, `step` is taken, and `left` gets a line about it.
    """
    files = sorted(folder.glob("extra_state_world_size_*_rank_0.pt"))
    try:
        with torch.serialization.safe_globals(OF_NUMPY):
            return int(torch.load(files[0], map_location="cpu", weights_only=True)["lr_scheduler"]["last_epoch"])
    except Exception as error:  # whatever a pickle can be
        why = str(error).splitlines()[0] if files else "not saved"
        left.append(f"place in the learning-rate schedule: {step}, as its step ({why})")
        return step


def _averages(folder: Path, weights: VerlFiles) -> StoredWeights:
    """Read AdamW's averages. Raises ValueError where they cannot be matched with the weights."""
    files = [folder / path.name.replace("model_", "optim_", 1) for path in weights.files]
    if missing := [path.name for path in files if not path.exists()]:
        raise ValueError(f"{missing[0]} is not there")
    try:
        ranks = [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in files]
    except Exception as error:
        raise ValueError(f"it cannot be read: {str(error).splitlines()[0]}") from error
    count = sum(len(group["params"]) for group in ranks[0]["param_groups"])
    untied = [name for name in weights.names if not name.endswith("lm_head.weight")]  # a tied head has no own state
    for names in (weights.names, untied, [name for name in weights.names if is_adapter(name)]):
        if len(names) == count:
            return _ByParameter(ranks, weights, names)
    for names in (weights.names, untied):
        units: dict[str, list[str]] = {"": []}
        for name in names:
            layer = _LAYER.match(name)
            units.setdefault(layer[1] if layer else "", []).append(name)
        if len(units) == count and (found := _OfLayers(ranks, weights, list(units.values()))).fits:
            return found
    raise ValueError(f"its {count} states are neither those of {len(untied)} parameters nor of the layers")


class _States:
    """AdamW's states of each name, as tensors called <name>.<state>."""

    def __init__(self, states: Sequence[Mapping[int, Mapping[str, Any]]], weights: VerlFiles) -> None:
        self.states, self.weights = states, weights
        self.places: dict[str, tuple[str, int]] = {}  # name -> (parameter, number of its state)

    @property
    def names(self) -> list[str]:
        return [f"{name}.{key}" for name in self.places for key in ("step", *_AVERAGES)]

    def empty(self, name: str) -> Tensor:
        parameter, _, key = name.rpartition(".")
        if key == "step":
            return torch.empty((), device="meta")
        return torch.empty_like(self.weights.empty(parameter), dtype=self._parts(parameter, key)[0].dtype)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._whole(*name.rpartition(".")[::2]) for name in names}

    def _parts(self, parameter: str, key: str) -> list[Any]:
        """Collect one state of a parameter from all ranks."""
        number = self.places[parameter][1]
        return [rank[number][key] for rank in self.states]

    def _whole(self, parameter: str, key: str) -> Tensor:
        raise NotImplementedError


class _ByParameter(_States):
    """One state for each parameter, cut as the parameter is."""

    def __init__(self, ranks: Sequence[Any], weights: VerlFiles, names: Sequence[str]) -> None:
        super().__init__([rank["state"] for rank in ranks], weights)
        for number, name in enumerate(names):
            if number not in self.states[0]:  # frozen
                continue
            then, now = self.states[0][number]["exp_avg"].shape, weights.empty(name).shape
            if then != now:
                raise ValueError(f"state {number} has the shape {tuple(then)}, but {name} {tuple(now)}")
            self.places[name] = (name, number)

    def _whole(self, parameter: str, key: str) -> Tensor:
        parts = self._parts(parameter, key)
        if key == "step":
            return torch.as_tensor(parts[0], dtype=torch.float32)
        return self.weights.joined(f"{parameter}.{key}", parts)


class _OfLayers(_States):
    """FSDP1: the parameters of a layer behind one another in one flat tensor, cut evenly among ranks."""

    def __init__(self, ranks: Sequence[Any], weights: VerlFiles, units: Sequence[Sequence[str]]) -> None:
        replica = weights.replica
        super().__init__([ranks[rank]["state"] for rank in replica], weights)
        self.starts: dict[str, int] = {}
        self.fits = True  # the numbers are as many
        self._flat: tuple[tuple[int, str], Tensor] | None = None
        for number, unit in enumerate(units):
            place = 0
            for name in unit:
                self.places[name], self.starts[name] = (name, number), place
                place += weights.empty(name).numel()
            parts = [rank[number]["exp_avg"] for rank in self.states]
            self.fits &= place <= sum(part.numel() for part in parts) < place + len(replica)
            self.fits &= all(part.ndim == 1 and not isinstance(part, DTensor) for part in parts)

    def _whole(self, parameter: str, key: str) -> Tensor:
        if key == "step":
            return torch.as_tensor(self._parts(parameter, key)[0], dtype=torch.float32)
        place = (self.places[parameter][1], key)
        if self._flat is None or self._flat[0] != place:
            self._flat = (place, torch.cat(self._parts(parameter, key)))
        shape = self.weights.empty(parameter).shape
        start = self.starts[parameter]
        return self._flat[1][start : start + shape.numel()].view(shape).clone()


class _OneByOne(DefaultSavePlanner):
    """Reads each tensor when it is written, so that one is in memory at a time."""

    def __init__(self, tensors: StoredWeights) -> None:
        super().__init__()
        self._read = partial(_read_one, tensors)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(HF_PREFIX))


def _read_one(tensors: StoredWeights, name: str) -> Tensor:
    return tensors.read([name])[name]


def _write(tensors: StoredWeights, folder: Path) -> None:
    """Write the tensors as our engine does."""
    empty = {HF_PREFIX + name: tensors.empty(name) for name in tensors.names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group is meant
        dcp.save(empty, checkpoint_id=str(folder), planner=_OneByOne(tensors), no_dist=True)
