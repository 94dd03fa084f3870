from __future__ import annotations

import os
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script
from tests.worlds.packages import PEFT, TINKER_CLIENT, fetch
from verl_like.data.templates import TEMPLATES

sys.path.insert(0, str(Path(__file__).parent))  # support.py
MARKS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for each character, and a template that ends turns."""
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
    tokenizer = recipe.build_tokenizer(string.printable)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATES["chatml"]
    folder = tmp_path_factory.mktemp("chat_model")
    recipe.save_checkpoint(folder, recipe.build_model(tokenizer, hidden_size=64, num_layers=2), tokenizer)
    return folder


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The client's packages, at the end of the path: in TINKER_PACKAGES, or fetched."""
    folder = Path(os.environ.get("TINKER_PACKAGES") or tmp_path_factory.mktemp("packages"))
    if not (folder / "tinker").is_dir():
        fetch(folder, [*TINKER_CLIENT, *PEFT])
    sys.path.append(str(folder))
    os.environ["TINKER_API_KEY"], os.environ["TINKER_TELEMETRY"] = "tml-a-key-of-a-test", "0"
    yield folder
    sys.path.remove(str(folder))
