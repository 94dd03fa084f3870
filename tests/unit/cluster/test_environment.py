"""Variables of a rank, its share of cores, its port."""

from __future__ import annotations

import os
import socket

from verl_like.cluster.environment import free_port, omp_threads, patched_environment, process_environment
from verl_like.cluster.ray_group import forwarded_environment
from verl_like.cluster.worker_group import RankEnv


def _rank(**changes: object) -> RankEnv:
    fields: dict = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 1,
        "master_address": "10.0.0.1",
        "master_port": 23456,
        "run_id": "vl12345678",
        "device": "cuda",
    }
    return RankEnv(**{**fields, **changes})


def test_variables_of_a_rank() -> None:
    variables = process_environment(_rank(), cuda_devices=("4", "6"))
    assert {k: variables[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "23456",
    }
    assert variables["CUDA_VISIBLE_DEVICES"].split(",")[int(variables["LOCAL_RANK"])] == "6"
    assert "GLOO_SOCKET_IFNAME" not in variables  # between machines gloo must find the real interface


def test_one_machine_talks_over_loopback() -> None:
    assert process_environment(_rank(master_address="127.0.0.1"))["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_cores_are_shared_and_never_zero() -> None:
    cores = len(os.sched_getaffinity(0))
    assert omp_threads(1, "cpu") == cores
    assert omp_threads(cores * 3, "cpu") == 1
    assert omp_threads(1, "cuda") == min(cores, 16)


def test_free_port_can_be_bound_and_is_not_ephemeral() -> None:
    port = free_port("127.0.0.1")
    assert 20_000 <= port <= 32_000
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_environment_is_put_back() -> None:
    os.environ["VL_TEST_OLD"] = "old"
    with patched_environment({"VL_TEST_OLD": "new", "VL_TEST_NEW": "1"}):
        assert (os.environ["VL_TEST_OLD"], os.environ["VL_TEST_NEW"]) == ("new", "1")
    assert os.environ.pop("VL_TEST_OLD") == "old"
    assert "VL_TEST_NEW" not in os.environ


def test_what_remote_ranks_get_from_the_driver() -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HOME": "/x",
        "RANK": "7",
    }
    assert forwarded_environment(variables) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
