"""Generation with guesses from history beside generation without: the hf engine, one process, epochs of equal prompts.

    python -m benchmarks.drafts --temperature 0.6 --prompts 8 --n 8
    python -m benchmarks.drafts --temperature 1.0 --prompts 4 --n 2 --repeat

Weights stay what they are, seeds are other ones in each epoch. --repeat: the model is the story model with its logits
times twenty, as sure of itself as a policy late in training. Prints the seconds of each epoch (of CPU, or on a device
by the clock) and their ratio.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.rollout import RolloutName, SpeculativeConfig
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import init_distributed
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams, request_seed

STORY_MODEL = Path(__file__).parents[2] / "shared/data/stories260k/hf"
BEGINNINGS = (
    "Once upon a time there was a little girl named Lily.",
    "Tom and his dog went to the park.",
    "One day, a big bear found a red ball.",
    "Sara liked to play with her toy car.",
    "The sun was hot and the cat was sleepy.",
    "Mom made a cake for Tim's birthday.",
    "A bird sat in a tree and sang.",
    "Ben had a boat that could fly.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(STORY_MODEL), help="folder of the model")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=200, help="longest response")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["none", "ngram", "history"])
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    tokenizer, model = AutoTokenizer.from_pretrained(arguments.model), ModelConfig(path=arguments.model)
    weights = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    process = init_distributed(0, 1, 0, 1, "127.0.0.1", 29_577, arguments.device)
    engines = {}
    for method in arguments.methods:
        rollout = RolloutConfig(name=RolloutName.hf, speculative=SpeculativeConfig(method=method))
        sizes = {"tokenizer_size": len(tokenizer), "max_model_len": arguments.tokens + 64, "seed": 1}
        facts = {"process": process, "hf_config": load_hf_config(model), "run_id": f"drafts-{method}"}
        engines[method] = build_rollout_engine(rollout, model, **facts, **sizes)
        engines[method].load_weights(((k, v.detach()) for k, v in weights.named_parameters()), 0)
    prompts = [tokenizer.encode(text) for text in (BEGINNINGS * arguments.prompts)[: arguments.prompts]]
    temperature = arguments.temperature / (20 if arguments.repeat else 1)
    sampling = SamplingParams(
        temperature=temperature, max_tokens=arguments.tokens, stop_token_ids=(tokenizer.eos_token_id,)
    )
    earlier: dict[int, list[np.ndarray]] = {}
    for epoch in range(arguments.epochs):
        asked = [
            GenerationRequest(
                request_id=f"{epoch}-{prompt}-{sample}",
                prompt_ids=ids,
                sampling=sampling,
                seed=request_seed(1, epoch, prompt, sample),
                drafts=tuple(earlier.get(prompt, [])[-8:]),
            )
            for prompt, ids in enumerate(prompts)
            for sample in range(arguments.n)
        ]
        seconds, done = {}, []
        for method, engine in engines.items():
            began = clock()
            done = engine.generate(asked)
            seconds[method] = clock() - began
            tokens, drafted, kept = (
                sum(column) for column in zip(*((len(c.sampled), c.drafted, c.kept) for c in done), strict=True)
            )
            ratio = seconds[arguments.methods[0]] / seconds[method]
            print(
                f"epoch {epoch + 1}, {method}: {seconds[method]:.2f} s ({ratio:.2f} x), {tokens:,} tokens, "
                f"{drafted:,} guessed, {kept:,} kept",
                flush=True,
            )
        for request, completion in zip(asked, done, strict=True):
            earlier.setdefault(int(request.request_id.split("-")[1]), []).append(completion.sampled.token_ids)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
