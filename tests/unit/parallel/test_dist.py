from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.listeners import listening
from verl_like.cluster.environment import free_port
from verl_like.parallel.dist import init_distributed, shutdown_distributed


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
    info = init_distributed(5, 8, 1, 4, "192.0.2.1", 29_500, "cuda")
    assert info.device == torch.device("cuda", 1)
    assert calls[0] == info.device
    assert calls[1]["backend"] == "cpu:gloo,cuda:nccl"
    assert "device_id" not in calls[1]


def test_the_ranks_of_one_machine_meet_where_no_other_machine_can() -> None:
    before, port = listening({os.getpid()}), free_port("127.0.0.1")
    init_distributed(0, 1, 0, 1, "127.0.0.1", port, "cpu")
    try:
        opened = listening({os.getpid()}) - before
        assert ("127.0.0.1", port) in opened and all(address.startswith("127.") for address, _ in opened)
    finally:
        shutdown_distributed()
