"""Roofline of a step: the distance of each phase from what the hardware allows, and the first thing to change.

A floor is the time that the unavoidable work would take at the device's peak: operations of the forward and backward
passes, weights and cache that decoding must read, bytes that a weight sync must move. Nothing can be faster; a phase
at 1.5x its floor is very good, one at 20x has something to give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_like.models.cost import BACKWARD, ModelCost
from verl_like.parallel.device_peak import DevicePeak

_PASSES = {  # phase of the step -> (role, verl's name of its model FLOPs utilisation)
    "update_actor": ("actor", "actor"),
    "old_log_prob": ("actor", "actor_infer"),
    "ref": ("ref", "ref"),
    "update_critic": ("critic", "critic"),
    "values": ("critic", "critic_infer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Facts about a run that the floors need besides the lengths of its rows."""

    actor: ModelCost
    critic: ModelCost | None
    peak: DevicePeak  # of all devices of the main pool together
    weight_bytes: int  # of one number in the rollout engine's weights and cache
    responses_per_prompt: int
    rollout_replicas: int
    actor_epochs: int
    critic_epochs: int
    actor_shares_prompts: bool = False  # its training passes compute a prompt once for all its responses
    critic_shares_prompts: bool = False
    elsewhere: Mapping[str, DevicePeak] = field(default_factory=dict)  # role -> all devices of its own pool

    def peak_of(self, role: str) -> DevicePeak:
        """Return the peak of a role's devices together."""
        return self.elsewhere.get(role, self.peak)


def phase_flops(
    shape: RunShape,
    prompts: Sequence[int],
    responses: Sequence[int],
    repeated: Sequence[int] = (),
    forward_only: float = 0.0,
) -> dict[str, float]:
    """Count the operations that each training pass over these rows must make (lengths in tokens, one entry a row).

    repeated: tokens at each row's beginning that another row has too; passes that share prompts compute them there.
    forward_only: share of the tokens that the actor's update gives no backward pass.
    """
    totals = [p + r for p, r in zip(prompts, responses, strict=True)]
    forward = shape.actor.forward_flops(totals, sum(responses))
    if shape.actor_shares_prompts:
        forward -= shape.actor.forward_flops(repeated, 0)
    flops = {
        "old_log_prob": forward,
        "ref": forward,
        "update_actor": (1 + BACKWARD * (1 - forward_only)) * shape.actor_epochs * forward,
    }
    if shape.critic is not None:
        critic = shape.critic.forward_flops(totals, 0)
        if shape.critic_shares_prompts:
            critic -= shape.critic.forward_flops(repeated, 0)
        flops |= {"values": critic, "update_critic": (1 + BACKWARD) * shape.critic_epochs * critic}
    return flops


def generation_floor(
    shape: RunShape,
    prompts: Sequence[int],
    responses: Sequence[int],
    repeated: Sequence[int] = (),
) -> float:
    """Seconds that sampling must take: each prompt read once, then decoding, bound by operations or by memory.

    Memory: every step of a replica reads its weights once (there are at least as many steps as the longest response has
    tokens), and each new token reads its row's cache. repeated: as in `phase_flops`; none: prompts of groups.
    """
    model = shape.actor
    once, known = list(prompts[:: shape.responses_per_prompt]), list[int]()
    if repeated:
        read = [(prompt, common) for prompt, common in zip(prompts, repeated, strict=True) if common < prompt]
        once, known = [prompt for prompt, _ in read], [common for _, common in read]
    peak = shape.peak_of("rollout")
    prefill = (model.forward_flops(once, len(once)) - model.forward_flops(known, 0)) / peak.flops
    decode_flops = sum(
        model.forward_flops([p + r], r) - model.forward_flops([p], 0) for p, r in zip(prompts, responses, strict=True)
    )
    weights = shape.rollout_replicas * max(responses, default=0) * (model.body_weights + model.head_weights)
    cache = sum(model.cache_reads(p, r) for p, r in zip(prompts, responses, strict=True))
    decode_bytes = (weights + cache) * shape.weight_bytes
    return prefill + max(decode_flops / peak.flops, decode_bytes / peak.bandwidth)


def sync_floor(shape: RunShape) -> float:
    """Seconds to read the trained weights once and to write them once per replica."""
    moved = 2 * shape.rollout_replicas * shape.actor.all_weights * shape.weight_bytes
    return moved / shape.peak_of("rollout").bandwidth


def speed_metrics(
    shape: RunShape,
    seconds: Mapping[str, float],
    prompts: Sequence[int],
    responses: Sequence[int],
    repeated: Sequence[int] = (),
    forward_only: float = 0.0,
) -> dict[str, float]:
    """Compute perf/mfu/<role> and perf/floor_ratio/<phase>.

    mfu: share of the peak that useful operations reached. floor_ratio: time / floor.

    seconds: wall clock per phase, as `StepClock.seconds`; phases that did not run get no metric.
    """
    flops = phase_flops(shape, prompts, responses, repeated, forward_only)
    ran = {name: seconds[name] for name in flops if seconds.get(name, 0.0) > 0}
    floors = {name: flops[name] / shape.peak_of(_PASSES[name][0]).flops for name in ran}
    metrics = {f"perf/mfu/{_PASSES[name][1]}": floors[name] / taken for name, taken in ran.items()}
    if seconds.get("gen", 0.0) > 0:
        floors["gen"] = generation_floor(shape, prompts, responses, repeated)
    floors["update_weights"] = sync_floor(shape)
    ratios = {
        f"perf/floor_ratio/{name}": seconds[name] / floor
        for name, floor in floors.items()
        if seconds.get(name, 0.0) > 0 and floor > 0
    }
    return metrics | ratios


def speed_line(seconds: Mapping[str, float], metrics: Mapping[str, float]) -> str:
    """One line: the step's phases, largest first, each with its distance from the floor."""
    phases = {name: value for name, value in seconds.items() if name != "step"}
    parts = []
    for name, value in sorted(phases.items(), key=lambda item: -item[1])[:6]:
        ratio = metrics.get(f"perf/floor_ratio/{name}")
        parts.append(f"{name} {_seconds(value)}" + (f" ({ratio:.1f}x floor)" if ratio is not None else ""))
    return f"step {_seconds(seconds.get('step', 0.0))}: " + ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
