"""The class of `from verl import DataProto` in samplers: without a verl/__init__.py Python looks for a module."""

import sys

from verl_like.plugins.samplers.curriculum import ScoredBatch

sys.modules[__name__] = ScoredBatch  # type: ignore[assignment]
