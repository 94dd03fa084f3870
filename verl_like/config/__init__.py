"""Typed configuration. Each default lives in its dataclass; see docs/configuration.md for every key."""

from verl_like.config.actor import ActorConfig, PolicyLossConfig, RefConfig, SampleWeightConfig, ToprConfig
from verl_like.config.algorithm import AlgorithmConfig, FilterGroupsConfig, GiGPOConfig, KLControlConfig
from verl_like.config.base import ConfigNode
from verl_like.config.correction import RolloutCorrectionConfig
from verl_like.config.critic import CriticConfig
from verl_like.config.data import CustomClassConfig, DataConfig, SamplerConfig
from verl_like.config.enums import (
    AgentNormMethod,
    Device,
    FusedBackend,
    KLControlType,
    KLKind,
    Launcher,
    LoadFormat,
    OldLogProbs,
    ResumeMode,
    ReweightMethod,
    RolloutName,
    SpelledTokens,
    Strategy,
    TruncatedRows,
    Truncation,
    WarmupStyle,
)
from verl_like.config.environments import EnvConfig, EnvGroupsConfig
from verl_like.config.fsdp import FSDPConfig, WrapPolicyConfig, resolve_dtype
from verl_like.config.model import CriticModelConfig, FusedKernelConfig, LoraConfig, ModelConfig
from verl_like.config.optim import OptimConfig
from verl_like.config.outcomes import OutcomesConfig
from verl_like.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl_like.config.profiler import CheckpointConfig, ProfilerConfig
from verl_like.config.reward import CustomRewardFunctionConfig, RewardModelConfig, RewardNetworkConfig
from verl_like.config.reward_execution import JudgeConfig, SandboxConfig, SandboxFusionConfig
from verl_like.config.rollout import (
    AgentConfig,
    EngineKwargsConfig,
    GatewayConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValKwargsConfig,
)
from verl_like.config.shaping import (
    AgentRewardNormConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardNormConfig,
    RewardScalingConfig,
)
from verl_like.config.trainer import RayInitConfig, TrainerConfig

__all__ = [
    "ActorConfig", "ActorRolloutRefConfig", "AgentConfig", "AgentNormMethod", "AgentRewardNormConfig",
    "AlgorithmConfig", "CheckpointConfig", "ConfigNode", "CriticConfig", "CriticModelConfig", "CustomClassConfig",
    "CustomRewardFunctionConfig", "DataConfig", "Device", "EngineKwargsConfig", "EnvConfig", "EnvGroupsConfig",
    "FSDPConfig", "FilterGroupsConfig", "FusedBackend", "FusedKernelConfig", "GatewayConfig", "GiGPOConfig",
    "JudgeConfig", "KLControlConfig", "KLControlType", "KLKind", "Launcher", "LengthRewardConfig", "LoadFormat",
    "LoraConfig", "ModelConfig", "MultiTurnConfig", "OldLogProbs", "OptimConfig", "OutcomesConfig",
    "OverlongBufferConfig", "PFPPOConfig", "PPOConfig", "PolicyLossConfig", "ProfilerConfig", "RayInitConfig",
    "RefConfig", "ResumeMode", "RewardModelConfig", "RewardNetworkConfig", "RewardNormConfig", "RewardScalingConfig",
    "ReweightMethod", "RolloutConfig", "RolloutCorrectionConfig", "RolloutName", "SampleWeightConfig", "SamplerConfig",
    "SandboxConfig", "SandboxFusionConfig", "Strategy", "ToprConfig", "TrainerConfig", "TruncatedRows",
    "SpelledTokens", "Truncation", "ValKwargsConfig", "WarmupStyle", "WrapPolicyConfig", "resolve_dtype",
]  # fmt: skip
