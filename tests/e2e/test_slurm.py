"""recipes/slurm/train.sbatch with stand-ins for Slurm's commands: its Ray, its run and its signals are real."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support import overrides, write_task

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "slurm" / "train.sbatch"
STAND_INS = {
    "scontrol": "echo localhost",
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\necho "task: $*" >&2\nexec "$@"',
    "hostname": "echo 127.0.0.1 ::1",
}


def cancel(job: subprocess.Popen[str]) -> None:
    """End all that the job started, as Slurm does: TERM, then KILL."""
    for sent, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, sent)
        time.sleep(patience)
    job.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_job_trains_and_ends_well_at_its_time_limit(tmp_path: Path, tiny_model: Path) -> None:
    """TERM to the script alone, in the middle: the run saves, and the same job goes on from there."""
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f'export PATH="{tools}:$PATH"\n')
    own = Path(sys.executable).parent
    commands = {"python": f'exec "{sys.executable}" "$@"', "ray": f'exec "{own / "ray"}" "$@"'}
    commands["verl-like"] = f'exec "{sys.executable}" -m verl_like.cli "$@"'
    for name, text in (STAND_INS | commands).items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    settings = {"trainer.launcher": "ray", "trainer.total_training_steps": 100000, "trainer.save_freq": -1}
    keys = overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings)
    keys = [key for key in keys if not key.startswith(("trainer.resume_mode", "trainer.n_gpus", "trainer.nnodes"))]
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment = os.environ | slurm | {"GPUS": "1", "VENV": str(tmp_path / "venv"), "PYTHONPATH": str(ROOT)}
    short = environment["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp")  # short, for Ray's sockets
    steps = []
    for turn in range(2):
        log = tmp_path / f"job{turn}.log"
        with log.open("w") as out:
            job = subprocess.Popen(
                ["bash", str(SCRIPT), *keys], env=environment, stdout=out, stderr=out, text=True, start_new_session=True
            )
        try:
            deadline = time.monotonic() + 110
            while "training_step" not in log.read_text() and log.read_text().count(" INFO  ") < 4:
                assert job.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            job.send_signal(signal.SIGTERM)
            status = job.wait(60)
        finally:
            cancel(job)
        text = log.read_text()
        steps.append(int((tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text()))
        assert "task: ray start --head --node-ip-address=127.0.0.1" in text
        assert "saved checkpoint" in text, text
        assert status == 0, text
    shutil.rmtree(short, ignore_errors=True)
    assert 0 < steps[0] < steps[1]
    assert f"global_step_{steps[0]}" in (tmp_path / "job1.log").read_text()  # resumed
