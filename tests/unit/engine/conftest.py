"""What tests of the training engine share."""

from __future__ import annotations

import pytest

from tests.unit.engine import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a tiny Qwen2."""
    return tiny.model_folder(tmp_path_factory.mktemp("model"))
