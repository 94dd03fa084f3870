"""The LoRA adapter that a run begins with (model.lora_adapter_path), as the peft library wrote it: its settings, read
before torch is imported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from verl_like.config.errors import ConfigError
from verl_like.models.location import nearest
from verl_like.remote import local_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Entries that may say something: how it was made, or what is read here. Any other is a form of LoRA that is not built.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "lora_dropout"}
_ABOUT = {"task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"}
_UNUSED = {"megatron_core", "qalora_group_size", "runtime_config", "eva_config"}  # sizes and ways of others' own
_HARMLESS = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # the others change the base weights too
    "modules_to_save": (["score"], ["classifier", "score"]),  # the head, which a value model has
}


def adapter_settings(path: str, key: str, *, of_value_model: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the keys of `model.*` that the adapter sets, its whole configuration). ConfigError for a folder without one, and
    for a form of it that is more than W + s B A."""
    folder = Path(local_folder(path, key))
    wanted = "name the folder of a LoRA adapter of the peft library (`verl-like export --lora apart` writes one)"
    missing = next((name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()), None)
    if missing is not None:
        where = nearest(folder) if not folder.is_dir() else ""
        raise ConfigError([f"{key}={path}: there is no file {(folder / missing).absolute()}{where}; {wanted}"])
    try:
        saved = json.loads((folder / CONFIG).read_text())
        rank, alpha, targets = int(saved["r"]), float(saved["lora_alpha"]), saved["target_modules"]
        if saved["peft_type"] != "LORA" or rank < 1 or alpha <= 0 or not isinstance(targets, str | list):
            raise ValueError(f"peft_type={saved['peft_type']}, r={rank}, lora_alpha={alpha}, target_modules={targets}")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError([f"{key}={path}: {CONFIG} describes no LoRA adapter ({error!r}); {wanted}"]) from error
    plain = _READ | _ABOUT | _UNUSED | {name for name, rest in _HARMLESS.items() if saved.get(name) in rest}
    more = [f"{name}={value}" for name, value in saved.items() if value and name not in plain]
    if saved.get("modules_to_save") and not of_value_model:
        more.append(f"modules_to_save={saved['modules_to_save']}")
    if more:
        raise ConfigError(
            [f"{key}={path}: its {', '.join(more)} is not available, only W + s B A on linear layers is: merge it into "
             "the model with peft (merge_and_unload), and name that as the model"]
        )  # fmt: skip
    settings = {"lora_rank": rank, "lora_alpha": alpha * (math.sqrt(rank) if saved.get("use_rslora") else 1)}
    return settings | {"target_modules": targets, "exclude_modules": saved.get("exclude_modules") or None}, saved
