"""The data sets that `verl-like data prepare` makes: which script, and where its raw files come from."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_like.data.rows import READERS, file_format


@dataclass(frozen=True, slots=True)
class Recipe:
    """Data set that `verl-like data prepare` makes.

    hub: the data set on the Hugging Face hub with its raw files, all below `folder` there; None: it is generated, or
        its files must be given (`needs`).
    one_file: the script reads a file, not a folder of splits.
    """

    name: str
    module: str
    what: str
    hub: str | None = None
    folder: str = ""
    one_file: bool = False
    needs: str = ""
    options: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Name the source of its rows, for people."""
        return f"hub: {self.hub}" if self.hub else f"--source: {self.needs}" if self.needs else "generated"


RECIPES = (
    Recipe("gsm8k", "gsm8k", "school mathematics in words", "openai/gsm8k", folder="main"),
    Recipe(
        "gsm8k_tool", "gsm8k_multiturn_w_tool", "the same, with a tool in several turns", "openai/gsm8k", folder="main"
    ),
    Recipe("math", "math_dataset", "competition mathematics", "DigitalLearningGmbH/MATH-lighteval"),
    Recipe("geometry3k", "geometry3k", "geometry problems with pictures", "hiyouga/geometry3k", folder="data"),
    Recipe(
        *("aime2024", "aime", "30 hard problems, for validation", "HuggingFaceH4/aime_2024"),
        one_file=True,
        options=("--data_source", "aime2024"),
    ),
    Recipe(
        *("humaneval", "humaneval", "Python functions with tests, for validation", "openai/openai_humaneval"),
        one_file=True,
    ),
    Recipe("hh_rlhf", "full_hh_rlhf", "preference pairs", "Dahoas/full-hh-rlhf"),
    Recipe("arithmetic", "arithmetic", "additions such as 37+58="),
    Recipe("countdown", "countdown", "reach a number with given ones"),
    Recipe("knights_and_knaves", "knights_and_knaves", "who tells the truth?"),
    Recipe("code_contests", "code_contests", "programming problems with tests", needs="a file of problems with tests"),
    Recipe("tool_calls", "tool_calls", "conversations with tool calls", needs="a file in ShareGPT's form"),
)


def prepare(recipe: Recipe, out: Path, source: Path | None, options: Sequence[str] = ()) -> list[Path]:
    """Write the parquet files of a data set below `out`, and return which they are.

    Raises ValueError for files that do not fit and for a hub that cannot be reached, SystemExit for unknown options.

    source: the data set's raw files; None: download them.
    """
    if source is None and recipe.needs:
        raise ValueError(f"{recipe.name} needs its raw files: give --source, {recipe.needs}")
    if source is None and recipe.hub:
        source = download(recipe)
    arguments = ["--local_save_dir", str(out), *recipe.options, *options]
    if source is not None:
        arguments += ["--local_dataset_path", str(source)]
    importlib.import_module(f"verl_like.kit.datasets.{recipe.module}").main(arguments)
    return sorted(out.expanduser().rglob("*.parquet"))


def download(recipe: Recipe) -> Path:
    """The data set's files from the hub's cache, or fetched into it with the hub library's own progress bars."""
    from huggingface_hub import snapshot_download

    assert recipe.hub is not None
    below = f"{recipe.folder}/" if recipe.folder else ""
    patterns = [f"{below}*{ending}" for ending in (".parquet", ".jsonl", ".jsonl.gz", ".json")]
    try:
        root = Path(snapshot_download(recipe.hub, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # of the network, the hub or the cache: many kinds, one remedy
        reason = str(error).splitlines()[0].rstrip(".")
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise ValueError(
            f"{recipe.hub} cannot be downloaded{offline}: {reason}. Set HF_ENDPOINT to a mirror or HTTPS_PROXY, or get "
            f"its files in another way and give them with --source"
        ) from error
    found = sorted(path for path in root.rglob("*") if path.is_file() and file_format(path) in READERS)
    folders = {path.parent for path in found}
    if len(folders) != 1 or (recipe.one_file and len(found) != 1):
        names = ", ".join(str(path.relative_to(root)) for path in found[:8]) or "nothing"
        raise ValueError(f"{recipe.hub} holds other files than expected ({names}): choose some, and give --source")
    return found[0] if recipe.one_file else folders.pop()
