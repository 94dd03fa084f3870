"""`trainer.*`, `ray_init.*`: the run."""

import difflib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from verl_like.config.base import (
    ConfigNode,
    above,
    at_least,
    between,
    key,
    minus_one_or_positive,
    one_of,
    reference,
    require,
    subset_of,
    such_that,
)
from verl_like.config.pools import MAIN_POOL, PlacementError, named_pools
from verl_like.text import table_rows
from verl_like.user_code import FORMS, is_reference

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
HEALTH = table_rows(Path(__file__).with_name("health.txt").read_text(encoding="utf-8"))  # for observe/health.py
HEALTH_RULES = tuple(row[0].replace(" ", "_") for row in HEALTH)
_HEALTH_ACTIONS = ("warn", "stop", "off")
_CONTROLLER_NSIGHT = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}
_WORKER_NSIGHT = {**_CONTROLLER_NSIGHT, "capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}


class ResumeMode(StrEnum):
    """Starting point of a run."""

    auto = "auto"
    disable = "disable"
    resume_path = "resume_path"


class Device(StrEnum):
    """Device that the workers compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """Launcher of the workers: Ray, or none (one rank in this process)."""

    ray = "ray"
    local = "local"


class Parity(StrEnum):
    """Sameness of the log-probs of trainer and rollout engine: up to rounding, or to the last bit."""

    off = "off"
    exact = "exact"


class ProfileTool(StrEnum):
    """Recorder of the steps of trainer.profile_steps: torch's profiler, or Nsight Systems."""

    torch = "torch"
    nsys = "nsys"


@dataclass(kw_only=True, slots=True)
class TrainerConfig(ConfigNode):
    """`trainer.*`. A step is one rollout batch and its updates."""

    project_name: str = "verl_examples"
    """Project of the experiment trackers."""
    experiment_name: str = "gsm8k"
    """Name of the run."""
    objective: str = key("rl", one_of("rl", "sft", "preference", "serve"))
    """What is trained: rl, answers that the policy samples and rewards judge; sft, answers that the data hold (sft.*,
    `verl-like sft`); preference, what makes one answer better than another (preference.*, `verl-like preference`);
    serve, what clients ask for (serve.*, `verl-like serve`)."""
    seed: int = key(1, at_least(0))
    """Seed of everything random: initialisation, sampling of tokens, order of prompts."""
    full_determinism: bool = False
    """Two runs with the same settings on the same machine have the same metrics to the last digit: torch uses
    deterministic algorithms only (others warn), and settings whose results depend on time are refused."""
    parity: Parity = Parity.off
    """exact: trainer and rollout engine compute every sum in one order, so that their log-probs are the same to the
    last bit, and those that were sampled are the old ones, without a pass. For rollout.name=hf on a CPU and dense
    models; the start proves it, each step checks it. off: they differ by rounding."""
    device: Device = Device.auto
    """auto (CUDA when there is one), cpu or cuda."""
    mode: str = key("sync", one_of("sync", "colocate_async", "separate_async"))
    """sync: a step samples its batch and trains it. colocate_async: a step goes on when it has its groups; what still
    runs is paused while the policy trains, and continues under the new weights. separate_async: a pool of its own
    samples all the time (async_training.*)."""
    launcher: Launcher = Launcher.ray
    """ray, or local: one rank in this process, for debugging."""
    nnodes: int = key(1, at_least(1), unit="nodes")
    """Machines."""
    n_gpus_per_node: int | str = key(
        "auto",
        such_that(
            lambda size: size == "auto" if isinstance(size, str) else size >= 1,
            "must be auto or at least 1",
            "auto, or at least 1",
        ),
        unit="processes",
    )
    """Worker processes per machine; auto: its GPUs, or 1 on CPU."""
    placement: dict[str, Any] = key({})
    """Pools of processes beside the main one (nnodes x n_gpus_per_node), and who is in them instead: {name: {roles:
    [critic, ref], nnodes: 1, n_gpus_per_node: 2}}. Or the devices of each role: {rollout: [2, 3], critic: 1}; those
    with the same numbers share a pool. Roles: rollout, ref, critic, reward; each pool has devices of its own."""
    trainer_class: str | None = key(None, reference())
    """A class of your own, file.py:Name, derived from verl_like.trainer.ppo.PPOTrainer. Null: that one."""
    rpc_timeout: float = key(3600.0, above(0), unit="s")
    """Longest single call to a worker. Sampling a whole step is one, with graders where they choose groups."""
    worker_start_timeout: float = key(600.0, above(0), unit="s")
    """Longest time from placing the workers until all of them are built."""
    stall_timeout: float | None = key(300.0, above(0), unit="s")
    """The run ends, or begins again (max_restarts), when workers make no progress for so long, and ten times what a
    micro-batch, an engine's step or a tensor of that size took before; three times as long where it is the first of its
    kind. Null: only rpc_timeout counts."""
    max_restarts: int = key(0, at_least(0), unit="restarts")
    """Begin again from the newest checkpoint when worker processes, their node or their memory are lost, or do not
    answer in time: at most so often from the same one. Where a micro-batch did not fit into memory the new start has
    smaller ones, and does not count. Set save_freq with it."""
    restart_delay: float = key(10.0, at_least(0), unit="s")
    """Wait before the first restart; twice as long before each further one from the same checkpoint, up to 600."""
    ray_wait_register_center_timeout: int = key(300, at_least(1), unit="s")
    """Longest wait for the cluster to have room for the workers."""
    balance_batch: bool = True
    """Give every process about the same number of tokens."""
    total_epochs: int = key(30, at_least(1), idle="total_training_steps is set: it is the length of the run")
    """Passes over the training data."""
    total_training_steps: int | None = key(None, at_least(1), unit="steps")
    """Length of the run. Null: total_epochs."""
    critic_warmup: int = key(0, at_least(0), unit="steps")
    """Steps that train the critic alone."""
    save_freq: int | None = key(None, minus_one_or_positive(), unit="steps")
    """Save a checkpoint every so many steps, and after the last. Null: after the last; -1: only when the run is
    interrupted."""
    test_freq: int | None = key(None, minus_one_or_positive(), unit="steps")
    """Validate every so many steps, and after the last. Null: after the last; -1: never during training."""
    save_each_epoch: bool = False
    """Save a checkpoint after each epoch too."""
    test_each_epoch: bool = False
    """Validate after each epoch too."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    resume_mode: ResumeMode = ResumeMode.auto
    """auto (the newest checkpoint of default_local_dir, where there is one), disable (afresh), resume_path. A run that
    does not resume, in a folder that holds another run's files, goes to <folder>-2."""
    resume_from_path: str | None = key(None, idle="resume_mode is not resume_path")
    """Checkpoint folder (global_step_N) of resume_mode=resume_path: ours, or one that verl's FSDP trainer wrote."""
    default_local_dir: str = "checkpoints"
    """Folder of checkpoints; follows project_name and experiment_name."""
    default_hdfs_dir: str | None = key(
        None,
        such_that(
            lambda url: url.strip() and not url.startswith(("http://", "https://")),
            "give a URL that can be written to, as s3://bucket/run, or null",
        ),
    )
    """URL of a remote folder (hdfs://, s3://, gs://, or any that fsspec knows): each checkpoint is copied there in the
    background, and resume_mode=auto fetches the newest whole one of this run where it is newer than those of
    default_local_dir."""
    del_local_ckpt_after_load: bool = False
    """Delete a checkpoint after resuming from it."""
    best_metric: str | None = None
    """Validation metric, as val-core/openai/gsm8k/acc/mean@1: the checkpoint of the step with the best value is saved
    at once and not deleted; best_checkpoint.json in default_local_dir names it. Null: none."""
    best_mode: str = key("max", one_of("max", "min"), idle="best_metric is not set")
    """Whether the largest (max) or the smallest (min) value of best_metric is the best."""
    early_stop_patience: int | None = key(None, at_least(1), unit="validations")
    """End the run, with a checkpoint, after so many without a better best_metric. Null: never."""
    max_actor_ckpt_to_keep: int | None = key(None, at_least(1), unit="checkpoints")
    """Newest actor checkpoints to keep. Null: all."""
    max_critic_ckpt_to_keep: int | None = key(None, at_least(1), unit="checkpoints")
    """Newest critic checkpoints to keep. Null: all."""
    max_skipped_updates: int = key(10, minus_one_or_positive(), unit="optimizer steps")
    """End the run after a step with which so many in a row of one role were skipped, because their gradients were not
    finite; -1: never."""
    health: dict[str, str] = key({})
    """What health rules do while the run goes on, as {failed_rewards: stop}: warn (also where a rule is not named),
    stop (the run ends, and its last step is saved), off. docs/report.md lists the rules."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow, swanlab, trackio, or classes of your own, file.py:Name. Metrics
    always go to a jsonl file as well."""
    logger_kwargs: dict[str, Any] = key({})
    """Further arguments of trackers, by name, as {wandb: {entity: me, tags: [a]}}: of the package's own init
    (tensorboard: of SummaryWriter; mlflow: tracking_uri and tags), or of your own class. Access keys belong into the
    environment."""
    log_dir: str | None = None
    """Folder of logs and metrics. Null: default_local_dir."""
    log_format: str = key("text", one_of("text", "json"))
    """Form of <log_dir>/verl_like.log. json: an object a line, with time, level, logger, message, the run's id
    and, where it is about one, the episode's, which the samples have too."""
    prometheus_port: int | None = key(None, between(0, 65535), unit="port")
    """Serve the newest metrics to Prometheus at http://127.0.0.1:<port>/metrics; 0: any free port. Null: not."""
    prometheus_host: str = "127.0.0.1"
    """Address at which they are served; 0.0.0.0 is to the whole network, and whoever reads them needs no password."""
    log_val_generations: int = key(0, at_least(0), unit="samples")
    """Validation responses shown in the trackers."""
    console_samples: int = key(3, at_least(0), unit="samples")
    """Responses shown on the console at the first step and at every validation; 0: none."""
    sample_freq: int = key(5, minus_one_or_positive(), unit="steps")
    """Keep a few training responses in <log_dir>/samples every so many steps, and of the first five; of validations
    always. -1: none."""
    sample_groups: int = key(2, at_least(1), unit="prompts")
    """Prompts whose responses are kept at such a step: half of them by chance, half the most telling ones."""
    sample_max_mb: float = key(200.0, above(0), unit="MB")
    """Size of <log_dir>/samples; beyond it every second older step is removed."""
    report_freq: int = key(20, minus_one_or_positive(), unit="steps")
    """Write <log_dir>/report.html every so many steps, in a process of its own, and at the end; -1: never."""
    prove_step: bool = False
    """Before the run, make two steps on its workers from frozen rollouts and compare them with plain float64 ones, as
    verl-like selfcheck does; a difference ends the run. The outcome is in <log_dir>/step_proof.txt."""
    record_freq: int = key(-1, minus_one_or_positive(), unit="steps")
    """Write what each so many-th step consists of (tokens, log-probs, rewards, advantages, checksums of the weights)
    into <log_dir>/recorded, about 30 bytes a token, for verl-like replay and bisect. -1: never."""
    rollout_data_dir: str | None = None
    """Folder for all training responses as jsonl. Null: not kept."""
    validation_data_dir: str | None = None
    """Folder for all validation responses as jsonl. Null: not kept."""
    profile_steps: list[int] | None = key(
        None, such_that(lambda steps: all(step >= 1 for step in steps), "steps are counted from 1")
    )
    """Steps to profile, counted from 1; traces go to <log_dir>/profile. Null: none."""
    profile_tool: ProfileTool = ProfileTool.torch
    """torch (a Chrome trace per rank and step) or nsys (Nsight Systems; needs CUDA and the nsys program)."""
    controller_nsight_options: dict[str, Any] = key(_CONTROLLER_NSIGHT, subset_of(*_CONTROLLER_NSIGHT))
    """Nsight Systems options of the driver (profile_tool=nsys)."""
    worker_nsight_options: dict[str, Any] = key(_WORKER_NSIGHT, subset_of(*_WORKER_NSIGHT))
    """Nsight Systems options of the workers (profile_tool=nsys)."""

    def check(self) -> None:
        alone = self.early_stop_patience is not None and self.best_metric is None
        require(not alone, "early_stop_patience", self.early_stop_patience, "set best_metric, which it watches")
        unknown = sorted(name for name in self.logger if name not in LOGGERS and not is_reference(name))
        fix = f"unknown {unknown}; choose from {', '.join(LOGGERS)}, or name a class of your own: {FORMS}"
        require(not unknown, "logger", self.logger, fix)
        for rule, action in self.health.items():
            close = difflib.get_close_matches(rule, HEALTH_RULES, n=1)
            near, known = "".join(f", did you mean {name}?" for name in close), ", ".join(HEALTH_RULES)
            require(rule in HEALTH_RULES, "health", rule, f"no such rule{near}; the rules: {known}")
            fix = f"choose one of {', '.join(_HEALTH_ACTIONS)}"
            require(action in _HEALTH_ACTIONS or action is False, f"health.{rule}", action, fix)
        self.health = {rule: action or "off" for rule, action in self.health.items()}  # `off` is YAML's false
        for name, given in self.logger_kwargs.items():
            fix = "write {tracker: {argument: value}}, as {wandb: {tags: [a]}}; console and jsonl take none"
            legal = name not in ("console", "jsonl") and isinstance(given, dict)
            require(legal, "logger_kwargs", {name: given}, fix)
        self._take_sizes_from_placement()

    def _take_sizes_from_placement(self) -> None:
        """Set nnodes and n_gpus_per_node from trainer.placement, where that lists the actor's devices."""
        try:
            main = [pool for pool in named_pools(self.placement) if pool.name == MAIN_POOL]
        except PlacementError as error:
            require(False, "placement", self.placement, str(error))
            return
        for pool in main:
            if self.n_gpus_per_node == "auto" and self.nnodes in (1, pool.nnodes):
                self.nnodes, self.n_gpus_per_node = pool.nnodes, pool.ranks_per_node
            fits = (self.nnodes, self.n_gpus_per_node) == (pool.nnodes, pool.ranks_per_node)
            fix = f"trainer.nnodes={self.nnodes} trainer.n_gpus_per_node={self.n_gpus_per_node} say something else"
            require(fits, "placement", {"actor": self.placement["actor"]}, f"{fix}; leave them out")


@dataclass(kw_only=True, slots=True)
class RayInitConfig(ConfigNode):
    """`ray_init.*`."""

    num_cpus: int | None = key(None, at_least(1), unit="CPU cores")
    """Cores Ray may use; set it under a scheduler such as SLURM. Null: all."""
    address: str | None = None
    """Address of a running Ray cluster, or auto. Null: start a local one."""
    temp_dir: str | None = None
    """Folder of the local Ray's session files. Null: a temporary one that is removed."""
    runtime_env: dict[str, Any] = key({})
    """Ray's runtime environment, for instance {env_vars: {NAME: value}}."""
    timeline_json_file: str | None = None
    """File for Ray's timeline of the run."""

    def check(self) -> None:
        given = self.runtime_env.get("env_vars", {})
        legal = isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
        require(legal, "runtime_env.env_vars", given, "write {NAME: 'text'}, numbers in quotes")
