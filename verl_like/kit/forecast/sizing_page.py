"""docs/gpu_sizing.md, made from the memory forecast: `python -m verl_like.kit.forecast.sizing_page`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from verl_like.config import PPOConfig
from verl_like.config.roles import ACTOR, roles_of
from verl_like.kit.docs.configuration import filled
from verl_like.kit.forecast.memory import GIB, Machine, changed, forecast, largest_budget, largest_share, tokens_of
from verl_like.kit.forecast.traffic import bubble, by_axis
from verl_like.kit.speed.roofline import RunShape, generation_floor, phase_flops, sync_floor
from verl_like.models.cost import ModelCost
from verl_like.models.memory import Shape, cache_token_bytes
from verl_like.parallel.device_peak import DevicePeak, data_sheet
from verl_like.trainer.compose import compose

PAGE = Path(__file__).parents[3] / "docs" / "gpu_sizing.md"
TWIN = PAGE.parent / "assets" / "twin.json"
MACHINES = {"1 x 24 GB": (1, 24e9), "1 x 80 GB": (1, 80e9), "8 x 80 GB": (8, 80e9)}
_SIZES = {  # hidden, layers, heads, key-value heads, inner, vocabulary, tied: Qwen2.5's published configs
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
_EXPERTS = {  # hidden, layers, heads, key-value heads, inner of an expert, experts, those of a token: Qwen3's
    "30B-A3B": (2048, 48, 32, 4, 768, 128, 8),
    "235B-A22B": (4096, 94, 64, 4, 1536, 128, 8),
}
_FSDP = "actor_rollout_ref.actor.fsdp_config"
_REF = "actor_rollout_ref.ref.fsdp_config.param_offload"
_ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS: dict[str, dict[str, object]] = {  # the first that fits is told
    "defaults": {},
    "optimizer offloaded": {f"{_FSDP}.optimizer_offload": True},
    "all offloaded": {f"{_FSDP}.optimizer_offload": True, f"{_FSDP}.param_offload": True, _REF: True},
    "LoRA 32": {"actor_rollout_ref.model.lora_rank": 32},
    "offload_policy": {f"{_FSDP}.offload_policy": True, _REF: True},
}
_MESHES: tuple[tuple[str, int, dict[str, int]], ...] = (  # model, devices, sizes of axes
    *(("30B-A3B", 8, {} if size == 1 else {"expert": size}) for size in (1, 4, 8)),
    *(("235B-A22B", 64, {} if size == 1 else {"expert": size}) for size in (1, 8, 64)),
    *(("32B", 8, {axis: size}) for axis in ("tensor", "pipeline") for size in (2, 4, 8)),
    ("32B", 8, {}),
)
_ROW_MACHINES = ((1, 80), (1, 141), (8, 80), (8, 141))  # devices, GB of each
_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
_PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
_BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_BASE = [
    "data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128", "data.max_prompt_length=1024", "data.max_response_length=3072",
]  # fmt: skip


def shape_of(name: str) -> Shape:
    """A published size; its weights are counted as in the model (biases of q, k and v included)."""
    hidden, layers, heads, kv_heads, inner, vocab, tied = _SIZES[name]
    head = hidden // heads
    keys = kv_heads * head
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + hidden + 2 * keys + 2 * hidden
    root = vocab * hidden * (1 if tied else 2) + hidden
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        inner=inner,
        vocab=vocab,
        normed_heads=False,
        all_weights=layers * layer + root,
        root_weights=root,
        tied=tied,
    )


def experts_shape(name: str) -> Shape:
    """A published mixture of experts; its weights are counted as in the model."""
    hidden, layers, heads, kv_heads, inner, experts, chosen = _EXPERTS[name]
    head, vocab = 128, 151_936
    expert_weights, root = 3 * hidden * inner * experts, 2 * vocab * hidden + hidden
    layer = 2 * hidden * head * (heads + kv_heads) + 2 * head + 2 * hidden + hidden * experts + expert_weights
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_size": head}
    sizes |= {
        "inner": inner * chosen,
        "chosen": chosen,
        "vocab": vocab,
        "expert_weights": expert_weights,
        "root_weights": root,
    }
    return Shape(**sizes, normed_heads=True, all_weights=layers * layer + root, tied=False)


def page() -> str:
    """The whole page: its own text, with the tables."""
    config = compose(_BASE)
    tables = {
        "settings": (f"- {name}: {_keys(values)}" for name, values in SETTINGS.items()),
        "fits": itertools.chain.from_iterable(_table(config, machine) for machine in MACHINES),
        "longest": _longest_rows(config),
        "meshes": _meshes(config),
        "times": _roofline(),
        "twin": _twin_table(),
    }
    texts = {name: "\n".join(table) for name, table in tables.items()}
    return filled(PAGE.read_text(encoding="utf-8"), texts, by="kit.forecast.sizing_page")


def _keys(values: dict[str, object]) -> str:
    return ", ".join(f"`{key}={str(value).lower()}`" for key, value in values.items()) or "no key changed"


def _table(config: PPOConfig, machine: str) -> Iterator[str]:
    world, capacity = MACHINES[machine]
    yield f"## {machine}\n"
    yield "| model | first that fits | utilization | update | largest budget | cached tokens |"
    yield "|---|---|---|---|---|---|"
    for name in _SIZES:
        yield _row(config, name, Machine(on_cpu=False, world=world, capacity=capacity))
    yield ""


def _row(config: PPOConfig, name: str, machine: Machine) -> str:
    shape = shape_of(name)
    predict = partial(forecast, actor=shape, critic=None, machine=machine)
    for setting, values in SETTINGS.items():
        tried = changed(config, values)
        told = predict(tried)
        share = largest_share(tried, predict, 0.9)
        budget = largest_budget(changed(tried, {_BUDGET: 131_072}), "update_actor", predict)
        if share is None or budget is None or set(told.too_large()) - {"gen", "update_actor"}:
            continue
        gen = predict(changed(tried, {f"{_ROLLOUT}.gpu_memory_utilization": share})).phases["gen"]
        cached = world_tokens(gen["KV cache"], shape, machine)
        update = told.total("update_actor") / GIB
        return f"| {name} | {setting} | {share:.2f} | {update:.1f} | {budget:,} | {cached:,} |"
    return f"| {name} | none | | | | |"


def world_tokens(cache: float, shape: Shape, machine: Machine) -> int:
    """Tokens in the caches of all replicas, in thousands rounded down."""
    return int(cache / cache_token_bytes(shape, 2)) * machine.world // 1000 * 1000


def _longest_rows(config: PPOConfig) -> Iterator[str]:
    """Rows of the table of longest rows."""
    yield "| model | " + " | ".join(f"{gpus} x {gb} GB" for gpus, gb in _ROW_MACHINES) + " |"
    yield "|---|" + "---|" * len(_ROW_MACHINES)
    for name in _SIZES:
        yield f"| {name} | " + " | ".join(_longest_row(config, name, *machine) for machine in _ROW_MACHINES) + " |"


def _longest_row(config: PPOConfig, name: str, gpus: int, gigabytes: int) -> str:
    """Thousands of tokens; "-" where not even 1,000 fit."""
    shape, machine = shape_of(name), Machine(on_cpu=False, world=gpus, capacity=gigabytes * 1e9)
    parallel = max(n for n in (1, 2, 4, 8) if gpus % n == 0 and shape.heads % n == 0)
    low, high = 0, 1024
    while low < high:
        middle = (low + high + 1) // 2
        row = {"data.max_prompt_length": 500, "data.max_response_length": 1000 * middle - 500}
        mesh = {f"{role}.ulysses_sequence_parallel_size": parallel for role in _ROLES}
        mesh |= {f"{role}.fsdp_config.context_parallel_size": gpus // parallel for role in _ROLES}
        tried = changed(config, SETTINGS["all offloaded"] | row | mesh | {_BUDGET: 1000 * -(-middle // gpus)})
        fits = "update_actor" not in forecast(tried, shape, None, machine).too_large()
        low, high = (middle, high) if fits else (low, middle - 1)
    return f"{low:,}k" if low else "-"


def _meshes(config: PPOConfig) -> Iterator[str]:
    """Rows of the table of meshes."""
    axes, row = ("shard", "expert", "tensor", "pipe"), config.data.max_prompt_length + config.data.max_response_length
    yield f"| model | devices | mesh | weights, gradients, states | update | bubble | {' | '.join(axes)} |"
    yield "|---|---|---|---|---|---|" + "---|" * len(axes)
    for name, world, sizes in _MESHES:
        machine = Machine(on_cpu=False, world=world, capacity=None)
        shape = experts_shape(name) if name in _EXPERTS else shape_of(name)
        keys = {f"{role}.fsdp_config.{axis}_parallel_size": n for role in _ROLES for axis, n in sizes.items()}
        tried = changed(config, SETTINGS["all offloaded"] | keys)
        parts = forecast(tried, shape, None, machine).phases["update_actor"]
        role, stages = roles_of(tried)[ACTOR], sizes.get("pipeline", 1)
        tokens, count = tokens_of(tried, role, "update", world, row)
        sent = by_axis(role, shape, machine, tokens, count)
        own = sum(parts[part] for part in ("actor weights", "gradients", "actor optimizer"))
        idle = f"{bubble(stages, count):.0%}" if stages > 1 else ""
        mesh = ", ".join(f"{axis} {n}" for axis, n in sizes.items()) or "FSDP alone"
        cells = [f"{sent[axis] / 1e9:,.0f}" if axis in sent else "" for axis in axes]
        told = [name, str(world), mesh, f"{own / GIB:.1f}", f"{sum(parts.values()) / GIB:.1f}", idle, *cells]
        yield f"| {' | '.join(told)} |"


def _roofline() -> Iterator[str]:
    """Rows of the table of times."""
    yield "| model | devices | work | " + " | ".join(_PHASES) + " | step |"
    yield "|---|---|---|" + "---|" * (len(_PHASES) + 1)
    for name in ("1.5B", "7B", "32B"):
        for device, count in (("H100", 1), ("H200", 1), ("H200", 8)):
            for work, (prompt, response) in {"W1": (100, 250), "W2": (150, 1500)}.items():
                seconds = _floors(name, device, count, prompt, response)
                total = sum(seconds.values())
                cells = " | ".join(f"{s:.1f} s ({s / total:.0%})" for s in seconds.values())
                yield f"| {name} | {count} x {device} | {work} | {cells} | {total:.1f} s |"


def _floors(name: str, device: str, count: int, prompt: int, response: int) -> dict[str, float]:
    """Seconds of each phase at the devices' peak."""
    shape, sheet = shape_of(name), data_sheet(device)
    assert sheet is not None
    cost = ModelCost(
        body_weights=shape.all_weights - shape.root_weights, head_weights=shape.vocab * shape.hidden,
        all_weights=shape.all_weights, attention_width=shape.queries, cache_width=2 * shape.keys,
        windows=(None,) * shape.layers,
    )  # fmt: skip
    peak = DevicePeak(flops=sheet[0], bandwidth=sheet[1], source="data sheet").times(count)
    run = RunShape(actor=cost, critic=None, peak=peak, weight_bytes=2, responses_per_prompt=8, rollout_replicas=count,
                   actor_epochs=1, critic_epochs=1, actor_shares_prompts=True)  # fmt: skip
    rows = ([prompt] * 512, [response] * 512, [prompt if i % 8 else 0 for i in range(512)])
    flops = {phase: number / peak.flops for phase, number in phase_flops(run, *rows).items()}
    return {
        "gen": generation_floor(run, *rows),
        **{p: flops[p] for p in _PHASES[1:-1]},
        "update_weights": sync_floor(run),
    }


def _twin_table() -> Iterator[str]:
    """Rows of the table that tests/twin/figures.py has measured."""
    if not TWIN.exists():
        return
    phases = ("old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
    yield "| configuration | ranks | " + " | ".join(phases) + " |"
    yield "|---|---|" + "---|" * len(phases)
    for row in json.loads(TWIN.read_text(encoding="utf-8")):
        cells = [row["phases"].get(phase) for phase in phases]
        told = [
            f"{peak:.2f} ({told / peak - 1:+.0%})" if cell else "" for cell in cells for peak, told in [cell or (1, 1)]
        ]
        yield f"| {row['name']} | {row['ranks']} | " + " | ".join(told) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
