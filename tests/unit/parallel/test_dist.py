from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from verl_like.parallel.dist import init_distributed


def test_cuda_ranks_choose_their_device_before_nccl_and_leave_the_group_unbound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group bound to a device hangs when gloo subgroups are made (an ncclCommSplit that only non-members join)."""
    calls: list[Any] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda **kwargs: calls.append(kwargs))
    info = init_distributed(5, 8, 1, 4, "127.0.0.1", 29_500, "cuda")
    assert info.device == torch.device("cuda", 1)
    assert calls[0] == info.device
    assert calls[1]["backend"] == "cpu:gloo,cuda:nccl"
    assert "device_id" not in calls[1]
