"""Process of a worker, around the user's worker object. Free of Ray and of torch.

The environment is set first and the worker's module imported afterwards, because torch, OpenMP and vLLM read it once.
Output of the process (and of native code in it) goes to a file; records that concern the user go to the old stderr too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like import heartbeat
from verl_like.cluster.environment import free_port, omp_threads, process_environment
from verl_like.cluster.janitor import cleanup_shm, start_janitor
from verl_like.cluster.lifecycle import die_with_parent, leave_signals_to_driver, name_shared_memory, terminated
from verl_like.cluster.worker_group import RankEnv, lowered_by, method_of, resolve_import_path
from verl_like.config.micro_batches import Lowered
from verl_like.gc_settings import starting

logger = logging.getLogger(__name__)

TAIL_LINES = 20
_TITLE = "=== rank "
STACK_SIGNAL = signal.SIGUSR1  # makes a worker write the stacks of all its threads to its log


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """All a process needs to become a rank, but for the worker's spec."""

    worker: str
    rank_env: RankEnv
    cuda_devices: tuple[str, ...]
    environment: Mapping[str, str]  # further variables, strongest
    log_path: str
    working_directory: str
    stall_timeout: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call: a value, or an error told in text (an exception may not unpickle elsewhere)."""

    value: Any = None
    error_type: str = ""
    message: str = ""
    lowered: Lowered | None = None
    traceback: str = ""
    log_tail: str = ""
    asked_to_stop: bool = False  # this process got a SIGTERM


class RankProcess:
    """The worker process's side of a worker group. One per process."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._log_path = ""
        self._janitor: subprocess.Popen[bytes] | None = None
        self._rank_env: RankEnv | None = None

    def describe(self) -> dict[str, Any]:
        """Facts about this process that the driver needs to choose rank environments."""
        return {"pid": os.getpid(), "parent_pid": os.getppid(), "hostname": socket.gethostname()}

    def free_port(self) -> int:
        return free_port()

    @starting()
    def start(self, request: StartRequest, spec: bytes) -> Outcome:
        """Become the rank: redirect output, set the environment, build the worker.

        The spec comes pickled, because unpickling it may import torch before the environment is set.
        """
        try:
            self._become(request)
            self._worker = resolve_import_path(request.worker)(pickle.loads(spec), request.rank_env)
        except BaseException as error:
            return self._failed(error)
        return Outcome()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        try:
            with heartbeat.span(method):
                value = method_of(self._worker, method)(*args, **kwargs)
            return Outcome(value=value, asked_to_stop=terminated())
        except BaseException as error:
            return self._failed(error)

    def stop(self) -> Outcome:
        """Let the worker close what it holds."""
        worker, self._worker = self._worker, None
        try:
            if hasattr(worker, "shutdown"):
                worker.shutdown()
            if self._rank_env is not None and self._rank_env.local_rank == 0:
                cleanup_shm(self._rank_env.memory_id)
        except BaseException as error:
            return self._failed(error)
        finally:
            if self._janitor is not None:
                self._janitor.kill()
                self._janitor.wait()
        return Outcome()

    def _become(self, request: StartRequest) -> None:
        rank_env = request.rank_env
        self._rank_env = rank_env
        self._log_path = request.log_path
        die_with_parent()
        leave_signals_to_driver()
        name_shared_memory(rank_env.memory_id)
        redirect_output(Path(request.log_path), f"{rank_env.rank} of {rank_env.world_size}, run {rank_env.run_id}")
        os.environ.update(process_environment(rank_env, cuda_devices=request.cuda_devices))
        os.environ["OMP_NUM_THREADS"] = str(omp_threads(rank_env.local_world_size, rank_env.device))
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # torch's flight recorder: the last collectives
        os.environ.update(request.environment)
        beacon = heartbeat.beacon_file(rank_env.memory_id, request.log_path)
        heartbeat.publish(beacon, request.stall_timeout, last_collectives)
        if os.path.isdir(request.working_directory):
            os.chdir(request.working_directory)
        if rank_env.local_rank == 0:
            self._janitor = start_janitor(rank_env.memory_id, kill=False)

    def _failed(self, error: BaseException) -> Outcome:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        log_tail = read_tail(self._log_path)  # without the traceback, which travels by itself
        text = "".join(traceback.format_exception(error))
        logger.info("failed:\n%s", text)
        told = {"error_type": type(error).__name__, "message": str(error), "lowered": lowered_by(error)}
        return Outcome(**told, traceback=text, log_tail=log_tail)


def last_collectives() -> dict[str, Any]:
    """Return the newest collective that this rank has begun in each process group, from torch's flight recorder."""
    torch: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(torch, "_dump_fr_trace_json", None)  # torch 2.11 and 2.12: of NCCL alone, where it is switched on
    if dump is None:
        return {}
    found: dict[str, Any] = {}
    for entry in json.loads(dump()).get("entries", []):
        if not entry["is_p2p"]:
            group = entry["process_group"][1] if entry["process_group"][1] != "undefined" else entry["process_group"][0]
            name = entry["profiling_name"].rpartition(":")[2]
            found[str(group)] = {"number": entry["collective_seq_id"], "name": name}
    return found


class _ForTheUser(logging.Filter):
    """Filter that passes our own warnings, and all errors; the rest is chatter that stays in the file."""

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name == "verl_like" or record.name.startswith("verl_like.")
        return record.levelno >= (logging.WARNING if ours else logging.ERROR)


def redirect_output(path: Path, title: str) -> None:
    """Send file descriptors 1 and 2 and all log records to `path`, and what concerns the user to the old stderr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    user_stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.write(2, f"{_TITLE}{title}, process {os.getpid()} on {socket.gethostname()} ===\n".encode())
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2)
    to_file = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace"))
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_user = logging.StreamHandler(user_stream)
    to_user.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    to_user.addFilter(_ForTheUser())
    root = logging.getLogger()
    root.handlers[:] = [to_file, to_user]
    root.setLevel(logging.INFO)


def read_tail(path: str, num_lines: int = TAIL_LINES, max_bytes: int = 16_384) -> str:
    """The last lines of a rank's log since its start; empty when it cannot be read (it may be on another machine)."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    start = max(0, text.rfind(_TITLE))  # resumed runs append to the same file
    return "\n".join(text[start:].splitlines()[-num_lines:])
