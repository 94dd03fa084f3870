"""verl_like: PPO and GRPO training of language models on a hybrid engine (FSDP + vLLM/SGLang in the same processes)."""

__version__ = "0.1.0"
