"""Drafts from history: tokens that a response is likely to go on with, looked up in texts instead of a second model."""
