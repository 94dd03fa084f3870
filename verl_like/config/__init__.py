"""Typed configuration. Each default lives in its dataclass; see docs/configuration.md for every key."""

from verl_like.config.actor import ActorConfig, OldLogProbs, PolicyLossConfig, RefConfig, SampleWeightConfig, ToprConfig
from verl_like.config.algorithm import AlgorithmConfig, FilterGroupsConfig, GiGPOConfig, KLControlConfig, KLControlType
from verl_like.config.base import ConfigNode
from verl_like.config.correction import RolloutCorrectionConfig
from verl_like.config.critic import CriticConfig
from verl_like.config.data import CustomClassConfig, DataConfig, SamplerConfig, SpelledTokens, Truncation
from verl_like.config.distillation import DistillationConfig
from verl_like.config.environments import EnvConfig, EnvGroupsConfig
from verl_like.config.fsdp import FSDPConfig, Strategy, WrapPolicyConfig, resolve_dtype
from verl_like.config.model import CriticModelConfig, FusedBackend, FusedKernelConfig, LoraConfig, ModelConfig
from verl_like.config.optim import OptimConfig, WarmupStyle
from verl_like.config.outcomes import OutcomesConfig
from verl_like.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl_like.config.profiler import CheckpointConfig, ProfilerConfig
from verl_like.config.reward import CustomRewardFunctionConfig, RewardModelConfig, RewardNetworkConfig
from verl_like.config.reward_execution import JudgeConfig, SandboxConfig, SandboxFusionConfig
from verl_like.config.rollout import (
    AgentConfig,
    EngineKwargsConfig,
    GatewayConfig,
    LoadFormat,
    MultiTurnConfig,
    RolloutConfig,
    RolloutName,
    ValKwargsConfig,
)
from verl_like.config.shaping import (
    AgentNormMethod,
    AgentRewardNormConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardNormConfig,
    RewardScalingConfig,
    ReweightMethod,
    TruncatedRows,
)
from verl_like.config.trainer import Device, Launcher, RayInitConfig, ResumeMode, TrainerConfig

__all__ = [
    "ActorConfig", "ActorRolloutRefConfig", "AgentConfig", "AgentNormMethod", "AgentRewardNormConfig",
    "AlgorithmConfig", "CheckpointConfig", "ConfigNode", "CriticConfig", "CriticModelConfig", "CustomClassConfig",
    "CustomRewardFunctionConfig", "DataConfig", "Device", "DistillationConfig", "EngineKwargsConfig",
    "EnvConfig", "EnvGroupsConfig",
    "FSDPConfig", "FilterGroupsConfig", "FusedBackend", "FusedKernelConfig", "GatewayConfig", "GiGPOConfig",
    "JudgeConfig", "KLControlConfig", "KLControlType", "Launcher", "LengthRewardConfig", "LoadFormat",
    "LoraConfig", "ModelConfig", "MultiTurnConfig", "OldLogProbs", "OptimConfig", "OutcomesConfig",
    "OverlongBufferConfig", "PFPPOConfig", "PPOConfig", "PolicyLossConfig", "ProfilerConfig", "RayInitConfig",
    "RefConfig", "ResumeMode", "RewardModelConfig", "RewardNetworkConfig", "RewardNormConfig", "RewardScalingConfig",
    "ReweightMethod", "RolloutConfig", "RolloutCorrectionConfig", "RolloutName", "SampleWeightConfig", "SamplerConfig",
    "SandboxConfig", "SandboxFusionConfig", "Strategy", "ToprConfig", "TrainerConfig", "TruncatedRows",
    "SpelledTokens", "Truncation", "ValKwargsConfig", "WarmupStyle", "WrapPolicyConfig", "resolve_dtype",
]  # fmt: skip
