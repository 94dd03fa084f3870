"""`distillation.*`: teachers whose distributions the policy learns on its own responses, under verl's names."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from verl_like.config.base import ConfigNode, above, at_least, at_most, key, on_menu, one_of, require, section
from verl_like.config.endpoint import WEB_ADDRESS, EndpointConfig
from verl_like.config.fsdp import DTYPES
from verl_like.config.menus import KL_KINDS, LOSSES

TOP_K = "forward_kl_topk"
FULL = {"reverse_kl_full": "full_kl", "jsd": "jsd"}  # loss_mode -> what the engine calls it
ESTIMATORS = tuple(name for name, row in KL_KINDS.items() if row.code and not name.endswith("+"))
LOSS_MODES = (*ESTIMATORS, TOP_K, *FULL)
_ROLE = "teacher"
SOLE = "teacher_model"  # the name of verl's one teacher


@dataclass(kw_only=True, slots=True)
class DistillationLossConfig(ConfigNode):
    """`distillation.distillation_loss.*`."""

    loss_mode: str = key("k3", one_of(*LOSS_MODES))
    """Distance of the policy from its teacher at each token ([formulas](distillation.md#losses)): an estimate by the
    sampled token (k1, k2, k3, abs), the teacher's likeliest tokens (forward_kl_topk), or the whole vocabulary
    (reverse_kl_full, jsd)."""
    topk: int = key(32, at_least(1), unit="tokens", idle="loss_mode is not forward_kl_topk")
    """Likeliest tokens of the teacher that forward_kl_topk compares."""
    add_tail: bool = key(False, idle="loss_mode is not forward_kl_topk")
    """Add what forward_kl_topk leaves out as one more outcome: the probability of all tokens but the topk. False: it is
    only shown (distillation/tail_kl)."""
    kd_temperature: float | None = key(None, above(0))
    """Temperature of both distributions in forward_kl_topk, reverse_kl_full and jsd. Null: rollout.temperature, that of
    the responses."""
    use_task_rewards: bool = True
    """Add the loss to that of the rewards. False: the teachers alone are learnt from."""
    distillation_loss_coef: float = key(1.0, at_least(0), idle="use_task_rewards is false")
    """Weight of the loss beside that of the rewards."""
    loss_max_clamp: float | None = key(None, above(0))
    """Largest distance of a token, on both sides of 0. Null: no bound."""
    log_prob_min_clamp: float | None = key(None, at_most(0), idle="loss_mode is not forward_kl_topk")
    """Smallest log-prob that forward_kl_topk counts with, of both models. Null: no bound."""
    use_policy_gradient: bool = False
    """Take the negative distance as the advantage of the sampled token. False: its gradient is the loss's."""
    policy_loss_mode: str = key(
        "vanilla",
        on_menu("actor_rollout_ref.actor.policy_loss.loss_mode", *(n for n, row in LOSSES.items() if not row.selects)),
        idle="use_policy_gradient is false",
    )
    """Policy loss of use_policy_gradient (verl has vanilla alone)."""
    clip_ratio: float = key(0.2, at_least(0), idle="use_policy_gradient is false")
    """Clip range of that loss's ratio, both sides."""
    clip_ratio_low: float | None = key(None, at_least(0), idle="use_policy_gradient is false")
    """Lower side of the clip range. Null: clip_ratio."""
    clip_ratio_high: float | None = key(None, at_least(0), idle="use_policy_gradient is false")
    """Upper side of the clip range. Null: clip_ratio."""


@dataclass(kw_only=True, slots=True)
class TeacherInferenceConfig(EndpointConfig):
    """`distillation.teacher_model.inference.*`: how a teacher is computed, here or by a server."""

    url: str | None = key(None, WEB_ADDRESS)
    """Server that tells the teacher's log-probs, as in http://host:8000/v1; model_path then names its tokenizer. Null:
    the teacher is a frozen model of the run."""
    name: str = key("vllm", one_of("vllm", "sglang", "openai"))
    """Server at url: vLLM's, SGLang's, or another one whose completions echo a prompt with its log-probs."""
    dtype: str = key("auto", one_of(*DTYPES))
    """Precision of the teacher; auto: bfloat16 on CUDA, float32 on CPU."""
    tensor_model_parallel_size: int = key(1, at_least(1), unit="processes")
    """Neighbouring processes that split the teacher's matrices among them."""
    max_num_batched_tokens: int | None = key(None, at_least(1), unit="tokens")
    """Token budget of one forward pass on one process. Null: cut as the actor's pass for old log-probs
    (rollout.log_prob_*)."""
    free_cache_engine: bool = True
    """Keep the weights in CPU memory while nobody asks the teacher."""


@dataclass(kw_only=True, slots=True)
class TeacherModelConfig(ConfigNode):
    """`distillation.teacher_model.*`: the one teacher of a run."""

    model_path: str | None = None
    """Folder of the teacher, its name on the hub, or a URL, as actor_rollout_ref.model.path. Its tokenizer must be the
    policy's."""
    num_replicas: int = key(0, at_least(0), unit="copies")
    """Copies of the teacher's weights in its pool, each spread over as many processes; 0: one."""
    inference: TeacherInferenceConfig = section(TeacherInferenceConfig)
    """How it is computed."""
    log_probs_file: str | None = None
    """Parquet file with the teacher's log-probs of known responses ([columns](distillation.md#teachers))."""
    # Last: its name hides the function that declares keys
    key: str | None = None
    """Rows whose teacher_key has this value are this teacher's. Null: its name in teacher_models. A sole teacher has
    all rows."""


@dataclass(kw_only=True, slots=True)
class DistillationConfig(ConfigNode):
    """`distillation.*`: on-policy distillation ([distillation](distillation.md))."""

    enabled: bool = False
    """Learn from teachers on the policy's own responses."""
    nnodes: int = key(0, at_least(0), unit="machines")
    """Machines of the teachers' own pool; 0: teachers are in the main pool, or where trainer.placement says."""
    n_gpus_per_node: int = key(8, at_least(1), unit="processes", idle="nnodes is 0")
    """Processes of that pool on each machine."""
    teacher_key: str = "data_source"
    """What of a row chooses among several teachers: data_source, ability, agent_name, or a name in extra_info."""
    hint_key: str | None = None
    """Name of a text in a row's extra_info that the teacher alone sees, behind the last user message. Null: none."""
    teacher_model: TeacherModelConfig = section(TeacherModelConfig)
    """The teacher, where there is one."""
    teacher_models: dict[str, Any] = key({})
    """Several teachers by name, each with the keys of teacher_model."""
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)
    """What is learnt from them."""

    def check(self) -> None:
        for name, entry in self.teacher_models.items():
            _read(TeacherModelConfig, f"teacher_models.{name}", entry)

    @property
    def alone(self) -> bool:
        """True where the loss of the rewards is left out."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def compares(self) -> bool:
        """True where policy and teacher read the same rows, in the update, over the whole vocabulary."""
        return self.enabled and self.distillation_loss.loss_mode in FULL

    def teachers(self) -> dict[str, "Teacher"]:
        """Teachers by the name of their role, in the order in which rows count them; none where it is off."""
        return _teachers(self) if self.enabled else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """One teacher. place: the section with its keys."""

    place: str
    config: TeacherModelConfig
    rows: str  # value of teacher_key whose rows are its own

    @property
    def name(self) -> str:
        return self.place.rpartition(".")[2]

    @property
    def path(self) -> str:
        return self.config.model_path or ""

    @property
    def local(self) -> bool:
        """True where it is a frozen model of the run."""
        return self.config.inference.url is None and self.config.log_probs_file is None


def is_teacher(role: str) -> bool:
    """True for the name of a teacher's role."""
    return role.startswith(_ROLE)


def _teachers(config: DistillationConfig) -> dict[str, Teacher]:
    entries = {f"models.{n}": _read(TeacherModelConfig, n, entry) for n, entry in config.teacher_models.items()}
    if config.teacher_model.model_path is not None or config.teacher_model.log_probs_file is not None:
        entries = {"model": config.teacher_model}
    found = [_teacher(f"distillation.teacher_{name}", entry) for name, entry in entries.items()]
    names = [_ROLE] if len(found) == 1 else [f"{_ROLE}_{each.name}" for each in found]
    return dict(zip(names, found, strict=True))


def _teacher(place: str, config: TeacherModelConfig) -> Teacher:
    return Teacher(place=place, config=config, rows=config.key or place.rpartition(".")[2])


def _read(kind: type[Any], place: str, entry: Any) -> Any:
    """Build a section of an open dictionary. Raises ValueError "key=value: fix"."""
    types: dict[str, Any] = {each.name: each.type for each in fields(kind)}
    require(isinstance(entry, Mapping), place, entry, f"give a mapping of {', '.join(types)}")
    given: dict[str, Any] = {}
    for name, value in entry.items():
        near = difflib.get_close_matches(str(name), types, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        require(name in types, f"{place}.{name}", value, f"{hint}there are {', '.join(types)}")
        given[name] = _read(types[name], f"{place}.{name}", value) if is_dataclass(types[name]) else value
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from error
