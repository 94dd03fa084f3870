"""Start a Ray of our own on this machine, or join a cluster by its address; leave it without a trace.

A Ray of our own has its own session folder and ports, whatever else runs on the machine; it dies with the driver, also
on kill -9 (kernel fate sharing for Ray's daemons, a janitor process for the rest).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from verl_like.cluster.environment import LOOPBACK, patched_environment
from verl_like.cluster.janitor import cleanup_shm, start_janitor
from verl_like.cluster.lifecycle import kill_orphans, sigterm_blocked
from verl_like.cluster.worker_group import RUN_ID_VARIABLE, new_run_id
from verl_like.config.errors import ConfigError

logger = logging.getLogger(__name__)

_MIN_OBJECT_STORE = 128 * 1024**2
_MAX_OBJECT_STORE = 8 * 1024**3
_REACH_S = 2.0  # in which a cluster must take a connection, and answer
_SETTINGS = b"\x04"  # the type of HTTP/2's first frame, after three bytes of its length
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + bytes(5)  # gRPC's beginning
_START_S = 120.0  # in which the daemons of a Ray of our own must have found each other
_DAEMONS = ("gcs_server", "raylet")  # Ray's names of the processes without which it does nothing
_OF_RAY = {  # where the environment does not say
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning; we set CUDA_VISIBLE_DEVICES ourselves
    "RAY_worker_niceness": "0",  # by default 15: any other program on the machine leaves them next to no time
}


@dataclass(slots=True, kw_only=True)
class RaySession:
    """A connection to Ray, as `connect` gave it. A context manager."""

    run_id: str
    address: str
    owned: bool  # this process started the Ray
    timeline_json_file: str | None = None
    _temp_dir: str | None = None  # to be removed at the end
    _leave_connected: bool = False  # Ray was initialised by somebody else in this process
    _janitor: subprocess.Popen[bytes] | None = None
    _closed: bool = field(default=False, init=False)

    @property
    def lost(self) -> bool:
        """True where a daemon of a Ray of our own has died: no process can be started in it any more."""
        node: Any = ray._private.worker._global_node  # pyright: ignore[reportAttributeAccessIssue]
        if not (self.owned and ray.is_initialized()) or node is None:
            return False
        daemons = [info for name in _DAEMONS for info in node.all_processes.get(name, [])]
        return any(info.process.poll() is not None for info in daemons)

    def disconnect(self) -> None:
        """Write the timeline if asked for, leave Ray (stop it if it is ours) and clean up. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.timeline_json_file and self.lost:
                logger.warning("ray_init.timeline_json_file: Ray's daemon died, and what it had recorded with it")
            elif self.timeline_json_file:
                _write_timeline(self.timeline_json_file)
        finally:
            if self.owned and ray.is_initialized():
                _kill_at_shutdown()
            if not self._leave_connected:
                ray.shutdown()
            if self.owned:
                kill_orphans(self.run_id)
            if os.environ.get(RUN_ID_VARIABLE) == self.run_id:
                del os.environ[RUN_ID_VARIABLE]
            cleanup_shm(self.run_id)
            if self._temp_dir is not None:
                shutil.rmtree(self._temp_dir, ignore_errors=True)
            if self._janitor is not None:
                self._janitor.kill()
                self._janitor.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()


def connect(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    min_cpus: int = 1,
    temp_dir: str | None = None,
    object_store_memory: int | None = None,
    timeline_json_file: str | None = None,
    run_id: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> RaySession:
    """Join the Ray cluster at `address` ("auto", host:port; ray:// is refused), or start one on this machine.

    A Ray that is already initialised in this process is used as it is. Raises ValueError for settings that contradict
    each other, and for an address where no Ray is.

    num_cpus: cores that a Ray of our own offers; None: all, and at least `min_cpus`, since a rank is a process and not
        a core.
    temp_dir: folder of its session; None: a new one below the system's, removed at the end.
    object_store_memory: bytes; None: a tenth of memory between 128 MB and 8 GB.
    timeline_json_file: file to write at the end, for chrome://tracing.
    extra: further arguments of ray.init.
    """
    run_id = run_id or new_run_id()
    if ray.is_initialized():
        logger.info("using the Ray that is already initialised in this process")
        return RaySession(
            run_id=run_id,
            address=ray.get_runtime_context().gcs_address,
            owned=False,
            timeline_json_file=timeline_json_file,
            _leave_connected=True,
        )
    if address in (None, "", "local"):
        return _start(run_id, num_cpus, min_cpus, temp_dir, object_store_memory, timeline_json_file, extra or {})
    check_joining(str(address), num_cpus, temp_dir)
    os.environ[RUN_ID_VARIABLE] = run_id
    with _signal_handlers_kept(), _quiet():
        context = ray.init(address=address, namespace=run_id, **_common(), **(extra or {}))
    return RaySession(
        run_id=run_id,
        address=context.address_info["gcs_address"],
        owned=False,
        timeline_json_file=timeline_json_file,
        _janitor=start_janitor(run_id, kill=True),
    )


def _start(
    run_id: str,
    num_cpus: int | None,
    min_cpus: int,
    temp_dir: str | None,
    object_store_memory: int | None,
    timeline_json_file: str | None,
    extra: Mapping[str, Any],
) -> RaySession:
    own_folder = None
    if temp_dir is None:
        # Short: Ray puts unix sockets below it, whose paths may have 107 characters.
        temp_dir = own_folder = tempfile.mkdtemp(prefix=f"{run_id}_", dir="/tmp" if os.path.isdir("/tmp") else None)
    os.environ[RUN_ID_VARIABLE] = run_id  # inherited by Ray's processes and all below them
    _set_token()
    janitor = start_janitor(run_id, kill=True, folders=[own_folder] if own_folder else [])
    try:
        # sigterm_blocked: a SIGTERM to all asks us to stop
        with _signal_handlers_kept(), sigterm_blocked(), _quiet(), _on_loopback(), _patience():
            context = ray.init(
                address="local",
                num_cpus=num_cpus or max(os.cpu_count() or 1, min_cpus),
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                object_store_memory=object_store_memory or _object_store_bytes(),
                namespace=run_id,
                _temp_dir=str(Path(temp_dir).resolve()),
                **_common(),
                **extra,
            )
    except BaseException:
        janitor.kill()
        janitor.wait()
        raise
    return RaySession(
        run_id=run_id,
        address=context.address_info["gcs_address"],
        owned=True,
        timeline_json_file=timeline_json_file,
        _temp_dir=own_folder,
        _janitor=janitor,
    )


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray of our own listen to this machine alone: whoever reaches its ports can run code.

    Ray does so on systems where it makes no clusters, by this switch, which its other processes read from the
    environment.
    """
    constants: Any = ray._private.ray_constants  # pyright: ignore[reportAttributeAccessIssue]
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        with patched_environment({constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _set_token() -> None:
    """Set a token for Ray where the environment names none.

    Otherwise Ray writes one to ~/.ray, and from then on `ray start --head` asks for it, and ray_init.address=auto sends
    it to clusters that were started without. It stays in this process, whose library of Ray has read it for good: the
    daemons of a later Ray of anybody's here must have it too.
    """
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Give Ray's daemons up to `_START_S` to find each other.

    Ray's own 30 seconds may not do on a machine that is busy with other work: the look for them is repeated.
    """
    services: Any = ray._private.services  # pyright: ignore[reportAttributeAccessIssue]
    get_node, end = services.get_node, time.monotonic() + _START_S

    def found(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return get_node(*arguments, **options)
            except RuntimeError:  # not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    services.get_node = found
    try:
        yield
    finally:
        services.get_node = get_node


def _kill_at_shutdown() -> None:
    """Have ray.shutdown() end its daemons by SIGKILL. They do not hear SIGTERM, and it would wait a second for each."""
    node: Any = ray._private.worker._global_node  # pyright: ignore[reportAttributeAccessIssue]
    for started in node.all_processes.values():
        for info in started:
            info.process.terminate = info.process.kill


def _common() -> dict[str, Any]:
    return {"logging_level": logging.WARNING, "log_to_driver": True}


def check_joining(address: str, num_cpus: int | None, temp_dir: str | None) -> None:
    """Check settings for joining a cluster.

    Raises ValueError for those that contradict it, ConfigError where no Ray answers in two seconds.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"ray_init.address={address}: Ray Client addresses are not supported, because the training loop must run "
            "inside the cluster. Start it on a node of the cluster with ray_init.address=auto or host:6379."
        )
    for key, value in (("num_cpus", num_cpus), ("temp_dir", temp_dir)):
        if value is not None:
            raise ValueError(
                f"ray_init.{key}={value} has no effect on the running cluster at ray_init.address={address}: "
                "give it to `ray start`, or leave one of the two keys out."
            )
    _check_reachable(address)


def _check_reachable(address: str) -> None:
    """Raise ConfigError where no Ray answers: Ray would try for up to ten minutes, and no signal be heard meanwhile."""
    services: Any = ray._private.services  # pyright: ignore[reportAttributeAccessIssue]
    key = f"ray_init.address={address}"
    fix = "start one there (ray start --head), or leave the key out for a Ray of ours"
    port = re.fullmatch(r"(?:\[[\w:.%]+\]|[\w.-]+):(\d+)", address)
    if address not in ("auto", "local") and (port is None or not 0 < int(port[1]) < 65536):
        raise ConfigError([f"{key}: write host:port, as 10.0.0.1:6379, or auto for the Ray of this machine; {fix}"])
    try:
        place = services.canonicalize_bootstrap_address(address)
        if place is None:
            raise ValueError("")
    except (ValueError, ConnectionError) as error:
        raise ConfigError([f"{key}: no running Ray is known on this machine; {fix}"]) from error
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as connection:
            if os.environ.get("RAY_USE_TLS") != "1":
                connection.sendall(_HELLO)
                if connection.recv(4)[3:] != _SETTINGS:
                    raise OSError("what listens there does not speak gRPC, as Ray's head does, mostly at port 6379")
    except (OSError, ValueError) as error:
        raise ConfigError([f"{key}: no Ray answers at {place} ({error}); {fix}"]) from error


def _object_store_bytes() -> int:
    """Choose the object store's size: a tenth of memory, plenty for tokens, and inside /dev/shm.

    Beyond that Ray falls back to disk.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min(max(memory // 10, _MIN_OBJECT_STORE), _MAX_OBJECT_STORE)
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        size = max(_MIN_OBJECT_STORE, min(size, free * 6 // 10))
    return size


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's usage statistics and chatter; its workers get the driver's priority."""
    for name, value in _OF_RAY.items():
        os.environ.setdefault(name, value)
    worker: Any = ray._private.worker  # pyright: ignore[reportAttributeAccessIssue]
    if worker.print_to_stdstream is not _print_in_a_line:
        _printed.append(worker.print_to_stdstream)
        worker.print_to_stdstream = _print_in_a_line
    names = (
        "ray._private.worker",
        "ray._private.authentication.authentication_token_setup",
        "ray._private.state",  # announces changes of ray.timeline
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


_printed: list[Callable[..., None]] = []  # Ray's own function, once ours stands in its place


def _print_in_a_line(batch: dict[str, Any], *arguments: Any, **more: Any) -> None:
    """Print output of Ray's daemons; of a dying one the first line, while the pages of its state go into our log."""
    if batch.get("pid") == "raylet":
        for text in batch["lines"]:
            logger.debug("Ray's daemon: %s", text)
        lines = [line for text in batch["lines"] for line in text.splitlines()[:1]]
        batch = batch | {"lines": [re.sub(r" Last \d+ lines of the Raylet logs:$", "", line) for line in lines]}
    _printed[-1](batch, *arguments, **more)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the caller's handler of SIGTERM, which ray.init replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: Ray did not touch it either
            signal.signal(signal.SIGTERM, handler)


def _write_timeline(path: str) -> None:
    Path(path).resolve().parent.mkdir(parents=True, exist_ok=True)
    with _quiet():
        ray.timeline(filename=path)
    logger.info("wrote Ray's timeline to %s (open it in chrome://tracing)", path)
