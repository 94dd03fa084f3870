"""Where a Ray is looked for that is not there, or not there yet."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import ray

from verl_like.cluster import launch
from verl_like.config.errors import ConfigError


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_an_address_where_nothing_listens_is_refused_at_once(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"ray_init.address=127.0.0.1:{closed_port}: no Ray answers .*ray start"):
        launch.connect(address=f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(ConfigError, match=r"ray_init.address=auto: no Ray answers at"):
        launch.connect(address="auto")
    with pytest.raises(ConfigError, match=r"ray_init.address=nonsense: "):
        launch.connect(address="nonsense")
    assert not ray.is_initialized()


def test_daemons_that_take_long_to_find_each_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    services = ray._private.services  # type: ignore[attr-defined]
    asked: list[str] = []

    def late(address: str) -> str:
        asked.append(address)
        if len(asked) < 3:
            raise RuntimeError("no such node")
        return "node"

    monkeypatch.setattr(services, "get_node", late)
    with launch._patience():
        assert services.get_node("here") == "node" and asked == ["here"] * 3
    assert services.get_node is late

    def never(address: str) -> str:
        raise RuntimeError("no such node")

    monkeypatch.setattr(services, "get_node", never)
    monkeypatch.setattr(launch, "_START_S", 0.0)
    with launch._patience(), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("here")
