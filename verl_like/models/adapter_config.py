"""Configuration of the LoRA adapter that a run begins with (model.lora_adapter_path), as the peft library wrote it.

It is read before torch is imported.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from verl_like.config.errors import ConfigError
from verl_like.models.location import nearest
from verl_like.remote_storage import local_folder
from verl_like.small_files import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What may be said of plain LoRA, W + s B A: any other entry that is set is of a form that is not built.
_PLAIN = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "lora_dropout"),
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"),
    *("target_parameters", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
)
_PLAIN_AT = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # the others change the base weights too
}
_FORM = {"peft_type": str, "r": int, "lora_alpha": (int, float), "target_modules": (str, list)}
_PARAMETERS = "target_parameters"  # experts and routers, in transformers' own names
_MOST_RANK = 1 << 20  # wider than any layer
_HEAD = (["score"], ["classifier", "score"])  # modules_to_save of a value model


def adapter_settings(path: str, key: str, *, of_value_model: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the adapter's configuration: (the keys of `model.*` that it sets, the whole of it).

    Raises ConfigError for a folder without an adapter, and for a form of adapter that is not built.
    """
    wanted = "name the folder of a LoRA adapter of the peft library"
    try:
        folder = Path(local_folder(path, key))
    except ValueError as error:
        raise ConfigError([f"{error}; {wanted}"]) from error
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            where = "" if folder.is_dir() else nearest(folder)
            raise ConfigError([f"{key}={path}: there is no file {(folder / name).absolute()}{where}; {wanted}"])
    try:
        saved = read_object(folder / CONFIG, _FORM, strict=True)
        rank, alpha, targets = saved["r"], saved["lora_alpha"], _targets(saved)
        if saved["peft_type"] != "LORA" or not 1 <= rank <= _MOST_RANK or not 0 < alpha < 1e30 or not targets:
            raise ValueError(f"peft_type={saved['peft_type']}, r={rank}, lora_alpha={alpha}, target_modules={targets}")
    except ValueError as error:
        raise ConfigError([f"{key}={path}: {CONFIG} describes no LoRA adapter ({error}); {wanted}"]) from error
    fits = _PLAIN_AT | {"modules_to_save": _HEAD if of_value_model else ()}
    more = [f"{n}={value}" for n, value in saved.items() if value and n not in _PLAIN and value not in fits.get(n, ())]
    if more:
        fix = "merge it into the model with peft (merge_and_unload), and name that as the model"
        raise ConfigError([f"{key}={path}: its {', '.join(more)} is not available, plain LoRA alone is: {fix}"])
    alpha = alpha * (math.sqrt(rank) if saved.get("use_rslora") else 1.0)
    settings = {"lora_rank": rank, "lora_alpha": alpha, "target_modules": targets}
    return settings | {"exclude_modules": saved.get("exclude_modules") or None}, saved


def _targets(saved: dict[str, Any]) -> Any:
    """Names of the modules that have adapters, and of the parameters that stand for a module here."""
    modules, parameters = saved["target_modules"], saved.get(_PARAMETERS)
    if not parameters:
        return modules
    if not isinstance(parameters, list) or not (isinstance(modules, list) or not modules):
        raise ValueError(f"{_PARAMETERS}={parameters} beside target_modules={modules}: give lists of names")
    return [*(modules or ()), *(str(name).removesuffix(".weight") for name in parameters)]
