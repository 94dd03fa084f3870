"""`trainer.*`, `ray_init.*`: the run."""

import difflib
from dataclasses import dataclass, field
from typing import Any

from verl_like.config import enums
from verl_like.config.base import ConfigNode, above, at_least, minus_one_or_positive, one_of, reference_or_none, require
from verl_like.config.pools import MAIN_POOL, PlacementError, named_pools
from verl_like.user_code import FORMS, is_reference

_CONTROLLER_NSIGHT = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}
_WORKER_NSIGHT = {**_CONTROLLER_NSIGHT, "capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}


@dataclass(kw_only=True, slots=True)
class TrainerConfig(ConfigNode):
    """`trainer.*`. A step is one rollout batch and its updates."""

    project_name: str = "verl_examples"
    """Project of the experiment trackers."""
    experiment_name: str = "gsm8k"
    """Name of the run."""
    seed: int = 1
    """Seed of everything random: initialisation, sampling of tokens, order of prompts."""
    full_determinism: bool = False
    """Two runs with the same settings on the same machine have the same metrics to the last digit: torch uses
    deterministic algorithms only (others warn), and settings whose results depend on time are refused."""
    device: enums.Device = enums.Device.auto
    """auto (CUDA when there is one), cpu or cuda."""
    mode: str = "sync"
    """sync: a step samples its batch and trains it. colocate_async: a step goes on when it has its groups; what still
    runs is paused while the policy trains, and continues under the new weights. separate_async: a pool of its own
    samples all the time (async_training.*)."""
    launcher: enums.Launcher = enums.Launcher.ray
    """ray, or local: one rank in this process, for debugging."""
    nnodes: int = 1
    """[nodes] Machines."""
    n_gpus_per_node: int | str = "auto"
    """[processes] Worker processes per machine; auto: its GPUs, or 1 on CPU."""
    placement: dict[str, Any] = field(default_factory=dict)
    """Pools of processes beside the main one (nnodes x n_gpus_per_node), and who is in them instead: {name: {roles:
    [critic, ref], nnodes: 1, n_gpus_per_node: 2}}. Or the devices of each role: {rollout: [2, 3], critic: 1}; those
    with the same numbers share a pool. Roles: rollout, ref, critic, reward; each pool has devices of its own."""
    trainer_class: str | None = None
    """A class of your own, file.py:Name, derived from verl_like.trainer.ppo.PPOTrainer. Null: that one."""
    rpc_timeout: float = 3600.0
    """[s] Longest single call to a worker. Sampling a whole step is one, with graders where they choose groups."""
    worker_start_timeout: float = 600.0
    """[s] Longest time from placing the workers until all of them are built."""
    stall_timeout: float | None = 300.0
    """[s] The run ends, or begins again (max_restarts), when workers make no progress for so long, and ten times what a
    micro-batch, an engine's step or a tensor of that size took before; three times as long where it is the first of its
    kind. Null: only rpc_timeout counts."""
    max_restarts: int = 0
    """[restarts] Begin again from the newest checkpoint when worker processes, their node or their memory are lost, or
    do not answer in time: at most so often from the same one. Set save_freq with it."""
    restart_delay: float = 10.0
    """[s] Wait before the first restart; twice as long before each further one from the same checkpoint, up to 600."""
    ray_wait_register_center_timeout: int = 300
    """[s] Longest wait for the cluster to have room for the workers."""
    balance_batch: bool = True
    """Give every process about the same number of tokens."""
    total_epochs: int = 30
    """Passes over the training data."""
    total_training_steps: int | None = None
    """[steps] Length of the run. Null: total_epochs."""
    critic_warmup: int = 0
    """[steps] Steps that train the critic alone."""
    save_freq: int | None = None
    """[steps] Save a checkpoint every so many steps, and after the last. Null: after the last; -1: only when the run is
    interrupted."""
    test_freq: int | None = None
    """[steps] Validate every so many steps, and after the last. Null: after the last; -1: never during training."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    resume_mode: enums.ResumeMode = enums.ResumeMode.auto
    """auto (the newest checkpoint of default_local_dir, where there is one), disable (afresh), resume_path. A run that
    does not resume, in a folder that holds another run's files, goes to <folder>-2."""
    resume_from_path: str | None = None
    """Checkpoint folder (global_step_N) of resume_mode=resume_path: ours, or one that verl's FSDP trainer wrote."""
    default_local_dir: str = "checkpoints"
    """Folder of checkpoints; follows project_name and experiment_name."""
    default_hdfs_dir: str | None = None
    """URL of a remote folder (hdfs://, s3://, gs://, or any that fsspec knows): each checkpoint is copied there in the
    background, and resume_mode=auto fetches the newest whole one of this run where it is newer than those of
    default_local_dir."""
    del_local_ckpt_after_load: bool = False
    """Delete a checkpoint after resuming from it."""
    best_metric: str | None = None
    """Validation metric, as val-core/openai/gsm8k/acc/mean@1: the checkpoint of the step with the best value is saved
    at once and not deleted; best_checkpoint.json in default_local_dir names it. Null: none."""
    best_mode: str = "max"
    """Whether the largest (max) or the smallest (min) value of best_metric is the best."""
    early_stop_patience: int | None = None
    """[validations] End the run, with a checkpoint, after so many without a better best_metric. Null: never."""
    max_actor_ckpt_to_keep: int | None = None
    """[checkpoints] Newest actor checkpoints to keep. Null: all."""
    max_critic_ckpt_to_keep: int | None = None
    """[checkpoints] Newest critic checkpoints to keep. Null: all."""
    max_skipped_updates: int = 10
    """[optimizer steps] End the run after a step with which so many in a row of one role were skipped, because their
    gradients were not finite; -1: never."""
    health: dict[str, str] = field(default_factory=dict)
    """What health rules do while the run goes on, as {failed_rewards: stop}: warn (also where a rule is not named),
    stop (the run ends, and its last step is saved), off. docs/report.md lists the rules."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow, swanlab, trackio, or classes of your own, file.py:Name. Metrics
    always go to a jsonl file as well."""
    logger_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of trackers, by name, as {wandb: {entity: me, tags: [a]}}: of the package's own init
    (tensorboard: of SummaryWriter; mlflow: tracking_uri and tags), or of your own class. Access keys belong into the
    environment."""
    log_dir: str | None = None
    """Folder of logs and metrics. Null: default_local_dir."""
    log_format: str = "text"
    """Form of <log_dir>/verl_like.log. json: an object a line, with time, level, logger, message, the run's id
    and, where it is about one, the episode's, which the samples have too."""
    prometheus_port: int | None = None
    """[port] Serve the newest metrics to Prometheus at http://127.0.0.1:<port>/metrics; 0: any free port. Null: not."""
    prometheus_host: str = "127.0.0.1"
    """Address at which they are served; 0.0.0.0 is to the whole network, and whoever reads them needs no password."""
    log_val_generations: int = 0
    """[samples] Validation responses shown in the trackers."""
    console_samples: int = 3
    """[samples] Responses shown on the console at the first step and at every validation; 0: none."""
    sample_freq: int = 5
    """[steps] Keep a few training responses in <log_dir>/samples every so many steps, and of the first five; of
    validations always. -1: none."""
    sample_groups: int = 2
    """[prompts] Prompts whose responses are kept at such a step: half of them by chance, half the most telling ones."""
    sample_max_mb: float = 200.0
    """[MB] Size of <log_dir>/samples; beyond it every second older step is removed."""
    report_freq: int = 20
    """[steps] Write <log_dir>/report.html every so many steps, in a process of its own, and at the end; -1: never."""
    record_freq: int = -1
    """[steps] Write what each so many-th step consists of (tokens, log-probs, rewards, advantages, checksums of the
    weights) into <log_dir>/recorded, about 30 bytes a token, for verl-like replay and bisect. -1: never."""
    rollout_data_dir: str | None = None
    """Folder for all training responses as jsonl. Null: not kept."""
    validation_data_dir: str | None = None
    """Folder for all validation responses as jsonl. Null: not kept."""
    profile_steps: list[int] | None = None
    """Steps to profile, counted from 1; traces go to <log_dir>/profile. Null: none."""
    profile_tool: enums.ProfileTool = enums.ProfileTool.torch
    """torch (a Chrome trace per rank and step) or nsys (Nsight Systems; needs CUDA and the nsys program)."""
    controller_nsight_options: dict[str, Any] = field(default_factory=lambda: dict(_CONTROLLER_NSIGHT))
    """Nsight Systems options of the driver (profile_tool=nsys)."""
    worker_nsight_options: dict[str, Any] = field(default_factory=lambda: dict(_WORKER_NSIGHT))
    """Nsight Systems options of the workers (profile_tool=nsys)."""

    def check(self) -> None:
        steps = self.profile_steps or []
        require(all(step >= 1 for step in steps), "profile_steps", steps, "steps are counted from 1")
        at_least(self, 1, "nnodes", "total_epochs", "total_training_steps", "ray_wait_register_center_timeout")
        at_least(self, 0, "seed", "critic_warmup", "log_val_generations", "console_samples")
        at_least(self, 1, "sample_groups")
        above(self, 0, "sample_max_mb")
        at_least(self, 1, "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "early_stop_patience")
        one_of(self, "best_mode", ("max", "min"))
        one_of(self, "mode", enums.TRAINER_MODES)
        alone = self.early_stop_patience is not None and self.best_metric is None
        require(not alone, "early_stop_patience", self.early_stop_patience, "set best_metric, which it watches")
        url = self.default_hdfs_dir
        legal = url is None or (url.strip() and not url.startswith(("http://", "https://")))
        require(bool(legal), "default_hdfs_dir", url, "give a URL that can be written to, as s3://bucket/run, or null")
        above(self, 0, "rpc_timeout", "worker_start_timeout", "stall_timeout")
        at_least(self, 0, "max_restarts", "restart_delay")
        minus_one_or_positive(self, "save_freq", "test_freq", "max_skipped_updates", "sample_freq", "report_freq")
        minus_one_or_positive(self, "record_freq")
        per_node = self.n_gpus_per_node
        legal = per_node == "auto" if isinstance(per_node, str) else per_node >= 1
        require(legal, "n_gpus_per_node", per_node, "must be auto or at least 1")
        for key, known in (
            ("controller_nsight_options", _CONTROLLER_NSIGHT),
            ("worker_nsight_options", _WORKER_NSIGHT),
        ):
            options = getattr(self, key)
            wrong = sorted(set(options) - set(known))
            require(not wrong, key, options, f"unknown {wrong}; choose from {', '.join(known)}")
        unknown = sorted(name for name in self.logger if name not in enums.LOGGERS and not is_reference(name))
        fix = f"unknown {unknown}; choose from {', '.join(enums.LOGGERS)}, or name a class of your own: {FORMS}"
        require(not unknown, "logger", self.logger, fix)
        for rule, action in self.health.items():
            close = difflib.get_close_matches(rule, enums.HEALTH_RULES, n=1)
            near, known = "".join(f", did you mean {name}?" for name in close), ", ".join(enums.HEALTH_RULES)
            require(rule in enums.HEALTH_RULES, "health", rule, f"no such rule{near}; the rules: {known}")
            fix = f"choose one of {', '.join(enums.HEALTH_ACTIONS)}"
            require(action in enums.HEALTH_ACTIONS or action is False, f"health.{rule}", action, fix)
        self.health = {rule: action or "off" for rule, action in self.health.items()}  # `off` is YAML's false
        for name, given in self.logger_kwargs.items():
            fix = "write {tracker: {argument: value}}, as {wandb: {tags: [a]}}; console and jsonl take none"
            legal = name not in ("console", "jsonl") and isinstance(given, dict)
            require(legal, "logger_kwargs", {name: given}, fix)
        reference_or_none(self, "trainer_class")
        one_of(self, "log_format", enums.LOG_FORMATS)
        port = self.prometheus_port
        require(port is None or 0 <= port <= 65535, "prometheus_port", port, "must lie between 0 and 65535")
        self._take_sizes_from_placement()

    def _take_sizes_from_placement(self) -> None:
        """Where trainer.placement lists the actor's devices, they are nnodes x n_gpus_per_node."""
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

    num_cpus: int | None = None
    """[CPU cores] Cores Ray may use; set it under a scheduler such as SLURM. Null: all."""
    address: str | None = None
    """Address of a running Ray cluster, or auto. Null: start a local one."""
    temp_dir: str | None = None
    """Folder of the local Ray's session files. Null: a temporary one that is removed."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray's runtime environment, for instance {env_vars: {NAME: value}}."""
    timeline_json_file: str | None = None
    """File for Ray's timeline of the run."""

    def check(self) -> None:
        at_least(self, 1, "num_cpus")
        given = self.runtime_env.get("env_vars", {})
        legal = isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
        require(legal, "runtime_env.env_vars", given, "write {NAME: 'text'}, numbers in quotes")
