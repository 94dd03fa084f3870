"""The twin's command, run for lists of cases; each list is one process that imports torch behind the native library.

The GPU twin is what of the CUDA code can be shown on a machine without a card. stand_in.py: what Python asks of
torch.cuda, answered by a record of streams, events and memory. native.cpp, native.py: what torch's C++ asks of CUDA,
in torch's CPU build and in its CUDA build. mode.py: fake tensors, and counts of what the device would do. world.py:
ranks that are fake, or a few that agree for real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.twin import native

ROOT = Path(__file__).resolve().parents[2]
Outcomes = dict[str, dict[str, Any]]


@pytest.fixture
def on_twin(tmp_path: Path, shared_data: Path) -> Callable[[list[dict[str, Any]]], Outcomes]:
    """Run cases; what came of each by its name. Skipped with a word where the native library cannot be built."""
    if lacking := native.missing():
        pytest.skip(f"the twin needs {lacking}")

    def run(cases: list[dict[str, Any]]) -> Outcomes:
        file = tmp_path / "cases.json"
        file.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "tests.twin.run", str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {each["name"]: each for each in outcomes}

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The config of a model that is small enough for real weights on the first rank."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 1024, "intermediate_size": 96, "max_position_embeddings": 4096, "bos_token_id": 0}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config | sizes | {"eos_token_id": 1}))
    return str(path)
