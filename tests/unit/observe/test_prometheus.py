"""Metrics over HTTP, as Prometheus's own parser reads them."""

from __future__ import annotations

import math
import socket
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.listeners import listening
from verl_like import live_metrics
from verl_like.config import TrainerConfig
from verl_like.observe.trackers import build_trackers, check_trackers
from verl_like.plugins.trackers.prometheus import PrometheusTracker


class Pool:
    def gauges(self) -> dict[str, float]:
        return {"pool/agent program/calls_waiting": 3.0}


def test_the_newest_values_are_served_on_this_machine_alone(tmp_path: Path) -> None:
    import os

    before = listening({os.getpid()})
    trainer = TrainerConfig(logger=[], prometheus_port=0, experiment_name='a "b"')
    trackers = build_trackers(trainer, {}, tmp_path, resumed_at=None, run_id="run-1")
    (prometheus,) = (each for each in trackers._trackers if isinstance(each, PrometheusTracker))
    try:
        assert {address for address, _ in listening({os.getpid()}) - before} == {"127.0.0.1"}
        trackers.log(1, {"actor/pg_loss": 0.5, "val-core/x/acc/mean@1": 0.25})
        trackers.log(2, {"actor/pg_loss": math.nan})
        pools = [Pool(), Pool()]
        for pool in pools:
            live_metrics.show(pool)
        with urllib.request.urlopen(prometheus.address) as answer:
            families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
        (loss,) = families["verl_like_actor_pg_loss"].samples
        assert math.isnan(loss.value) and loss.labels["run_id"] == "run-1" and loss.labels["experiment"] == 'a "b"'
        assert families["verl_like_step"].samples[0].value == 2
        assert families["verl_like_val_core_x_acc_mean_1"].samples[0].value == 0.25
        (waiting,) = families["verl_like_now_pool_agent_program_calls_waiting"].samples
        assert waiting.value == 6, "of both"
        live_metrics.hide(pools.pop())
        with urllib.request.urlopen(prometheus.address) as answer:
            assert "calls_waiting{" in (text := answer.read().decode()) and " 3.0" in text
        taken = TrainerConfig(prometheus_port=int(prometheus.address.split(":")[2].split("/")[0]))
        with pytest.raises(ValueError, match=r"trainer.prometheus_port=\d+ at .*choose another port"):
            check_trackers(taken)  # before the run's processes start
    finally:
        trackers.finish()
    with pytest.raises(OSError):
        urllib.request.urlopen(prometheus.address, timeout=5)


def test_who_says_nothing_is_cut_and_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_like.plugins.trackers.prometheus._VISIT_S", 0.4)
    monkeypatch.setattr("verl_like.plugins.trackers.prometheus._MOST_VISITS", 4)
    tracker = PrometheusTracker(TrainerConfig(logger=[], prometheus_port=0), "run-1")
    try:
        port = int(tracker.address.split(":")[2].partition("/")[0])
        silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(12)]
        silent[0].sendall(b"GET /met")
        began = time.monotonic()
        for each in silent:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
            each.close()
        assert time.monotonic() - began < 5
        with urllib.request.urlopen(tracker.address, timeout=10) as answer:
            assert answer.status == 200
    finally:
        tracker.finish()
