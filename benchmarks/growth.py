"""How cost grows with model, batch and sequence length: computed for a GPU's data sheet, or measured on small shapes.

    python -m benchmarks.growth --gpu H200 --gpus 1      # computed: floors and memory, models x workloads
    python -m benchmarks.growth --measure --threads 1    # measured here: one optimizer step, each size doubled twice

Formulas: models/cost.py (operations, cache), kit/speed/roofline.py (floors), models/memory.py (bytes).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from benchmarks.growth_measured import measured
from verl_like.config import FSDPConfig
from verl_like.kit.bench.inputs import model_config
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, ModelShape, Workload
from verl_like.kit.bench.sync import link_floor
from verl_like.kit.forecast.model import Model
from verl_like.kit.speed.roofline import RunShape, generation_floor, phase_flops, sync_floor
from verl_like.kit.verbs.bench import files, positive
from verl_like.models.cost import ModelCost
from verl_like.models.memory import Path, Shape
from verl_like.parallel.device_peak import DevicePeak, data_sheet, known_devices, link_bandwidth

_REACHABLE = 0.4  # share of the peak that a good update reaches
_BYTES = 2  # bfloat16


def main(words: list[str] | None = None) -> Report:
    """Print the tables."""
    arguments = _arguments(words)
    if arguments.measure:
        return finish(measured(arguments), arguments.json, arguments.compare)
    times, memory = floors(arguments), memory_of(arguments)
    finish(times, arguments.json, arguments.compare)
    print()
    finish(memory, arguments.json and arguments.json.with_stem(f"{arguments.json.stem}_memory"), None)
    return times


def _arguments(words: list[str] | None) -> argparse.Namespace:
    small, loads = [name for name in MODELS if name != "cpu"], [name for name in WORKLOADS if name != "cpu"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=known_devices(), default="H200", help="whose data sheet")
    parser.add_argument("--gpus", type=positive, default=1, help="how many; each is a rank and a replica")
    parser.add_argument("--models", choices=sorted(MODELS), nargs="+", default=small)
    parser.add_argument("--workloads", choices=sorted(WORKLOADS), nargs="+", default=loads)
    parser.add_argument("--budget", type=positive, default=16_384, help="tokens of a micro-batch, for the memory")
    parser.add_argument("--measure", action="store_true", help="measure small shapes here instead")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads (default: all cores)")
    files(parser)
    return parser.parse_args(words)


def floors(arguments: argparse.Namespace) -> Report:
    """One row for each model and workload: the least seconds of every phase."""
    sheet = data_sheet(arguments.gpu)
    assert sheet is not None  # --gpu offers those alone
    one = DevicePeak(flops=sheet[0], bandwidth=sheet[1], source="data sheet")
    rows = [
        floor_row(f"{model}, {load}", MODELS[model], WORKLOADS[load], one, arguments)
        for model in arguments.models
        for load in arguments.workloads
    ]
    notes = [
        f"Computed, not measured: the least seconds on {arguments.gpus} x {arguments.gpu}, each of "
        f"{one.flops / 1e12:,.0f} TFLOP/s (dense bfloat16) and {one.bandwidth / 1e12:.2f} TB/s. gen: every prompt read "
        "once, then the larger of operations and of bytes: weights, once a decode step (as many as the longest "
        "response has tokens), and cache; KV share: of those bytes. log-prob: one forward pass. update: forward and "
        f"backward pass, then at {_REACHABLE:.0%} of the peak. sync: weights read and written once. KV GB: cache of "
        "all responses.",
    ]
    return Report(bench="growth", work=_work(arguments), rows=rows, notes=notes, hardware=_of_sheet(arguments))


def floor_row(name: str, shape: ModelShape, workload: Workload, one: DevicePeak, arguments: argparse.Namespace) -> Row:
    """Floors of one step on `gpus` devices, each a replica of the engine."""
    cost = ModelCost.of(model_config(shape, workload.prompt_length + workload.max_response))
    responses = workload.response_lengths(seed=1)
    prompts = [workload.prompt_length] * len(responses)
    run = RunShape(
        actor=cost,
        critic=None,
        peak=one.times(arguments.gpus),
        weight_bytes=_BYTES,
        responses_per_prompt=workload.responses_per_prompt,
        rollout_replicas=arguments.gpus,
        actor_epochs=1,
        critic_epochs=1,
    )
    flops = phase_flops(run, prompts, responses)
    cache = sum(cost.cache_reads(p, r) for p, r in zip(prompts, responses, strict=True))
    weights = arguments.gpus * max(responses) * (cost.body_weights + cost.head_weights)
    sync = max(sync_floor(run), link_floor(_BYTES * cost.all_weights, arguments.gpus, link_bandwidth(arguments.gpu)))
    update = flops["update_actor"] / run.peak.flops
    tokens_with_cache = workload.num_prompts * workload.prompt_length + sum(responses)  # each prompt once
    columns = {
        "M tokens": (sum(prompts) + sum(responses)) / 1e6,
        "gen s": generation_floor(run, prompts, responses),
        "KV share": cache / (cache + weights),
        "log-prob s": flops["old_log_prob"] / run.peak.flops,
        "update s": update,
        f"at {_REACHABLE:.0%}": update / _REACHABLE,
        "sync ms": 1000 * sync,
        "KV GB": _BYTES * cost.cache_width * len(cost.windows) * tokens_with_cache / 1e9,
    }
    return Row(name=name, figures=columns)


def memory_of(arguments: argparse.Namespace) -> Report:
    """One row for each model: gigabytes of one rank."""
    rows = []
    for name in arguments.models:
        config = model_config(MODELS[name], 128)
        shape = Shape.of(config, ModelCost.of(config))
        kept, trained = (
            Model(
                name="actor",
                shape=shape,
                path=Path(c=_BYTES, recompute=recompute),
                fsdp=FSDPConfig(),
                shards=arguments.gpus,
                master=4,
                trained=shape.all_weights,
                state=8.0,
                alone=arguments.gpus == 1,
                values=False,
            ).update(arguments.budget, arguments.budget, 2)
            for recompute in ("none", "full")
        )
        columns = {part.removeprefix("actor "): size / 1e9 for part, size in trained.items()}
        columns |= {"total": sum(trained.values()) / 1e9, "activations kept": kept["activations"] / 1e9}
        columns |= {"engine's weights": _BYTES * shape.all_weights / 1e9}
        rows.append(Row(name=name, figures=columns))
    notes = [
        f"Gigabytes of one of {arguments.gpus} rank(s), computed: AdamW with float32 master weights, gradients and "
        f"states, bfloat16 compute, micro-batches of {arguments.budget:,} tokens; activations and total with "
        "checkpointing, activations kept: without it. engine's weights: bfloat16, one replica a rank, while generating."
    ]
    hardware = _of_sheet(arguments)
    return Report(bench="growth, memory", work=_work(arguments), rows=rows, notes=notes, hardware=hardware)


def _work(arguments: argparse.Namespace) -> dict[str, Any]:
    models = {name: asdict(MODELS[name]) for name in arguments.models}
    loads = {name: asdict(WORKLOADS[name]) for name in arguments.workloads}
    return {"models": models, "workloads": loads, "budget": arguments.budget}


def _of_sheet(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"device": f"the data sheet of {arguments.gpu}", "devices": arguments.gpus}


if __name__ == "__main__":
    main()
