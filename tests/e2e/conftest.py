from __future__ import annotations

import string
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script
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
