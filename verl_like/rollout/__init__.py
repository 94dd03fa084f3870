"""Generation: one protocol, engines that run in the worker's own process (vllm, hf)."""
