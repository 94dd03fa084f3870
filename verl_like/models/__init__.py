"""Hugging Face models as the engine runs them: packed input, per-token output."""
