"""Resume of a run: its checkpoint is found, checked and compared with the configuration before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import CHECKSUMS_FILE, find_faults
from verl_like.checkpoint.files import write_atomically
from verl_like.checkpoint.harmless import faults_of
from verl_like.cluster.worker_group import new_run_id
from verl_like.config import PPOConfig, TrainerConfig
from verl_like.config.errors import raise_if_any
from verl_like.config.roles import RoleConfig, roles_of
from verl_like.config.schema import keys, to_dict
from verl_like.data.dataset import Dataset
from verl_like.data.sampler import check_identity
from verl_like.observe.redaction import redacted_tree
from verl_like.observe.run_folder import value_at
from verl_like.registry import part
from verl_like.remote_storage import RemoteFolder, is_remote
from verl_like.small_files import parse_object, read_object, read_yaml

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
_OF_THE_RESUME = {"trainer.resume_mode", "trainer.resume_from_path"}  # differ by nature
_PARTS = ("model", "optimizer", "extra")  # of load_contents, what a resume reads; each is a folder
_AFRESH = "or start afresh: trainer.resume_mode=disable, or another trainer.default_local_dir"


def fetch_resume(settings: TrainerConfig) -> None:
    """Fetch the checkpoint that resume_mode asks for.

    It is a newer one of this run from trainer.default_hdfs_dir, or resume_from_path's. Raises ValueError where no
    checkpoint is here and several runs' are there, and where a fresh start would write over those of an earlier run.
    """
    root, mode = Path(settings.default_local_dir).expanduser(), str(settings.resume_mode)
    if mode == "resume_path" and is_remote(settings.resume_from_path):
        url, _, name = str(settings.resume_from_path).rstrip("/").rpartition("/")
        if not fetched_path(settings).is_dir():
            fetched_path(settings).parent.mkdir(parents=True, exist_ok=True)
            RemoteFolder(url, "trainer.resume_from_path").download(name, fetched_path(settings))
    elif of_verl(settings):
        source = Path(str(settings.resume_from_path)).expanduser()
        path, left = part("checkpoint", "from_verl")(source, fetched_path(settings).parent)
        logger.warning("%s, written by verl, is taken up as %s, without %s", source, path, "; ".join(left) or "more")
    if mode == "resume_path" or settings.default_hdfs_dir is None:
        return
    remote = RemoteFolder(settings.default_hdfs_dir, "trainer.default_hdfs_dir")
    if mode == "disable":
        if steps := remote.steps():
            raise ValueError(
                f"{remote.key}={remote.url} holds checkpoints of another run, up to step {steps[-1]}, which a fresh "
                f"start (trainer.resume_mode=disable) would write over: name another folder in {remote.key}, or go on "
                "from the newest with resume_mode=auto"
            )
        return
    here = map(layout.step_of, layout.step_dirs(root))
    newer = [step for step in remote.steps() if step > max(here, default=0)]
    newer = _of_this_run(remote, newer, layout.whole_checkpoints(root)) if newer else []
    if newer:
        logger.info("fetching step %d from %s: it is newer than what is here", newer[-1], settings.default_hdfs_dir)
        remote.download(f"global_step_{newer[-1]}", layout.step_dir(root, newer[-1]))
        write_atomically(root / layout.LATEST_FILE, str(newer[-1]))


def _of_this_run(remote: RemoteFolder, steps: list[int], here: list[Path]) -> list[int]:
    """Select the remote steps whose checkpoints are of the same run as the newest one here (`run_of`).

    Raises ValueError where several runs' are there and none here.
    """
    names = {step: f"global_step_{step}/{layout.STATE_FILE}" for step in steps}
    found = {
        step: parse_object(remote.read(name) or "{}", f"{remote.key}={remote.url}/{name}").get("run")
        for step, name in names.items()
    }
    if here:
        own = layout.read_trainer_state(here[-1]).get("run")
        if others := [step for step in steps if found[step] != own]:
            logger.warning(
                "%s=%s: step(s) %s are of another run than %s, and left there: to go on from one, set "
                "trainer.resume_mode=resume_path trainer.resume_from_path",
                *(remote.key, remote.url, ", ".join(map(str, others)), here[-1]),
            )
        return [step for step in steps if found[step] == own]
    if len(set(found.values())) > 1:
        listed = "; ".join(f"{step} of {run or 'an older version'}" for step, run in found.items())
        raise ValueError(
            f"{remote.key}={remote.url} holds checkpoints of several runs (step {listed}), and none is here that says "
            "which one goes on: set trainer.resume_mode=resume_path and trainer.resume_from_path to the URL of one, or "
            f"name another folder in {remote.key}"
        )
    return steps


def run_of(resume: Path | None, settings: TrainerConfig) -> str:
    """Name of the run, which its checkpoints have in common and a resumed run keeps.

    A fresh start gets a new one, and so does a run from trainer.resume_from_path, which leaves the steps behind that
    came after that one.
    """
    branches = settings.resume_mode == "resume_path" and resume == fetched_path(settings).expanduser()
    saved = None if resume is None or branches else layout.read_trainer_state(resume).get("run")
    return new_run_id() if saved is None else saved


def of_verl(settings: TrainerConfig) -> bool:
    """True where the run begins with a checkpoint that verl wrote."""
    named = settings.resume_from_path if settings.resume_mode == "resume_path" else None
    return named is not None and not is_remote(named) and part("checkpoint", "is_verls")(Path(named).expanduser())


def fetched_path(settings: TrainerConfig) -> Path:
    """Path of resume_from_path on this machine; for a URL, and for verl's, a folder below default_local_dir."""
    path = str(settings.resume_from_path)
    if not is_remote(path) and not of_verl(settings):
        return Path(path)
    return Path(settings.default_local_dir).expanduser() / "fetched" / path.rstrip("/").rpartition("/")[2]


def find_resume(config: PPOConfig, *, newest: bool = False) -> Path | None:
    """Find the checkpoint that trainer.resume_mode asks for, and check its files; None: a fresh start.

    Files are compared with their checksums. Logs which keys changed since it was saved. Changes nothing: what a killed
    run left half done is `recover`'s, before.

    newest: rather the newest of this run's folder, if there is one.

    Raises ValueError when the checkpoint cannot be found, is damaged, or does not fit.
    """
    settings = config.trainer
    root = Path(settings.default_local_dir).expanduser()
    check = partial(_faults, roles=_trained(config))
    mode = str(settings.resume_mode)
    path = layout.find_latest(root, check) if newest or mode == "auto" else None
    if path is None and mode == "resume_path" and settings.resume_from_path is not None:
        try:
            path = layout.check_checkpoint(fetched_path(settings), check)
        except ValueError as error:
            asked = settings.resume_from_path
            where = "" if asked in str(error) else f"trainer.resume_from_path={asked}: "
            raise ValueError(f"{where}{error}; name a folder global_step_<n> that a run has saved whole") from error
    if path is not None:
        exported = [f"{role.name}/huggingface" for role in _trained(config) if (path / CHECKSUMS_FILE).exists()]
        for fault in find_faults(path, exported, top=False) if exported else []:
            logger.warning("%s. The run goes on without it; `verl-like export` refuses it", fault)
        saved = saved_config(path)
        raise_if_any(misfits(path, saved, config))
        _report(path, saved, config)
    return path


def check_data(path: Path, now: Dataset) -> None:
    """Compare the training data with those that the checkpoint's place is in, before what trains on them is started.

    Raises ValueError where they are others.
    """
    place = layout.read_trainer_state(path)["source"]
    if place is not None and "identity" in place:
        try:
            check_identity(place["identity"], now.identity())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def processes_text(path: Path, processes: int) -> str:
    """Describe a resume on another number of processes; "" where it is the same number."""
    then = len(list((path / layout.ACTOR / "extra").glob("rank_*.pt")))
    if then in (0, processes):
        return ""
    share = "more" if processes < then else "less"
    return (
        f"{path.name} was saved by {then} process(es) and is taken up by {processes}: its shards are laid out anew, "
        f"each process has {share} to hold and to do, and numbers are the same to rounding, not to the last bit"
    )


def misfits(path: Path, saved: dict[str, Any], config: PPOConfig) -> list[str]:
    """List why a checkpoint does not fit the models of this configuration: key, value and fix of each reason."""
    problems, then = [], value_at(saved, "trainer.objective", config.trainer.objective)
    if then != config.trainer.objective:
        problems.append(
            f"trainer.objective={config.trainer.objective}, but {path} is of a run with {then}: begin with its model "
            f"(actor_rollout_ref.model.path={path}/actor/huggingface) in another trainer.default_local_dir"
        )
    if layout.CRITIC in roles_of(config) and not (path / layout.CRITIC).is_dir():
        problems.append(
            f"this run trains a critic (critic.enable={config.critic.enable}, algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator}), but {path} holds none: go on with critic.enable=null and "
            f"algorithm.adv_estimator={value_at(saved, 'algorithm.adv_estimator', 'grpo')}, {_AFRESH}"
        )
    for role in _trained(config):
        if (path / role.name).is_dir():
            problems += _role_misfits(path, role, saved)
    return problems


def _role_misfits(path: Path, role: RoleConfig, saved: dict[str, Any]) -> Iterator[str]:
    contents = role.checkpoint.load_contents
    key = f"{role.section}.checkpoint.load_contents={contents}"
    if "model" not in contents:
        yield (f"{key} leaves out the weights of {path}: add model to save_contents and load_contents, {_AFRESH}")
    absent = [part for part in _PARTS if part in contents and not (path / role.name / part).is_dir()]
    if absent:
        yield f"{key}, but {path / role.name} was saved without {', '.join(absent)}: leave that out"
    assert role.optim is not None
    optimizer = f"{role.section}.optim.optimizer"
    then = value_at(saved, optimizer, str(role.optim.optimizer))
    if then != str(role.optim.optimizer) and "optimizer" in contents:
        yield (
            f"{optimizer}={role.optim.optimizer}, but {path} holds the states of {then}: set it back to {then}, or "
            f"leave them out: {role.section}.checkpoint.load_contents=[model,extra]"
        )
    if not absent:
        yield from _lora_misfits(path, role, saved)


def _lora_misfits(path: Path, role: RoleConfig, saved: dict[str, Any]) -> list[str]:
    """List adapters that were added, removed or have another shape; their rank is in the adapter's own file."""
    adapter, rank = path / role.name / "adapter" / "adapter_config.json", role.model.lora_rank
    then = read_object(adapter, {"r": int})["r"] if adapter.exists() else 0
    if then != rank:
        holds = f"adapters of rank {then}" if then else "no adapters"
        return [
            f"{role.model_section}.lora_rank={rank}, but {path} holds {holds}: set lora_rank={then} again, {_AFRESH}"
        ]
    now = {"target_modules": role.model.target_modules, "exclude_modules": role.model.exclude_modules}
    return [
        f"{role.model_section}.{name}={value}, but {path} was saved with {before}: set it again, {_AFRESH}"
        for name, value in now.items()
        if rank and (before := value_at(saved, f"{role.model_section}.{name}", value)) != value
    ]


def changed_keys(saved: dict[str, Any], config: PPOConfig) -> list[str]:
    """List `key: then -> now` for every key that differs; one that was not saved yet had its default."""
    saved, now = redacted_tree(saved, exact=True), redacted_tree(to_dict(config), exact=True)
    defaults, lines = to_dict(PPOConfig()), []
    for key in keys():
        before, after = value_at(saved, key, value_at(defaults, key)), value_at(now, key)
        if before != after and key not in _OF_THE_RESUME:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def saved_config(path: Path) -> dict[str, Any]:
    """Read the configuration a checkpoint was saved under; empty where an older version wrote none."""
    file = path / CONFIG_FILE
    try:
        tree = OmegaConf.to_container(OmegaConf.create(read_yaml(file))) if file.exists() else {}
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {type(tree).__name__} where sections are expected")
    except (ValueError, YAMLError, RecursionError, OmegaConfBaseException) as error:
        told = " ".join(str(error).removeprefix(f"{file} is damaged: ").split())
        raise ValueError(
            f"{file} is damaged: {told}. Remove it: the run then goes on, but is not told which keys changed"
        ) from error
    return {str(name): value for name, value in tree.items()}


def _report(path: Path, saved: dict[str, Any], config: PPOConfig) -> None:
    logger.info("resuming from %s", path)
    if not saved:
        logger.warning("%s was written without its configuration: which keys changed since is not known", path)
    elif lines := changed_keys(saved, config):
        logger.warning(
            "%d key(s) changed since %s was saved; the present values are used, but the order of prompts (data.seed, "
            "data.shuffle) and an adaptive KL coefficient go on from there:\n  %s",
            *(len(lines), path, "\n  ".join(lines)),
        )
    if (path / layout.CRITIC).is_dir() and layout.CRITIC not in roles_of(config):
        logger.warning("the critic in %s is left out: this run trains none (algorithm.adv_estimator)", path)


def _trained(config: PPOConfig) -> list[RoleConfig]:
    """Roles that have a folder in a checkpoint, under their names."""
    return [role for role in roles_of(config).values() if role.optim is not None]


def _faults(path: Path, roles: Sequence[RoleConfig]) -> list[str]:
    """List files that are missing or damaged among those that this run reads."""
    if not (path / layout.ACTOR).is_dir():
        return [f"{path / layout.ACTOR} is missing"]
    try:
        state = layout.read_trainer_state(path, {"state": dict, "source": (dict, type(None))})["state"]
    except ValueError as error:
        return [str(error)]
    if type(state.get("step")) is not int or state["step"] != layout.step_of(path):
        return [f"{path / layout.STATE_FILE} is damaged: it is of step {state.get('step')!r:.60}"]
    parts = [f"{role.name}/{part}" for role in roles for part in _PARTS if part in role.checkpoint.load_contents]
    return find_faults(path, parts) or [fault for part in parts for fault in faults_of(path / part)]
