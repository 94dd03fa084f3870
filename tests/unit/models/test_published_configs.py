"""Published configs: each is taken, and its weights counted to the last digit on the meta device."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from verl_like.config import ModelConfig
from verl_like.models import loading


def counts(folder: Path) -> dict[str, list[int]]:
    """By file: the parameters as transformers alone counts them, and further figures of the same cell."""
    found = {}
    for line in (folder / "SOURCE.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5 and cells[4][:1].isdigit():
            figures = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]{5,}", cells[4])]
            found[cells[1].replace("/", "__")] = figures
    return found


def test_every_config_is_taken_and_its_weights_are_counted(shared_data: Path, tmp_path: Path) -> None:
    """Those with quantised weights too, whose folders hold none here; a router's bias counts where it is a weight."""
    folder, wrong = shared_data / "model_configs", dict[str, str]()
    known = counts(folder)
    files = sorted(folder.glob("*.json"))
    assert {file.stem for file in files} == known.keys() and len(files) >= 29
    for file in files:
        place = tmp_path / file.stem
        place.mkdir()
        shutil.copy(file, place / "config.json")
        model = ModelConfig(path=str(place))
        hf = loading.build_meta_model(model, loading.load_hf_config(model), kind="policy").hf
        count = sum(weight.numel() for weight in hf.parameters())
        if count not in (known[file.stem][0], known[file.stem][-1]):
            wrong[file.stem] = f"{count:,}"
    assert not wrong, wrong


def test_weights_in_fp8_need_accelerate(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(shared_data / "model_configs" / "MiniMaxAI__MiniMax-M2.5.json", tmp_path / "config.json")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    loading.load_hf_config(ModelConfig(path=str(tmp_path)))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="in fp8 transformers wants accelerate: install it"):
        loading.load_hf_config(ModelConfig(path=str(tmp_path)))
