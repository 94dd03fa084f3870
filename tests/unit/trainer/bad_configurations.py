"""Configurations that cannot be meant, drawn by a seed from the table of keys: values of another type, out of range, on
no menu; and from a table of keys that contradict others, the machine, the model, or name what is not there."""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType

from verl_like.config.schema import Key, keys

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
TURNS = f"{ROLLOUT}.multi_turn"
VAL = f"{ROLLOUT}.val_kwargs"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def run(data, base_url, api_key):
    return 1.0
"""
CLOSED = "http://127.0.0.1:9/v1"  # nothing listens at the port `discard`


@dataclass(frozen=True, slots=True)
class Bad:
    """One configuration: what is wrong in it, and what the rest must be for the key to count. {folder}, {model} and
    {train} in a value are places of `sound`."""

    key: str
    value: str
    around: Mapping[str, str] = field(default_factory=dict)

    def settings(self, folder: Path, model: Path) -> dict[str, str]:
        """All of it, by key."""
        places = {"{folder}": str(folder), "{model}": str(model), "{train}": f"{folder}/train.jsonl"}
        settings = {**sound(folder, model), **self.around, self.key: self.value}
        for name, place in places.items():
            settings = {key: value.replace(name, place) for key, value in settings.items()}
        return settings


def sound(folder: Path, model: Path) -> dict[str, str]:
    """A configuration with which nothing is wrong; its files are written to `folder`."""
    rows = [
        {"data_source": "d", "prompt": [{"role": "user", "content": f"{i}+1="}], "reward_model": {"ground_truth": "1"}}
        for i in range(8)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    for name, content in (("bytes", b"a\xff"), ("bytes.yaml", b"a\xff"), ("nothing", b""), ("open.yaml", b"a: [1")):
        (folder / name).write_bytes(content)
    return {
        f"{ROLLOUT}.agent.num_workers": "1",  # each is a Python that starts
        "data.train_files": "{train}",
        "data.val_files": "[]",
        "data.train_batch_size": "4",
        "data.max_prompt_length": "8",
        "data.max_response_length": "4",
        f"{MODEL}.path": str(model),
        f"{ACTOR}.ppo_mini_batch_size": "4",
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.n": "2",
        "custom_reward_function.path": "{folder}/reward.py",
        "algorithm.adv_estimator": "grpo",
        "trainer.launcher": "local",
        "trainer.device": "cpu",
        "trainer.total_training_steps": "1",
        "trainer.default_local_dir": "{folder}/out",
        "trainer.report_freq": "-1",
    }


def of_another_type(key: Key) -> Iterator[str]:
    """Values that no reader of this key could use, as they stand on a command line."""
    kinds = typing.get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    if bool in kinds:
        yield from ("perhaps", "7", "[true]", "{a: 1}")
    elif any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds):
        yield from ("nonesuch", "[]", "17")
    elif int in kinds or float in kinds:
        yield "nan"
        yield from () if str in kinds else ("many", "[1,2]", "{a: 1}")
        yield from () if float in kinds else ("1.5", "-7", "1180591620717411303424")
    elif str in kinds:
        yield from ("[a,b]", "{a: 1}")
    elif typing.get_origin(key.type) is dict:
        yield from ("text", "[1]", "3")


def odd_values() -> list[Bad]:
    """Those of every key, in the order of the table."""
    found = [Bad(key.path, value) for key in keys().values() for value in of_another_type(key)]
    return [case for case in found if case.key != f"{ROLLOUT}.server" or case.value != "{a: 1}"]  # verl's section


_NO_GRADER = {"custom_reward_function.path": "null"}
_RAY = {"trainer.launcher": "ray"}
_LORA = {f"{MODEL}.lora_rank": "2"}
_VALIDATED = {"data.val_files": "{train}"}
_VLLM = {f"{ROLLOUT}.name": "vllm"}
_PROGRAM = {f"{ROLLOUT}.gateway.path": "{folder}/reward.py:run"}
_CLASSES = f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"

CONTRADICTIONS = (
    # sizes against memory and each other
    Bad(f"{ROLLOUT}.n", "10000000"),
    Bad(f"{ROLLOUT}.n_redundant", "10000000"),
    Bad(f"{VAL}.n", "1000000000", {**_VALIDATED, f"{VAL}.do_sample": "true", f"{VAL}.temperature": "1"}),
    Bad("custom_reward_function.num_workers", "100000"),
    Bad("data.filter_overlong_prompts_workers", "100000", {"data.filter_overlong_prompts": "true"}),
    Bad(f"{ROLLOUT}.agent.num_workers", "100000", {f"{ROLLOUT}.gateway.path": "{folder}/reward.py:compute_score"}),
    Bad("trainer.n_gpus_per_node", "1000000", _RAY),
    Bad("ray_init.num_cpus", "1000000", _RAY),
    Bad(f"{ROLLOUT}.max_num_seqs", "1000000000000", _VLLM),
    Bad(f"{MODEL}.lora_rank", "65"),
    Bad("data.train_batch_size", "1000"),
    Bad(f"{ACTOR}.ppo_mini_batch_size", "3"),
    Bad(f"{ACTOR}.ppo_mini_batch_size", "5"),
    Bad("data.max_prompt_length", "500"),
    Bad("data.max_response_length", "1000000"),
    Bad(f"{ROLLOUT}.max_model_len", "5"),
    Bad(f"{ROLLOUT}.tensor_model_parallel_size", "2"),
    Bad(f"{ACTOR}.ulysses_sequence_parallel_size", "2"),
    Bad(f"{ACTOR}.fsdp_config.tensor_parallel_size", "3"),
    Bad("trainer.nnodes", "2"),
    Bad("trainer.nnodes", "2", _RAY),
    Bad("trainer.n_gpus_per_node", "2"),
    Bad("custom_reward_function.timeout", "1e30"),
    Bad("trainer.stall_timeout", "1e30"),
    Bad("custom_reward_function.memory_limit_mb", "1000000000000000"),
    Bad("algorithm.rollout_correction.rollout_token_veto_threshold", "3"),
    Bad(f"{ACTOR}.entropy_coeff", "inf"),
    # sampling
    Bad(f"{ROLLOUT}.min_tokens", "9"),
    Bad(f"{VAL}.min_tokens", "4", {**_VALIDATED, f"{VAL}.max_tokens": "2"}),
    Bad(f"{VAL}.max_tokens", "2", {**_VALIDATED, f"{ROLLOUT}.min_tokens": "3"}),
    Bad(f"{VAL}.max_tokens", "99", _VALIDATED),
    Bad(f"{ROLLOUT}.bad_words", "[words]"),
    Bad(f"{ROLLOUT}.bad_words", "[' ']"),
    Bad(f"{ROLLOUT}.stop", "['']"),
    Bad(f"{ROLLOUT}.stop_token_ids", "[999]"),
    Bad(f"{VAL}.stop_token_ids", "[999]", _VALIDATED),
    Bad(f"{ROLLOUT}.stop_token_ids", "[-1]"),
    Bad(f"{ROLLOUT}.do_sample", "false"),
    # module names, arguments of others
    Bad(f"{MODEL}.target_modules", "[nope_proj]", _LORA),
    Bad(f"{MODEL}.target_modules", "'.*nope'", _LORA),
    Bad(f"{MODEL}.target_modules", "'(('", _LORA),
    Bad(f"{MODEL}.exclude_modules", "[nope_proj]", _LORA),
    Bad(f"{MODEL}.exclude_modules", "'.*'", _LORA),
    Bad(_CLASSES, "[Nope]"),
    Bad(_CLASSES, "[Qwen2DecoderLayer,Nope]"),
    Bad(f"{MODEL}.override_config", "{nope: 1}"),
    Bad(f"{ROLLOUT}.engine_kwargs.vllm", "{block_sise: 16}", _VLLM),
    # what is not there
    Bad(f"{MODEL}.path", "/nowhere/at/all"),
    Bad(f"{MODEL}.path", "{train}"),
    Bad(f"{MODEL}.external_lib", "nowhere_at_all"),
    Bad("data.tokenizer", "nowhere/at/all"),
    Bad("critic.model.path", "/nowhere", {"algorithm.adv_estimator": "gae"}),
    Bad("data.train_files", "/nowhere.parquet"),
    Bad("data.val_files", "{a: /nowhere.parquet}"),
    Bad("data.prompt_key", "nowhere"),
    Bad("data.chat_template", "/nowhere.jinja"),
    Bad("data.custom_cls.path", "/nowhere.py:D"),
    Bad("data.sampler.class_path", "/nowhere.py:S"),
    Bad("data.domain_weights", "{nowhere: 1}"),
    Bad("custom_reward_function.path", "/nowhere.py"),
    Bad("custom_reward_function.path", "pkg://nowhere.at_all"),
    Bad("custom_reward_function.name", "nowhere"),
    Bad("custom_reward_function.reward_kwargs", "{nowhere: 1}"),
    Bad("reward_model.rule", "nonesuch", _NO_GRADER),
    Bad("reward_model.rule", "/nowhere.py:grade", _NO_GRADER),
    Bad("reward_model.model.path", "/nowhere", {**_NO_GRADER, "reward_model.enable": "true"}),
    Bad("trainer.trainer_class", "/nowhere.py:T"),
    Bad("algorithm.adv_estimator", "/nowhere.py:a"),
    Bad("trainer.resume_from_path", "/nowhere/global_step_3", {"trainer.resume_mode": "resume_path"}),
    Bad("trainer.resume_from_path", "{model}", {"trainer.resume_mode": "resume_path"}),
    Bad(f"{TURNS}.tool_config_path", "/nowhere.yaml", {f"{TURNS}.enable": "true"}),
    Bad(f"{ROLLOUT}.agent.agent_loop_config_path", "/nowhere.yaml"),
    Bad(f"{ROLLOUT}.gateway.path", "/nowhere.py:run"),
    Bad("trainer.logger", "[nonesuch]"),
    Bad("env.train.tags", "[nowhere]"),
    # addresses
    Bad("ray_init.address", "127.0.0.1:9", _RAY),
    Bad("ray_init.address", "nowhere.invalid:6379", _RAY),
    Bad("ray_init.address", "not an address", _RAY),
    Bad("ray_init.address", "ray://127.0.0.1:10001", _RAY),
    Bad("ray_init.num_cpus", "4", {**_RAY, "ray_init.address": "127.0.0.1:9"}),
    Bad("reward_model.judge.url", CLOSED, _NO_GRADER),
    Bad("reward_model.judge.url", "http://nowhere.invalid/v1", _NO_GRADER),
    Bad("reward_model.judge.url", "http://host:port/v1", _NO_GRADER),
    Bad("reward_model.judge.url", "127.0.0.1:9", _NO_GRADER),
    Bad("reward_model.sandbox_fusion.url", CLOSED),
    Bad(f"{ROLLOUT}.gateway.host", "nowhere.invalid", _PROGRAM),
    Bad(f"{ROLLOUT}.gateway.command", "/nowhere/program --fast"),
    Bad(f"{ROLLOUT}.gateway.command", "''"),
    Bad("trainer.prometheus_port", "99999"),
    Bad("ray_init.temp_dir", "/etc/passwd", _RAY),
    Bad("ray_init.temp_dir", "/tmp/" + 60 * "a", _RAY),
    Bad("ray_init.timeline_json_file", "/etc/passwd/timeline.json", _RAY),
    Bad("ray_init.runtime_env", "{env_vars: {A: 1}}", _RAY),
    # keys of which one rules out the other
    Bad("critic.enable", "false", {"algorithm.adv_estimator": "gae"}),
    Bad("trainer.critic_warmup", "3"),
    Bad("trainer.val_only", "true"),
    Bad("trainer.resume_mode", "resume_path"),
    Bad("trainer.early_stop_patience", "2"),
    Bad("trainer.device", "tpu"),
    Bad(f"{MODEL}.use_liger", "true"),
    Bad(f"{MODEL}.fused_kernel_options.impl_backend", "triton"),
    Bad(f"{ROLLOUT}.quantization", "fp8", _VLLM),
    Bad(f"{ROLLOUT}.name", "openai"),
    Bad(f"{TURNS}.enable", "true"),
    Bad("data.system_prompt", "auto"),
)

# paths that are no files or folders of this machine, files that hold something else, addresses of another form
PLACES = (
    *(
        Bad(key, "~nosuchuser/x", around)
        for key, around in {
            "trainer.default_local_dir": {},
            "trainer.log_dir": {},
            "data.train_files": {},
            "data.chat_template": {},
            "data.tokenizer": {},
            f"{MODEL}.path": {},
            f"{MODEL}.lora_adapter_path": {},
            "custom_reward_function.path": {},
            "trainer.resume_from_path": {"trainer.resume_mode": "resume_path"},
            f"{TURNS}.tool_config_path": {f"{TURNS}.enable": "true"},
            f"{ROLLOUT}.agent.agent_loop_config_path": {},
        }.items()
    ),
    *(Bad("trainer.default_local_dir", value) for value in ("' '", "s3://bucket/run", "hdfs://host/run")),
    Bad("env.render_save_dir", "{train}"),
    Bad("ray_init.timeline_json_file", "{folder}", _RAY),
    Bad("trainer.default_hdfs_dir", "http://127.0.0.1:9/run"),
    Bad("trainer.default_hdfs_dir", "nosuch://host/run"),
    Bad("custom_reward_function.path", "{folder}"),
    Bad("custom_reward_function.path", "s3://bucket/reward.py"),
    Bad("custom_reward_function.path", "pkg://"),
    Bad("data.chat_template", "{folder}/bytes"),
    Bad("data.chat_template", "{folder}/nothing"),
    Bad(f"{TURNS}.tool_config_path", "{folder}/open.yaml", {f"{TURNS}.enable": "true"}),
    Bad(f"{TURNS}.tool_config_path", "{folder}/bytes.yaml", {f"{TURNS}.enable": "true"}),
    Bad(f"{TURNS}.interaction_config_path", "{folder}/open.yaml", {f"{TURNS}.enable": "true"}),
    Bad(f"{ROLLOUT}.agent.agent_loop_config_path", "{folder}/open.yaml"),
    Bad(f"{ROLLOUT}.gateway.host", "' '", _PROGRAM),
    Bad("ray_init.address", "127.0.0.1:99999", _RAY),
    Bad("ray_init.address", "https://127.0.0.1:6379", _RAY),
    Bad("ray_init.address", "':6379'", _RAY),
    Bad("ray_init.address", "Auto", _RAY),
    Bad(f"{ACTOR}.optim.betas", "[a,b]"),
)


def drawn(count: int, seed: int) -> list[Bad]:
    """So many of them, a fifth from the table of contradictions, which read the model and the data."""
    chance = random.Random(seed)
    some = chance.sample(CONTRADICTIONS, min(count // 5, len(CONTRADICTIONS)))
    return some + chance.sample(odd_values(), count - len(some))
