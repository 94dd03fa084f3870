"""SGLang as a rollout engine, in a process of its own (workers/remote_engine.py): importing it changes transformers."""
