"""Trackers beside the console and the jsonl file: services, event files, Prometheus."""
