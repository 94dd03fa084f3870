"""What a run of benchmarks/faults.py talks to, in processes that the fault may happen to: a judge, S3, a service of
metrics, a Ray cluster of three nodes; and a clock that can be moved."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from tests.unit.engine.tiny import free_port

_STORE_BYTES = 100 * 1024**2  # of one of Ray's nodes
SERVICE = """
import json, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mode = pathlib.Path(sys.argv[2]).read_text() if pathlib.Path(sys.argv[2]).exists() else ""
        time.sleep(2 if mode == "slow" else 0)
        score = f"Score: {asked['messages'][-1]['content'].count('7') % 10}" if "messages" in asked else ""
        message = {"content": "I would rather not say." if mode == "wrong" else score}
        body = json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
"""
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *shift;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    int file = open(getenv("CLOCK_SHIFT"), O_RDONLY);
    void *place = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    shift = place == MAP_FAILED ? 0 : place;
    real = dlsym(RTLD_NEXT, "clock_gettime");
}
int clock_gettime(clockid_t id, struct timespec *t) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int found = real(id, t);
    if (shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += *shift;
    return found;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return t ? (*t = now.tv_sec) : now.tv_sec;
}
"""


def movable_clock(folder: Path) -> dict[str, str]:
    """Variables with which a process and all below it read the time of day with the seconds added that stand, as a C
    long, in folder/clock."""
    (folder / "clock").write_bytes(bytes(8))
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, folder / "clock.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(folder / "clock")}


class Server:
    """The judge, S3, a service that takes metrics, or a Ray of three nodes, for the faults that happen to it; nothing
    for all others. settings: keys of the run that uses it. variables: which Ray's nodes hand to their workers, as a
    Ray of the run's own hands on the driver's."""

    def __init__(self, whom: str, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.whom, self.folder, self.port, self._variables = whom, folder, free_port(), dict(variables or {})
        self.settings: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._cluster: Cluster | None = None
        self._command = [sys.executable, "-c", SERVICE, str(self.port), str(folder / "mode")]
        url = f"http://127.0.0.1:{self.port}"
        if whom == "judge":
            self.settings = {"reward_model.judge.url": f"{url}/v1", "reward_model.judge.timeout": 3}
            self.settings |= {"reward_model.judge.max_retries": 1, "custom_reward_function.path": None}
        elif whom == "tracker":
            self.settings = {"trainer.logger": f"[console,{Path(__file__).with_name('fault_plant.py')}:Posts]"}
            os.environ["POSTS_TO"] = url
        elif whom == "storage":
            self.settings = {"trainer.default_hdfs_dir": "s3://bucket/run"}
            self._command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
            os.environ |= {"AWS_ENDPOINT_URL": url}
        elif whom == "node":
            self.settings = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1, "ray_init.address": "auto"}

    def __enter__(self) -> Server:
        if self.whom == "node":
            self._start_ray()
        elif self.settings:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._cluster is not None:
            self._cluster.shutdown()
            shutil.rmtree(os.environ.pop("RAY_TMPDIR"), ignore_errors=True)
            del os.environ["RAY_AUTH_MODE"]
            self._cluster = None

    def again(self) -> None:
        """It runs, and well, whatever became of it."""
        self.__exit__()
        self._variables.clear()
        (self.folder / "mode").unlink(missing_ok=True)
        self.__enter__()

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        (self.folder / "server").write_text(str(self._process.pid))
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            time.sleep(0.1)
        if self.whom == "storage":
            address = f"http://127.0.0.1:{self.port}/bucket"
            urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()

    def _start_ray(self) -> None:
        os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp")  # short, for Ray's sockets
        (Path(os.environ["RAY_TMPDIR"]) / "ray").mkdir()  # where Cluster writes its address, for `auto`
        os.environ["RAY_AUTH_MODE"] = (
            "disabled"  # else `auto` takes this user's token, which Cluster's daemons have not
        )
        os.environ |= self._variables
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        cluster = self._cluster = Cluster(initialize_head=True, head_node_args=head)  # has no rank
        for _ in range(2):
            self.one_joins()
        cluster.wait_for_nodes(60)
        for name in self._variables:
            del os.environ[name]

    def one_joins(self) -> None:
        """A further node of the cluster, with room for a rank."""
        assert self._cluster is not None
        self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
