"""vLLM as a rollout engine, in the worker's own process or in one beside it (workers/remote_engine.py)."""
