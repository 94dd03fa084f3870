"""Closed sets of values. Member names equal their values, because hydra matches enum members by name."""

from enum import StrEnum


class Strategy(StrEnum):
    """How training shards a model."""

    fsdp = "fsdp"
    fsdp2 = "fsdp2"
    megatron = "megatron"


class RolloutName(StrEnum):
    """Which engine generates."""

    vllm = "vllm"
    sglang = "sglang"
    hf = "hf"


class LoadFormat(StrEnum):
    """How trained weights travel to the rollout engine: tensor by tensor, or the full state dict first."""

    dummy_dtensor = "dummy_dtensor"
    dummy_hf = "dummy_hf"


class Truncation(StrEnum):
    """What to do with a prompt longer than data.max_prompt_length."""

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


class ResumeMode(StrEnum):
    """Where a run starts from."""

    auto = "auto"
    disable = "disable"
    resume_path = "resume_path"


class KLControlType(StrEnum):
    """How the coefficient of the KL penalty in the reward moves."""

    fixed = "fixed"
    adaptive = "adaptive"


class KLKind(StrEnum):
    """Per-token estimator of KL(policy || reference)."""

    kl = "kl"
    abs = "abs"
    mse = "mse"
    low_var_kl = "low_var_kl"
    full = "full"


class WarmupStyle(StrEnum):
    """Learning-rate schedule after the linear warm-up."""

    constant = "constant"
    cosine = "cosine"


class OldLogProbs(StrEnum):
    """Where the log-probabilities of the policy before the update come from."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"
    detach = "detach"


class Device(StrEnum):
    """What the workers compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """Who starts the workers: Ray, or nobody (one rank in this process)."""

    ray = "ray"
    local = "local"


class FusedBackend(StrEnum):
    """Implementation of the fused log-prob and entropy function."""

    torch = "torch"
    triton = "triton"


class ReweightMethod(StrEnum):
    """How PF-PPO resamples responses."""

    pow = "pow"
    max_min = "max_min"
    max_random = "max_random"


LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ROLLOUT_MODES = ("sync", "async")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
LOGGERS = ("console", "jsonl", "tensorboard", "wandb")
