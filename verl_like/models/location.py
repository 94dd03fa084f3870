"""Whether models and tokenizers are where the configuration says: asked first, before anything heavy is imported."""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path

from verl_like.config import PPOConfig
from verl_like.config.doctor_paths import model_paths
from verl_like.remote import local_folder

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT = 5.0  # seconds
_TOKENIZERS = ("data.tokenizer", "reward_model.model.input_tokenizer")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")  # transformers is content with one


def check_locations(config: PPOConfig) -> None:
    """ValueError, naming the key, for a model or tokenizer that is neither a folder here nor on the hub."""
    for key, path in model_paths(config).items():
        check_location(key, path, *(_TOKENIZER_FILES if key in _TOKENIZERS else ("config.json",)))


def check_location(key: str, path: str, *files: str) -> None:
    """ValueError unless `path` is a folder (with config.json, for a model), or the hub has one of `files` under that
    name."""
    folder = Path(local_folder(path, key))
    if folder.is_dir():
        if files == ("config.json",) and not (folder / "config.json").is_file():
            raise ValueError(f"{key}={path}: the folder has no config.json, so it is no Hugging Face model")
    elif folder.exists():
        raise ValueError(f"{key}={path} is a file; name the model's folder")
    elif _HUB_NAME.fullmatch(path) is None or path.startswith("."):
        raise ValueError(f"{key}={path}: there is no such folder ({folder.absolute()}){_nearest(folder)}")
    else:
        _check_hub(key, path, files)


def _nearest(folder: Path) -> str:
    """A folder beside the missing one with a similar name, for the message; else the first parent that exists."""
    if folder.parent.is_dir():
        near = difflib.get_close_matches(folder.name, [entry.name for entry in folder.parent.iterdir()], n=1)
        return f". Did you mean {folder.parent / near[0]}?" if near else ". Set it to the folder of your model"
    there = next(parent for parent in folder.absolute().parents if parent.is_dir())
    return f"; only {there} exists. Set it to the folder of your model, or to its name on the hub"


def _check_hub(key: str, name: str, files: tuple[str, ...]) -> None:
    """A request for each file until one is found, with a short limit; what is in the local cache needs none."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return
    fix = f"download it where there is a network (hf download {name} --local-dir <folder>) and set {key}=<folder>"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0") in ("1", "true", "True"):
        raise ValueError(
            f"{key}={name} is no folder here and not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE "
            f"is set; {fix}"
        )
    try:
        for file in files:
            with suppress(EntryNotFoundError):
                get_hf_file_metadata(hf_hub_url(name, file), timeout=_HUB_TIMEOUT)
                return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}={name} is no folder here, and the Hugging Face hub has no model of that name (or it needs a login: "
            "hf auth login)"
        ) from error
    except Exception as error:  # the hub's client raises errors of several libraries
        raise ValueError(
            f"{key}={name} is no folder here, and the Hugging Face hub cannot be asked for it "
            f"({type(error).__name__}: {error}); {fix}"
        ) from error
    raise ValueError(f"{key}={name}: {name} on the Hugging Face hub has no {' or '.join(files)}")
