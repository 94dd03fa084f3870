"""Trained shards to rollout engine, and the proof that they arrived."""
