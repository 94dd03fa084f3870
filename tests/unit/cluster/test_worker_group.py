"""Import paths, argument checks, output redirection, order of nodes, joining rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.cluster.launch import connect
from verl_like.cluster.rank_process import read_tail
from verl_like.cluster.resources import _address_key
from verl_like.cluster.worker_group import check_per_rank, resolve_import_path


def test_import_path() -> None:
    assert resolve_import_path("collections:OrderedDict").__name__ == "OrderedDict"
    with pytest.raises(ValueError, match=r"'package\.module:Class'"):
        resolve_import_path("collections.OrderedDict")
    with pytest.raises(ValueError, match="has no 'Nope'"):
        resolve_import_path("collections:Nope")


def test_arguments_per_rank() -> None:
    check_per_rank([(1,), (2,)], 2, "step")
    with pytest.raises(ValueError, match="step: got arguments for 1 ranks, but the group has 2"):
        check_per_rank([(1,)], 2, "step")
    with pytest.raises(ValueError, match="rank 1 must be a tuple, not int"):
        check_per_rank([(1,), 2], 2, "step")  # type: ignore[list-item]


def test_nodes_are_ordered_by_number_not_by_text() -> None:
    addresses = ["10.0.0.10", "host-b", "10.0.0.9", "192.168.0.1", "fe80::1"]
    assert sorted(addresses, key=_address_key) == ["10.0.0.9", "10.0.0.10", "192.168.0.1", "fe80::1", "host-b"]


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n".join(f"line {i}" for i in range(5000)))
    assert read_tail(str(log), 2) == "line 4998\nline 4999"
    assert read_tail(str(tmp_path / "none.log")) == ""
    log.write_text("of an earlier run\n=== rank 0 of 2, run vl12345678\nnow\n")
    assert read_tail(str(log)) == "=== rank 0 of 2, run vl12345678\nnow"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://head:10001"}, "Ray Client addresses are not supported"),
        ({"address": "auto", "num_cpus": 4}, "ray_init.num_cpus=4 has no effect"),
        ({"address": "10.0.0.1:6379", "temp_dir": "/x"}, "ray_init.temp_dir=/x has no effect"),
    ],
)
def test_settings_that_cannot_hold_when_joining(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(**settings)


def test_local_launcher_and_worker_side_need_neither_ray_nor_torch() -> None:
    code = (
        "import sys; import verl_like.cluster.local, verl_like.cluster.rank_process, verl_like.cluster.lifecycle; "
        "sys.exit(any(name in sys.modules for name in ('ray', 'torch', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
