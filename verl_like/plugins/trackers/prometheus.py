"""The newest metrics of a run for Prometheus, as trainer.prometheus_port asks: http://127.0.0.1:<port>/metrics.

A metric `actor/pg_loss` is the gauge verl_like_actor_pg_loss{run_id=..., project=..., experiment=...}; verl_like_step
is the newest step. What the router and the pools of workers (graders, tools, agents, programs) have in hand is read at
each visit (verl_like/live_metrics.py): verl_like_now_router_requests, verl_like_now_pool_reward_calls_waiting.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_like import live_metrics
from verl_like.config import TrainerConfig
from verl_like.observe.samples import Sample

logger = logging.getLogger(__name__)

_VISIT_S, _MOST_VISITS = 10.0, 32


def _served(trainer: TrainerConfig, registry: CollectorRegistry) -> tuple[Any, threading.Thread]:
    port, host = trainer.prometheus_port, trainer.prometheus_host
    assert port is not None
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(
            f"trainer.prometheus_port={port} at trainer.prometheus_host={host}: {error}; choose another port, 0 for "
            "any that is free, or null"
        ) from error
    server.RequestHandlerClass = _bounded(server.RequestHandlerClass)
    return server, thread


def _bounded(handler: type[Any]) -> type[Any]:
    """Limit the connections of a handler, in number and in seconds: an idle one would keep a thread for ever."""
    places = threading.BoundedSemaphore(_MOST_VISITS)

    class Visit(handler):  # type: ignore[misc]
        def handle(self) -> None:
            if not places.acquire(blocking=False):
                return
            end = threading.Timer(_VISIT_S, self.connection.shutdown, (socket.SHUT_RDWR,))
            end.daemon = True
            end.start()
            try:
                super().handle()
            finally:
                end.cancel()
                places.release()

    return Visit


def _stop(server: Any, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


class PrometheusTracker(Collector):
    """A tracker like others. Raises ValueError where the port cannot be had."""

    name = "prometheus"

    def __init__(self, trainer: TrainerConfig, run_id: str) -> None:
        labels = {"run_id": run_id, "project": trainer.project_name, "experiment": trainer.experiment_name}
        self._labels, self._newest, self._lock = labels, dict[str, float](), threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = _served(trainer, registry)
        self.address = f"http://{trainer.prometheus_host}:{self._server.server_port}/metrics"
        logger.info("metrics for Prometheus: %s", self.address)

    @staticmethod
    def require_port(trainer: TrainerConfig) -> None:
        """Raise ValueError where trainer.prometheus_port is taken; for a run whose processes are yet to start.

        The port is not kept.
        """
        _stop(*_served(trainer, CollectorRegistry()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:  # a validation keeps the values of the step before it
            self._newest |= {**metrics, "step": float(step)}

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Ignore the responses: Prometheus has no place for them."""

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            newest = dict(self._newest)
        newest |= {f"now/{name}": value for name, value in live_metrics.readings().items()}
        for name, value in newest.items():
            gauge = GaugeMetricFamily(f"verl_like_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", name, labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], value)
            yield gauge

    def finish(self) -> None:
        _stop(self._server, self._thread)
