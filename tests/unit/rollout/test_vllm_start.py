"""What stands in the way of vLLM's start in a process that others have used."""

from __future__ import annotations

import importlib

import pytest

from verl_like.plugins.vllm import compat


@pytest.mark.engines
def test_kernels_are_found_where_numba_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    pytest.importorskip("llvmlite.binding")
    monkeypatch.delattr(dispatcher, "vars", raising=False)
    lib = importlib.import_module("llvmlite.binding.ffi").lib
    assert not isinstance(vars(lib), dict)  # what it falls over
    compat._look_at_dictionaries_alone()
    dispatcher._rebind_kernels([])
    assert dispatcher.vars(compat)["start"] is compat.start and not dispatcher.vars(lib)
