"""ROLL's YAML files as our settings: reading them, and the rules of the table that look at more than one setting."""

from __future__ import annotations

import math
import re
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_like.config.errors import ConfigError
from verl_like.config.names import ROLES
from verl_like.config.spellings import Change, canonical, correction_spellings
from verl_like.kit.coming_from.importing import CARRIED, NOTHING, REFUSED, Foreign, Outcome, carry, flat
from verl_like.plugins.games.games import KINDS
from verl_like.text import one_line

_ROLES = ("actor_train", "actor_infer", "reference", "critic")
_STRATEGY = "strategy_args.strategy_config"
# ROLL's class of a reward worker -> our grader. GeneralRuleRewardWorker is none: its rows name functions (func_name),
# which `instruction` does not have, and every response would be left without a reward.
_GRADERS = {
    "MathRuleRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
}
_TOPR = ("postive_loss_coef", "positive_loss_coef", "use_topr_neg_loss_coef")
_VARIANTS = {"ppo": "vanilla", "vanilla": "policy_gradient", "topr": "topr", "cispo": "cispo", "kimi15": "dro"}
# What custom_envs.<tag> calls what env.custom.<tag> has
_ENTRY = {"env_type": "type", "agent_system_template": "system", "agent_template": "template"}
_ENTRY |= {name: name for name in ("max_steps", "max_tokens_per_step", "history_length")}
_OF_MANAGERS = ("use_thread_lock", "max_env_step_concurrent", "env_manager_cls", "agent_runner_cls")
_WITH_TURNS = ("gigpo", "step_reinforce", "agentic_reinforce")


class RollFile(Foreign):
    """One configuration of ROLL, of its RLVR pipeline or its agentic one."""

    project = "ROLL"
    why_off: ClassVar = {
        "critic": "no critic with this adv_estimator",
        "not cispo": "cispo has bounds of its own, cispo_epsilon_low and cispo_epsilon_high",
        "not grpo": "grpo normalises in the group, whatever is set",
        "clip": "normalised in their group, rewards do not reach so far",
        "policy_loss": "rl_loss_coef=0 with TOPR: loss_mode=topr takes the place of policy loss and KL",
        "vllm": "an argument of vLLM",
        "not device_mapping": "the devices of the roles say it (device_mapping)",
    }

    def __init__(self, path: Path) -> None:
        tree, text = _read(path)
        try:
            plain = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError([f"{path}: {str(error).splitlines()[0]}"]) from error
        assert isinstance(plain, dict)
        super().__init__(flat(plain), frozenset(re.findall(r"\$\{([\w.]+)\}", text)))
        self.agentic = any(name.startswith(("train_env_manager.", "custom_envs")) for name in self.leaves)
        group = "train_env_manager.group_size" if self.agentic else "num_return_sequences_in_group"
        self.responses: int = self(group, 1)
        try:
            self.prompts: int = self("rollout_batch_size") // (self.responses if self.agentic else 1)
        except (TypeError, ZeroDivisionError) as error:
            sizes = f"rollout_batch_size={self('rollout_batch_size')} and {group}={self.responses}"
            raise ConfigError([f"{path}: {sizes}: give whole numbers above 0"]) from error
        self.with_critic = self("adv_estimator") == "gae"
        self.with_topr = any(self(name, 0) for name in _TOPR) and self("rl_loss_coef", 1.0) == 0

    def is_on(self, name: str) -> bool:
        own = {
            "critic": lambda: self.with_critic,
            **{each: lambda each=each: self("actor_train.pg_variant") == each for each in ("cispo", "kimi15")},
            "turns": lambda: self("adv_estimator") in _WITH_TURNS,
            "policy_loss": lambda: not self.with_topr,
            "use_kl_loss": lambda: self("use_kl_loss") and not self.with_topr,
            "grpo": lambda: self("adv_estimator") == "grpo",
            "clip": lambda: self.agentic or self("adv_estimator") != "grpo" or not self._plain_grpo(),
            "vllm": lambda: self("actor_infer.strategy_args.strategy_name") == "vllm",
            "device_mapping": lambda: self.devices(*_ROLES),
            "prompt_length": lambda: not self.agentic or "prompt_length" in self.leaves,
        }
        return bool(own[name]() if name in own else self(name) or self.has(name))

    def idle(self, name: str) -> str:
        if name.startswith("critic.") and not self.with_critic:
            return "no critic with this adv_estimator"
        if name.startswith("reference.") and not (self.is_on("use_kl_loss") or self("add_token_level_kl")):
            return "no KL term, hence no reference"
        if name.startswith("reward_normalization.") and not self.agentic:
            return "the agentic pipeline alone reads it"
        if name == "reward_normalization.grouping" and self("adv_estimator") == "gigpo":
            return "gigpo compares what has the same start"
        if name.endswith("generating_args.max_new_tokens") and not self.agentic:
            return "overwritten there with sequence_length - prompt_length"
        return ""

    def has(self, start: str) -> bool:
        """True where the file has settings below this name."""
        return any(name.startswith(f"{start}.") for name in self.leaves)

    def devices(self, *roles: str) -> set[int]:
        """Device numbers of these roles together."""
        return {device for role in roles for device in _devices(self(f"{role}.device_mapping"))}

    def update(self, role: str) -> float:
        """Count the prompts that one optimizer step of a role takes, over all its processes."""
        training = f"{role}.training_args"
        sequences = self(f"{training}.per_device_train_batch_size", 8) * self(
            f"{training}.gradient_accumulation_steps", 1
        )
        split = self(f"{role}.model_args.ulysses_size", 1) or 1
        for name in ("tensor", "pipeline", "context"):
            suffix = "parallel_size" if name == "context" else "model_parallel_size"
            split *= self(f"{role}.{_STRATEGY}.{name}_{suffix}", 1) or 1
        return sequences * max(1, len(self.devices(role))) / (split * self.responses)

    def mini_batch(self, role: str) -> int:
        """Count the prompts of a mini-batch here, where updates are equal and of whole prompts.

        It is the largest such size not above ROLL's.
        """
        sizes = range(min(self.prompts, int(self.update(role))), 0, -1)
        return next((size for size in sizes if self.prompts % size == 0), 1)

    def rule_log_dir(self, name: str, value: str, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: "/".join(filter(None, (value.rstrip("/"), self("exp_name"))))}

    def rule_tracker(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        return {key: {self("track_with"): {name.rpartition(".")[2]: value}} for key in keys}

    def rule_resume(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        if isinstance(value, str):
            return {keys[0]: "resume_path", keys[1]: value}
        return {keys[0]: "auto" if value else "disable"}

    def rule_sleep(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value > 0} | ({keys[1]: value} if value > 1 else {})

    def rule_checkpoints(self, name: str, value: str, keys: list[str]) -> dict[str, Any]:
        if "://" not in value:
            return {keys[0]: value}
        here = self("output_dir")
        return {keys[1]: value} | ({keys[0]: here} if here else {})

    def rule_prompts(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: self.prompts}

    def rule_val_batch(self, name: str, value: int, keys: list[str]) -> Outcome | dict[str, Any]:
        if not self.agentic:
            return {keys[0]: value}
        groups, size = (self(f"val_env_manager.{name}", 1) for name in ("num_env_groups", "group_size"))
        if value == groups * size:
            return Outcome(NOTHING, note="as many as there are groups x group_size")
        return Outcome(REFUSED, note=f"a validation plays each of the {groups} groups {size} times: env.val.num_groups")

    def rule_sequence_length(self, name: str, value: int, keys: list[str]) -> Outcome | dict[str, Any]:
        if not self.agentic or "prompt_length" in self.leaves:
            if value <= (prompt := self("prompt_length")):
                raise ConfigError([f"sequence_length={value} must be above prompt_length={prompt}: both count tokens"])
            return {keys[0]: value - prompt}
        prompt = min(1024, value // 2)
        note = f"an episode's {value} tokens: {prompt} for what stands before the first answer, as good as any number"
        return Outcome(CARRIED, {keys[0]: value - prompt, keys[1]: prompt}, note)

    def rule_mini_batch(self, name: str, value: int, keys: list[str]) -> Outcome | dict[str, Any]:
        there, here = (of(name.split(".")[0]) for of in (self.update, self.mini_batch))
        why = f"an update takes {there:g} prompts there, and a whole number that divides {self.prompts} here"
        return {keys[0]: here} if here == there else Outcome(REFUSED, {keys[0]: here}, why)

    def rule_warmup(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        role = name.split(".")[0]
        updates = self.prompts // self.mini_batch(role) * (self("ppo_epochs", 1) if role == "actor_train" else 1)
        return {keys[0]: math.ceil(value / max(1, updates))}

    def rule_devices(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        used, node = self.devices(*_ROLES), self("num_gpus_per_node", 8)
        if self.samples_apart:
            used -= self.devices("actor_infer")
        if not used:
            return Outcome(NOTHING)
        nodes = 1 if max(used) < node else math.ceil((max(used) + 1) / node)
        return {keys[0]: nodes, keys[1]: len(used) if nodes == 1 else node}

    @property
    def samples_apart(self) -> bool:
        """True where the run is asynchronous, and no other role is on the devices that sample."""
        others = self.devices(*(role for role in _ROLES if role != "actor_infer"))
        return bool(self("async_generation_ratio", 0)) and bool(
            (own := self.devices("actor_infer")) and not own & others
        )

    def rule_async(self, name: str, value: float, keys: list[str]) -> Outcome | dict[str, Any]:
        if not value:
            return Outcome(NOTHING)
        mode = (
            {keys[0]: "separate_async"} | self._sampling_pool() if self.samples_apart else {keys[0]: "colocate_async"}
        )
        found = mode | {keys[1]: math.ceil(value), keys[2]: value}
        if not self.has("train_infer_correction"):  # weights that such a run needs
            found["algorithm.rollout_correction.rollout_is"] = "token"
        return found

    def _sampling_pool(self) -> dict[str, Any]:
        count, node = len(self.devices("actor_infer")), self("num_gpus_per_node", 8)
        nodes = math.ceil(count / node)
        return {
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.nnodes": nodes,
            "actor_rollout_ref.rollout.n_gpus_per_node": count if nodes == 1 else node,
        }

    def rule_estimator(self, name: str, value: str, keys: list[str]) -> Outcome | dict[str, Any]:
        if value in _WITH_TURNS:
            why = "the rewards of turns count where they were earned"
            turns = {"actor_rollout_ref.rollout.multi_turn.turn_rewards": True}
            return Outcome(CARRIED, {keys[0]: "gigpo" if value == "gigpo" else "step_reinforce"} | turns, why)
        if value != "grpo":
            return {keys[0]: value}
        if self.agentic:
            return Outcome(CARRIED, {keys[0]: "reinforce"}, "reward_normalization is what compares a group there")
        if self._plain_grpo():
            return {keys[0]: "grpo"}
        why = "ROLL's grpo: rewards normalised in their group, then clipped, punished by the KL, discounted"
        return Outcome(CARRIED, {keys[0]: "reinforce", "algorithm.reward_norm.kind": "group"}, why)

    def _plain_grpo(self) -> bool:
        """True where ROLL's grpo is ours: no step comes between its normalisation and the sum.

        No reward is further from the mean of its group than (n - 1) / sqrt(n) standard deviations.
        """
        clip = self("reward_clip") or math.inf
        reaches = clip < (self.responses - 1) / math.sqrt(self.responses)
        return self("gamma", 1) == 1 and not self("add_token_level_kl") and not reaches

    def rule_whiten(self, name: str, value: bool, keys: list[str]) -> Outcome | dict[str, Any]:
        if not self.with_critic:
            return {keys[0]: value}
        why = "advantages of gae are always whitened here, of the whole step together; ROLL trains on them as they are"
        return Outcome(NOTHING, note="gae always whitens here") if value else Outcome(REFUSED, note=why)

    def rule_variant(self, name: str, value: str, keys: list[str]) -> Outcome | dict[str, Any]:
        if value not in _VARIANTS:
            return Outcome(REFUSED, note=f"the variant is not available; {keys[0]} lists ours")
        level = {keys[0].replace("loss_mode", "topr.ratio_level"): "token"} if value == "topr" else {}
        return {keys[0]: _VARIANTS[value], **level}

    def rule_epochs(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value} | ({keys[1]: 1} if self.with_critic and value > 1 else {})

    def rule_dual_clip(self, name: str, value: bool, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: 1 + 2 * self("pg_clip", 0.2) if value else None}

    def rule_topr(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        if not value:
            return Outcome(NOTHING, note="off")
        if not self.with_topr:
            return Outcome(
                REFUSED, note="added to the policy loss: one loss at a time here (with rl_loss_coef 0: topr)"
            )
        topr = {keys[1]: "topr", keys[1].replace("loss_mode", "topr.ratio_level"): "token"}
        if isinstance(value, str):
            return Outcome(REFUSED, topr, f"{value} is a placeholder, not a number; {keys[0]} is 1")
        return {keys[0]: value, **topr}

    def rule_difficulty(self, name: str, value: bool, keys: list[str]) -> Outcome | dict[str, Any]:
        if self.responses == 1:
            return Outcome(REFUSED, note="one response is no group")
        return carry(keys, [self("difficulty_low_threshold", 0.0), self("difficulty_high_threshold", 1.0)])

    def rule_correction(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        parts = {key: item for key, item in self.leaves.items() if key.startswith("train_infer_correction.")}
        changes, _ = correction_spellings([Change(f"algorithm.{key}", item) for key, item in parts.items()])
        return {change.key: change.value for change in changes} or Outcome(NOTHING, note="off")

    def rule_deepspeed(self, name: str, value: str, keys: list[str]) -> dict[str, Any]:
        role = ROLES[name.split(".")[0]][""]
        changes, _ = canonical([Change(f"{role}.strategy", value)])
        return {change.key: change.value for change in changes}

    def rule_tensor(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        others = (
            f"{name.rpartition('.')[0]}.{other}" for other in ("context_parallel_size", "expert_model_parallel_size")
        )
        beside = next((other for other in others if (self(other, 1) or 1) > 1), None)
        if beside is None or value == 1:
            return {keys[0]: value}
        return Outcome(
            NOTHING, note=f"beside {beside} FSDP shards the weights over these processes instead; same numbers"
        )

    def rule_recompute(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        return {keys[1]: False} if value is None else {keys[0]: value, keys[1]: True}

    def rule_template(self, name: str, value: str, keys: list[str]) -> Outcome | dict[str, Any]:
        if value not in ("native", "qwen2_5", "qwen3", "chatml"):
            return Outcome(
                REFUSED, note=f"there is no template {value}: write it as Jinja and set {keys[0]} to the file"
            )
        thinks = {keys[1]: {"enable_thinking": True}} if value == "qwen3" else {}
        return {keys[0]: "chatml" if value == "chatml" else "native", **thinks}

    def rule_domain_weights(self, name: str, value: float, keys: list[str]) -> Outcome | dict[str, Any]:
        start, _, domain = name.rpartition(".")
        domains = [each.rpartition(".")[2] for each in self.leaves if each.startswith(f"{start}.")]
        tags = {each: self(f"rewards.{each}.tag_included") or [] for each in domains}
        if len(tags) == 1:
            return Outcome(NOTHING, note="one domain is all there is")
        told = "; ".join(f"{each} is {', '.join(own) or 'no tag'}" for each, own in tags.items() if len(own) != 1)
        if not told:
            return {keys[0]: {tags[domain][0]: value}}
        return Outcome(
            REFUSED, note=f"shares belong to tags here, and {told}: write data.domain_weights={{tag: share}}"
        )

    def rule_sampling(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        if not self.agentic:
            return {keys[0]: value}
        validation = [keys[0].replace("rollout.", "rollout.val_kwargs.")]
        validation += [f"{validation[0].rpartition('.')[0]}.do_sample"] if name.endswith("temperature") else []
        return {keys[0]: value} | (
            carry(validation, value) if len(validation) == 1 else self.rule_val_temperature(name, value, validation)
        )

    def rule_val_temperature(self, name: str, value: float, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value, keys[1]: value > 0}

    def _domain(self, name: str) -> tuple[str, str]:
        """Return the worker class of a reward setting's domain, and our grader."""
        start = ".".join(name.split(".")[:2])
        kind = str(self(f"{start}.worker_cls", "")).rpartition(".")[2]
        judged = kind == "LLMJudgeRewardWorker" and self(f"{start}.judge_api_url")
        return kind, "judge" if judged else _GRADERS.get(kind, "")

    def rule_reward_method(self, name: str, value: str, keys: list[str]) -> Outcome | dict[str, Any]:
        if self("adv_estimator") != "gigpo":
            return {keys[0]: value}
        if value not in ("mean", "mean_std"):
            return Outcome(REFUSED, note="gigpo takes mean or mean_std")
        return {"algorithm.norm_adv_by_std_in_grpo": value == "mean_std"}

    def played(self) -> set[str]:
        """Tags of either manager."""
        return {tag for role in ("train", "val") for tag in self(f"{role}_env_manager.tags") or []}

    def rule_turn_length(self, name: str, value: int, keys: list[str]) -> Outcome | dict[str, Any]:
        bounds = {tag: self.leaves.get(f"custom_envs.{tag}.max_tokens_per_step") for tag in self.played()}
        if not bounds:
            return Outcome(REFUSED, note="data.max_response_length is the length of a response")
        if all(bound is not None and bound <= value for bound in bounds.values()):
            return Outcome(NOTHING, note="max_tokens_per_step is less")
        return Outcome(REFUSED, note=f"set max_tokens_per_step={value} in env.custom.<tag>")

    def rule_custom_env(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        _, tag, *path = name.split(".", 4)  # what a vocabulary explains may be a dot
        if tag not in self.played():
            return Outcome(NOTHING, note="no manager plays it")
        if path[:1] == ["env_config"] and len(path) > 1:
            own = {"format_penalty": "format_penalty", "env_instruction": "instruction"}.get(path[1])
            place = [own] if own else ["config", *path[1:]]
        else:
            place = [_ENTRY.get(path[0], "") if path else ""]
        kind = self.leaves.get(f"custom_envs.{tag}.env_type")
        if kind not in KINDS:
            return Outcome(
                REFUSED, note=f"{kind} is none of {', '.join(KINDS)}: name a class of yours as {keys[0]}.type"
            )
        if place == ["config", *path[1:]] and path[1] not in signature(KINDS[kind]).parameters:
            return Outcome(REFUSED, note=f"no argument of {kind}")
        if place == [""]:
            known = path and path[0] in _OF_MANAGERS
            manager = str(value).rpartition(".")[2]
            if known and (path[0] != "env_manager_cls" or manager in ("TrajEnvManager", "StepEnvManager")):
                return Outcome(
                    NOTHING, note="environments run in processes of their own; history_length tells the managers apart"
                )
            return Outcome(REFUSED, note="there is no counterpart")
        nested: Any = value
        for part in reversed([tag, *place]):
            nested = {part: nested}
        return Outcome(NOTHING, note="nothing is set") if value is None else {keys[0]: nested}

    def rule_grader(self, name: str, value: list[str], keys: list[str]) -> Outcome | dict[str, Any]:
        kind, grader = self._domain(name)
        tag = {keys[1]: self("actor_train.data_args.tag", "tag")}
        if grader == "judge":
            return {"reward_model.weights": {each: {"judge": 1.0} for each in value}, **tag}
        if not grader:
            server, own = "start a server and set reward_model.judge.url", f"{keys[0]}={{tag: file.py:name}}"
            fix = server if "Judge" in kind else own
            return Outcome(REFUSED, tag, f"no grader of ours is {kind}: {fix}")
        return {keys[0]: dict.fromkeys(value, grader), **tag}

    def rule_graders(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        sizes = [size for each, size in self.leaves.items() if re.fullmatch(r"rewards\.[^.]+\.world_size", each)]
        return {keys[0]: sum(sizes)}


def _devices(value: Any) -> list[int]:
    """Device numbers of `list(range(0,8)) + [9]`, `0-7`, or a list; read, never evaluated."""
    if value is None or isinstance(value, list):
        return [int(each) for each in value or []]
    text, found = str(value), []
    for match in re.finditer(r"range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(\d+)\s*)?\)|(\d+)\s*-\s*(\d+)|(\d+)", text):
        start, stop, step, low, high, alone = (None if part is None else int(part) for part in match.groups())
        if alone is not None:
            found.append(alone)
        elif low is not None and high is not None:
            found += range(low, high + 1)
        elif start is not None:
            found += range(start, stop, step or 1) if stop is not None else range(start)
    return found


def _read(path: Path, above: tuple[Path, ...] = ()) -> tuple[DictConfig, str]:
    """The file merged over the files that its `defaults` name, and all their text. above: the files that led to it."""
    if not path.is_file():
        raise ConfigError([f"{path}: {'a folder: name a file in it' if path.is_dir() else 'there is no such file'}"])
    chain = (*above, path.resolve())
    if chain[-1] in above:
        raise ConfigError([f"{path} includes itself, by `defaults`: {' -> '.join(each.name for each in chain)}"])
    try:
        tree, text = OmegaConf.load(path), path.read_text()
    except Exception as error:  # yaml's errors have no common class of their own
        raise ConfigError([f"{path} cannot be read as YAML: {one_line(error)}"]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([f"{path} must hold keys, as ROLL's configurations do"])
    parts: list[DictConfig] = []
    defaults = tree.get("defaults")
    if not isinstance(defaults, ListConfig | None):
        raise ConfigError([f"{path}: defaults={defaults} must be a list of files: write `defaults: [{defaults}]`"])
    for entry in defaults or []:
        name, _, package = str(entry).partition("@")
        base = name.rpartition("/")[2]
        if base.startswith("deepspeed_"):  # a preset of DeepSpeed's settings, which have our own counterpart
            parts.append(OmegaConf.create({base: {"deepspeed": base}}))
        elif base != "_self_":
            places = [path.parent / f"{name}.yaml", path.parent / "config" / f"{base}.yaml"]
            below, more = _read(next((place for place in places if place.is_file()), places[0]), chain)
            outside = package in ("", "_here_", "_global_")
            parts.append(below if outside else OmegaConf.create({package: below}))
            text += more
    merged = OmegaConf.merge(*parts, tree)
    assert isinstance(merged, DictConfig)
    return merged, text
