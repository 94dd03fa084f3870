"""Check, before anything heavy is imported, that models, tokenizers and data are where the configuration says."""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path

from verl_like.config import DataConfig, ModelConfig, PPOConfig
from verl_like.config.errors import raise_if_any
from verl_like.config.paths import data_paths, model_paths
from verl_like.remote_storage import is_remote, local_folder

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT = 5.0  # seconds
_EXAMPLE = " (its default is an example, which is not on this machine)"
_TOKENIZERS = ("data.tokenizer", "reward_model.model.input_tokenizer")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")  # transformers is content with one
# In a run's folder, one of its checkpoints, or a role's folder in that
_EXPORTS = ("global_step_*/actor/huggingface", "actor/huggingface", "huggingface")


def missing_places(config: PPOConfig, *data_keys: str) -> dict[tuple[str, str], str]:
    """Find models, tokenizers and data files that are not where the configuration says: problems by (key, path).

    Models and tokenizers must be folders here or on the hub. data_keys: keys of the data files to look for.
    """
    found = {
        (key, path): location_problem(key, path, *(TOKENIZER_FILES if key in _TOKENIZERS else ("config.json",)))
        for key, path in model_paths(config).items()
    }
    found |= {(key, path): file_problem(key, path) for key, path in data_paths(config) if key in data_keys}
    return {place: problem for place, problem in found.items() if problem is not None}


def check_location(key: str, path: str, *files: str) -> None:
    """Raise ConfigError for the problem that `location_problem` finds."""
    problem = location_problem(key, path, *files)
    raise_if_any([] if problem is None else [problem])


def check_model(path: str) -> None:
    """Check a verb's MODEL: a folder (a model's, a checkpoint or a run's) or a name on the hub.

    Raises ConfigError otherwise.
    """
    if not Path(path).expanduser().is_dir():
        check_location("MODEL", path, "config.json")


def file_problem(key: str, path: str) -> str | None:
    """Say why a data file cannot be opened, as far as looking tells.

    None for one that is there, or on remote storage.
    """
    file = Path(path.removeprefix("file://")).expanduser().absolute()
    if (is_remote(path) and not path.startswith("file://")) or file.is_file():
        return None
    if not path.strip():
        return f"{key}= is empty (a shell variable that is not set?): name a file"
    if file.exists():
        return f"{key}: {file} is {'a folder; name the file in it' if file.is_dir() else 'no file of data; name one'}"
    if path in (*DataConfig().train_files, *DataConfig().val_files):
        none = ", or set it to null for a run without validation" if key == "data.val_files" else ""
        return f"{key} is not set{_EXAMPLE}: name your file{none}; `verl-like data list` shows what can be prepared"
    return f"{key}: there is no file {file}{nearest(Path(path.removeprefix('file://')))}"


def location_problem(key: str, path: str, *files: str) -> str | None:
    """Say why `path` is no model or tokenizer; None where it is one.

    It must be a folder (with config.json, for a model), or a name under which the hub has one of `files`.
    """
    if path.startswith(("http://", "https://")):
        return f"{key}={path}: a web page is no model; give its name on the hub, as Qwen/Qwen2.5-0.5B, or a folder"
    try:
        folder = Path(local_folder(path, key))
    except ValueError as error:
        return f"{error}; check the address, or copy the model to a folder and name that"
    if folder.is_dir():
        if files != ("config.json",) or (folder / "config.json").is_file():
            return None
        exported = [found.parent for place in _EXPORTS for found in folder.glob(f"{place}/config.json")]
        newest = max(exported, key=lambda each: (len(str(each)), str(each)), default=None)
        hint = "" if newest is None else f"; a run saved its model there for others as {newest}: name that"
        return f"{key}={path}: the folder has no config.json, so it is no Hugging Face model{hint}"
    if path == ModelConfig().path:
        return f"{key} is not set{_EXAMPLE}: name the folder of your model, or its name on the hub"
    if folder.exists():
        return f"{key}={path} is a file; name the model's folder"
    if _HUB_NAME.fullmatch(path) is None or path.startswith("."):
        fix = "set it to the folder of your model, or to its name on the hub"
        return f"{key}={path}: there is no such folder ({folder.absolute()}){nearest(folder)}; {fix}"
    missing = _missing_on_hub(path, files)
    return missing and f"{key}={path}: there is no folder {folder.absolute()}{nearest(folder)}; {missing}"


def nearest(path: Path) -> str:
    """Name a similar file or folder beside the missing one, for the message; else the first parent that exists.

    The text says, too, that a relative path counts from the current folder.
    """
    path = path.expanduser()
    relative = "" if path.is_absolute() else " (a relative path counts from the current folder)"
    if path.parent.is_dir():
        names = [entry.name for entry in path.parent.iterdir() if entry != path]
        near = difflib.get_close_matches(path.name, names, n=1)
        return f"{relative}; did you mean {path.parent / near[0]}?" if near else relative
    there = next(parent for parent in path.absolute().parents if parent.is_dir())
    return f"{relative}; only {there} exists"


def _missing_on_hub(name: str, files: tuple[str, ...]) -> str | None:
    """Say why the hub has no such model; None where it has one of `files`.

    Sends a request for each file until one is found, with a short limit; a file in the local cache needs none.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return None
    fix = f"download it where there is a network (hf download {name} --local-dir FOLDER) and name that folder"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0") in ("1", "true", "True"):
        return f"nor is it in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set: {fix}"
    try:
        for file in files:
            with suppress(EntryNotFoundError):
                get_hf_file_metadata(hf_hub_url(name, file), timeout=_HUB_TIMEOUT)
                return None
    except RepositoryNotFoundError:
        return "and the Hugging Face hub has no model of that name (or it needs a login: hf auth login)"
    except Exception as error:  # the hub's client raises errors of several libraries
        return f"and the Hugging Face hub cannot be asked for it ({type(error).__name__}: {error}): {fix}"
    return f"and {name} on the Hugging Face hub has no {' or '.join(files)}"


def weight_bytes(model: str | None) -> int | None:
    """Add up the weight files of a local folder; None where there are none here."""
    return sum(file.stat().st_size for file in Path(model or "").expanduser().glob("*.safetensors")) or None
