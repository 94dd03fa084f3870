"""Tensors as numpy buffers and back."""

from __future__ import annotations

import pytest
import torch

from verl_like.cluster.transport import pack_tensor, unpack_tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_bits_dtype_and_shape_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.rand(shape) * 4 - 2).to(dtype)
    array, name = pack_tensor(sent)
    array.flags.writeable = False  # as from Ray's store
    arrived = unpack_tensor((array, name))
    assert arrived.dtype == dtype and arrived.shape == sent.shape
    assert torch.equal(arrived.float(), sent.float())
    arrived.zero_()


def test_views_and_gradients() -> None:
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    arrived = unpack_tensor(pack_tensor(base.T[1:]))
    assert torch.equal(arrived, base.detach().T[1:])
    assert not arrived.requires_grad
