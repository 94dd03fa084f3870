"""The fixed shapes that figures are quoted for: models with random weights, and batches of prompts and responses."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


class BenchError(Exception):
    """Mistake in the options of a benchmark, told to the user: the command ends with this message alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen2 model by its sizes (vocabulary and tied embeddings: those of most). Weights are random: speed does not
    depend on them. delta_layers: gated delta rules in front of each layer of attention, which make it a Qwen3.5.
    num_experts: of each layer, two for each token, which make it a Qwen3-MoE."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int = 151_936
    tied_embeddings: bool = True
    delta_layers: int = 0
    num_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step: prompts x responses, lengths in tokens."""

    num_prompts: int
    responses_per_prompt: int
    prompt_length: int
    mean_response: int | None  # drawn around this mean and forced; None: responses end by themselves
    max_response: int

    def draw_lengths(self, seed: int) -> list[int]:
        """A length for every response: log-normal with a long tail (sigma 0.6), mean as asked, cut at the maximum."""
        assert self.mean_response is not None
        generator = random.Random(seed)
        count = self.num_prompts * self.responses_per_prompt
        raw = [generator.lognormvariate(0.0, 0.6) for _ in range(count)]
        return _scaled_to_mean(raw, self.mean_response, self.max_response)

    def response_lengths(self, seed: int) -> list[int]:
        """Draw the lengths of responses, by `draw_lengths` or as a random model of 64 words ends them.

        Such a model's responses end by themselves: each token is the last one with probability 1/64.
        """
        if self.mean_response is not None:
            return self.draw_lengths(seed)
        draw = random.Random(seed)
        return [
            next((n for n in range(1, self.max_response) if draw.random() < 1 / 64), self.max_response)
            for _ in range(self.num_prompts * self.responses_per_prompt)
        ]

    def with_rows(self, num_rows: int | None) -> Workload:
        """Copy the workload with `num_rows` rows. Raises BenchError unless these are whole groups of one prompt."""
        if num_rows is None:
            return self
        n = self.responses_per_prompt
        if num_rows < n or num_rows % n:
            near = max(n, num_rows // n * n)
            raise BenchError(f"--rows {num_rows} are no whole groups of {n} responses to a prompt: use {near}")
        return replace(self, num_prompts=num_rows // n)


def _scaled_to_mean(raw: list[float], mean: int, maximum: int) -> list[int]:
    """Lengths proportional to `raw`, within [1, maximum]; the factor is raised until the cut mean is `mean`."""
    low, high = 0.0, 1e6
    for _ in range(60):
        factor = (low + high) / 2
        lengths = [min(maximum, max(1, round(factor * value))) for value in raw]
        if sum(lengths) < mean * len(raw):
            low = factor
        else:
            high = factor
    return lengths


SMALL = ("cpu", "hybrid")  # those for CPUs
MODELS = {
    "cpu": ModelShape(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=768, vocab_size=64),
    "hybrid": ModelShape(
        hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=768, vocab_size=64, delta_layers=3
    ),
    "0.5b": ModelShape(hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, intermediate_size=4864),
    "1.5b": ModelShape(hidden_size=1536, num_layers=28, num_heads=12, num_kv_heads=2, intermediate_size=8960),
    "4b": ModelShape(hidden_size=2560, num_layers=36, num_heads=20, num_kv_heads=4, intermediate_size=9728),
    "8b": ModelShape(
        hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, intermediate_size=12_288, tied_embeddings=False
    ),
}

WORKLOADS = {
    "cpu": Workload(num_prompts=64, responses_per_prompt=8, prompt_length=16, mean_response=None, max_response=128),
    "w1": Workload(num_prompts=64, responses_per_prompt=8, prompt_length=100, mean_response=250, max_response=512),
    "w2": Workload(num_prompts=64, responses_per_prompt=8, prompt_length=150, mean_response=1500, max_response=4096),
    "w3": Workload(num_prompts=64, responses_per_prompt=8, prompt_length=150, mean_response=4000, max_response=16_384),
}
