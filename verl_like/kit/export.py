"""Export of a checkpoint to a Hugging Face folder, on a CPU, one file of weights at a time: `verl-like export`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from verl_like.checkpoint.checksums import CHECKSUMS_FILE, find_faults
from verl_like.checkpoint.layout import ACTOR, find_latest
from verl_like.kit.stored_weights import LoadedModel, SafetensorsFolder, ShardedFolder, StoredWeights, VerlFiles
from verl_like.models.checkpoint_names import CheckpointNames, sent_as
from verl_like.models.families import model_class
from verl_like.models.heads import HF_PREFIX, dtype_of
from verl_like.models.location import check_location
from verl_like.models.lora import Adapters, is_adapter
from verl_like.models.lora_experts import adapter_name, stacks_of
from verl_like.parallel.sharding import saved_buffers
from verl_like.remote_storage import local_folder
from verl_like.small_files import read_object

FILE_BYTES = 5 * 10**9  # of weights in one file of the result
_ADAPTER_FOLDERS = ("adapter", "lora_adapter")  # ours, verl's
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".index.json")
_OF_THE_FOLDER = {"config.json", "lora_train_meta.json", "fsdp_config.json"}  # written anew, or about the files here


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of an export.

    dtype: precision of the weights; None keeps the stored one.
    base: folder of the weights under an adapter; None: the one that the run had.
    merge: add an adapter into the weights; otherwise it is written as the peft library reads it.
    """

    dtype: str | None = None
    merge: bool = True
    base: str | None = None
    trust_remote_code: bool = False
    trust_pickle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A trained model on disk. adapter: its rank and alpha, or None."""

    folder: Path
    config_folder: Path
    weights: StoredWeights
    adapter: dict[str, Any] | None


def find_role(path: Path, role: str = ACTOR) -> Path:
    """The folder with the weights of a role: of the newest checkpoint of a run, of a checkpoint, or the path itself.

    ValueError where there is none.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no folder")
    for folder in (path, path / role):
        if _holds_weights(folder):
            return folder
    latest = find_latest(path)
    if latest is not None and (latest / role).is_dir():
        return latest / role
    raise ValueError(
        f"{path} is neither a run's folder (trainer.default_local_dir) with a checkpoint, nor a checkpoint "
        f"(global_step_<n>) with {role}/model, {role}/huggingface or {role}/model_world_size_<W>_rank_<R>.pt"
    )


def export(source: Path, out: Path, choices: Choices, role: str = ACTOR) -> list[str]:
    """Write a Hugging Face folder at `out`, at once or not at all; lines that tell what became of it.

    ValueError for a source that is no checkpoint, is damaged or lacks something, and an `out` that holds files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: name another folder")
    folder = find_role(source, role)
    _require_whole(folder)
    written = out.with_name(f".{out.name}.writing")
    if written.exists():
        shutil.rmtree(written)
    written.mkdir(parents=True)
    try:
        lines = _write_adapter(folder, written) if not choices.merge else _write_model(folder, written, choices)
        _copy_beside(folder, written, config=choices.merge)
        if out.exists():
            out.rmdir()
        written.rename(out)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return [f"from {folder}", *lines]


def _require_whole(folder: Path) -> None:
    """Raise ValueError for files that are not as they were written, where that is known."""
    if (folder.parent / CHECKSUMS_FILE).exists():
        faults = find_faults(folder.parent, [f"{folder.name}/{part}" for part in ("model", "huggingface", "adapter")])
        if faults:
            raise ValueError(f"{folder.parent} is damaged: {'; '.join(faults)}")


def _write_model(folder: Path, written: Path, choices: Choices) -> list[str]:
    stored = _open(folder, choices)
    config = AutoConfig.from_pretrained(stored.config_folder, trust_remote_code=choices.trust_remote_code)
    with torch.device("meta"):
        meta = model_class(config).from_config(config, trust_remote_code=choices.trust_remote_code)
    own = {n.removeprefix(HF_PREFIX): tensor for n, tensor in (*meta.named_parameters(), *saved_buffers(meta))}
    names = CheckpointNames(meta)
    adapters = _adapters_of(stored, folder, meta)
    weights = _with_base(stored, own, choices) if adapters else stored.weights
    kept = [name for name in weights.names if not is_adapter(name) and not _is_tied_copy(name, own, config)]
    _require_all(own, names, kept, folder)
    units = [_Unit(name, weights.empty(name), own, names, adapters) for name in kept]
    dtype = None if choices.dtype is None else dtype_of(choices.dtype)
    files = list(_files(units))
    table: dict[str, str] = {}
    kinds: set[str] = set()
    total = 0
    for number, unit_group in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = dict(_tensors(unit_group, weights, stored.weights, dtype))
        save_file(tensors, written / file, metadata={"format": "pt"})
        table |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        kinds |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": table}
        (written / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    raw = read_object(stored.config_folder / "config.json")
    raw["dtype"] = "float32" if "float32" in kinds else min(kinds)
    raw.pop("torch_dtype", None)  # the older spelling of the same
    (written / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    lora = f"; {len(adapters.names)} adapters of rank {adapters.rank} merged" if adapters else ""
    return [f"{len(table)} tensors, {total / 1e9:,.2f} GB in {raw['dtype']}, {len(files)} file(s){lora}"]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One parameter, and what is stored of it."""

    name: str
    empty: Tensor
    own: dict[str, Any]
    names: CheckpointNames
    adapters: Adapters | None

    def stored(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names of files on the hub; a name that is not the module's is one of those already."""
        if self.name in self.own:
            yield from self.names.views(self.name, tensor)
        else:
            yield self.name, tensor

    def inputs(self) -> list[str]:
        """The adapter's tensors that go into it."""
        adapter = adapter_name(self.name)
        adapted = self.adapters is not None and adapter in self.adapters.names
        return [f"{adapter}.lora_A.weight", f"{adapter}.lora_B.weight"] if adapted else []


def _files(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Units of one file each."""
    group: list[_Unit] = []
    size = 0
    for unit in units:
        bytes_of_unit = unit.empty.numel() * unit.empty.element_size()
        if group and size + bytes_of_unit > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(unit)
        size += bytes_of_unit
    if group:
        yield group


def _tensors(
    units: Sequence[_Unit], weights: StoredWeights, trained: StoredWeights, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    plain = weights.read([unit.name for unit in units])
    for unit in units:
        tensor = plain.pop(unit.name)
        if parts := unit.inputs():
            assert unit.adapters is not None
            stream = {unit.name: tensor, **trained.read(parts)}
            module = replace(unit.adapters, names=(adapter_name(unit.name),))
            (tensor,) = dict(module.merged(stream.items())).values()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(sent_as(unit.name, dtype))
        for name, view in unit.stored(tensor):
            yield name, view.contiguous().clone() if view.numel() != tensor.numel() else view.contiguous()


def _open(folder: Path, choices: Choices) -> _Stored:
    config = next((f for f in (folder / "huggingface", folder) if (f / "config.json").exists()), None)
    if config is None:
        raise ValueError(f"{folder} holds no config.json of the model, neither in huggingface/ nor beside the weights")
    if (folder / "model").is_dir():
        weights: StoredWeights = ShardedFolder(folder / "model", HF_PREFIX)
    elif VerlFiles.is_in(folder):
        weights = VerlFiles(folder, trust=choices.trust_pickle)
    else:
        weights = SafetensorsFolder(config)
    found = [folder / name / "adapter_config.json" for name in _ADAPTER_FOLDERS] + [folder / "lora_train_meta.json"]
    form = {"r": int, "lora_alpha": (int, float)}
    described = next((read_object(path, form) for path in found if path.exists()), None)
    return _Stored(folder=folder, config_folder=config, weights=weights, adapter=described)


def _adapters_of(stored: _Stored, folder: Path, meta: nn.Module) -> Adapters | None:
    modules = sorted({name.rpartition(".lora_")[0] for name in stored.weights.names if is_adapter(name)})
    if not modules:
        return None
    if stored.adapter is None:
        raise ValueError(
            f"{folder} holds LoRA adapters, but neither adapter_config.json nor lora_train_meta.json, which tell alpha"
        )
    rank, alpha = int(stored.adapter["r"]), float(stored.adapter["lora_alpha"])
    transposed = any(part.is_transposed for part in stacks_of(meta)[0].values())
    return Adapters(names=tuple(modules), targets=(), modules=(), rank=rank, alpha=alpha, transposed=transposed)


def _with_base(stored: _Stored, own: dict[str, Any], choices: Choices) -> StoredWeights:
    """The weights under the adapters: the checkpoint's own, or those of the model that the run began with."""
    if any(name in own for name in stored.weights.names):
        return stored.weights
    base = choices.base or (stored.adapter or {}).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{stored.folder} holds adapters alone, and does not say of which model: give --base MODEL")
    path = local_folder(base)
    try:
        check_location("--base" if choices.base else "base_model_name_or_path", base, "config.json")
        config = AutoConfig.from_pretrained(path, trust_remote_code=choices.trust_remote_code)
        model = model_class(config).from_pretrained(path, dtype="auto", trust_remote_code=choices.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{stored.folder} holds adapters of {base}, which cannot be loaded: {error}. Give --base MODEL"
        ) from error
    heads = {name: stored.weights.read([name])[name] for name in stored.weights.names if not is_adapter(name)}
    base = dict(model.named_parameters()) | dict(saved_buffers(model))
    return LoadedModel(base | heads)  # a value head is trained as a whole


def _require_all(own: dict[str, Any], names: CheckpointNames, kept: Sequence[str], folder: Path) -> None:
    """Raise ValueError unless every weight of the model is there, under the module's name or the files'."""
    there = set(kept)
    value_model = any(name.startswith(("score.", "v_head.", "classifier.")) for name in kept)
    missing = [
        name
        for name, parameter in own.items()
        if name not in there
        and not all(stored in there for stored, _ in names.views(name, parameter))
        and not (value_model and "lm_head" in name)
    ]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} of the model's weights, for instance {missing[0]}")


def _is_tied_copy(name: str, own: dict[str, Any], config: Any) -> bool:
    """True for a head that is the embedding: it is stored once."""
    return bool(config.tie_word_embeddings) and name not in own and name.endswith("lm_head.weight")


def _write_adapter(folder: Path, written: Path) -> list[str]:
    adapter = next((folder / name for name in _ADAPTER_FOLDERS if (folder / name).is_dir()), None)
    if adapter is None:
        raise ValueError(f"{folder} holds no adapter: it was trained with all weights (model.lora_rank=0)")
    for path in adapter.iterdir():
        if not path.name.startswith("."):
            shutil.copy2(path, written / path.name)
    base = read_object(adapter / "adapter_config.json").get("base_model_name_or_path")
    return [f"the adapter alone, for the peft library; its base model: {base}"]


def _copy_beside(folder: Path, written: Path, *, config: bool) -> None:
    """Tokenizer, chat template and, for a whole model, generation settings; a critic has the actor's."""
    left_out = _OF_THE_FOLDER if config else {*_OF_THE_FOLDER, "generation_config.json"}
    for beside in (folder / "huggingface", folder, folder.parent / ACTOR / "huggingface"):
        for path in beside.iterdir() if beside.is_dir() else ():
            wanted = path.is_file() and path.name not in left_out and not path.name.endswith(_WEIGHT_FILES)
            if wanted and not path.name.startswith(".") and not (written / path.name).exists():
                shutil.copy2(path, written / path.name)


def _holds_weights(folder: Path) -> bool:
    return folder.is_dir() and (
        (folder / "model" / ".metadata").exists()
        or VerlFiles.is_in(folder)
        or any((folder / "huggingface").glob("*.safetensors"))
        or (any(folder.glob("*.safetensors")) and (folder / "config.json").exists())
    )
