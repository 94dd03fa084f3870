"""Guesses ahead on CUDA, in float32: tokens are those of no guesses, whatever is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.drafts import test_engine as drafts
from verl_like.parallel.dist import shutdown_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[drafts.Make]:
    """Maker of engines on the device."""
    with drafts.engines_on("cuda", Path(tmp_path_factory.mktemp("model"))) as build:
        yield build
    shutdown_distributed()


@pytest.mark.parametrize("name", drafts.SAMPLING)
def test_tokens_are_those_of_no_guesses(make: drafts.Make, name: str) -> None:
    drafts.test_tokens_are_those_of_no_guesses(make, name)


def test_columns_of_wrong_guesses_are_given_back(make: drafts.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.test_columns_of_wrong_guesses_are_given_back(make, monkeypatch)
