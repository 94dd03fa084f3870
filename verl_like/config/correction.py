"""`algorithm.rollout_correction.*`: what to do where the rollout engine's probabilities are not the trainer's.

The keys are verl's; docs/rollout_correction.md explains them. Standard library only.
"""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, between, key, one_of, require

IS_LEVELS = ("token", "segment", "geometric", "sequence")
RS_OPTIONS = tuple(
    f"{level}_{statistic}"
    for level in ("token", "segment_mean", "seq_mean", "seq_sum", "seq_max")
    for statistic in ("k1", "k2", "k3", "diff")
    if level != "seq_max" or statistic in ("k2", "k3")
)
LOSS_TYPES = ("ppo_clip", "reinforce")

Threshold = float | int | str | None


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(ConfigNode):
    """`algorithm.rollout_correction.*`: weights and rejections against the mismatch of trainer and rollout engine.

    `algorithm.rollout_correction.preset=<name>` sets all of them at once; keys set after it win.
    """

    rollout_is: str | None = key(None, one_of(*IS_LEVELS))
    """Importance weights trainer / sampler on the policy loss: token, segment (mean over a turn), geometric (mean over
    the row), sequence (product over the row). Null: none."""
    rollout_is_threshold: float | int | str | None = key(2.0, unit="ratio", idle="rollout_is is not set")
    """Cap of the weights (truncated importance sampling). "low_high", for instance "0.5_5.0": weights outside become 0
    (IcePop). Null: no cap."""
    rollout_is_batch_normalize: bool = key(False, idle="rollout_is is not set")
    """Divide the weights by their mean over the whole batch."""
    rollout_rs: str | None = None
    """Rejections, comma-separated, all must pass: {token, segment_mean, seq_mean, seq_sum}_{k1, k2, k3, diff},
    seq_max_{k2, k3}. Null: none."""
    rollout_rs_threshold: float | int | str | None = key(None, idle="rollout_rs is not set")
    """Bounds of rollout_rs, one for all or comma-separated. k1: "low_high" of the ratio sampler / trainer (a number x:
    1/x to x). diff: "low_high" of the probability trainer - sampler. k2, k3: an upper bound."""
    # Of ratios, which are about 1
    rollout_token_veto_threshold: float | None = key(None, above(0), between(0, 1), unit="ratio")
    """Reject a row in which any token's ratio trainer / sampler is below this. Null: off."""
    bypass_mode: bool = False
    """Take the sampler's log-probs as the old ones: no extra pass (actor.old_log_probs=rollout)."""
    loss_type: str = key("ppo_clip", one_of(*LOSS_TYPES))
    """Policy loss with bypass_mode: ppo_clip (policy_loss.loss_mode; its ratio corrects already) or reinforce
    (-log-prob x advantage x the weights of rollout_is)."""

    def check(self) -> None:
        weight_bounds(self.rollout_is_threshold)
        parse_rejections(self.rollout_rs, self.rollout_rs_threshold)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A closed interval; None: open on that side."""

    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Rejection:
    """One entry of rollout_rs: tokens or rows whose statistic leaves the bounds are rejected.

    The bounds of k1 are ratios sampler / trainer, those of all others are values of the statistic.
    """

    level: str
    statistic: str
    bounds: Bounds

    @property
    def name(self) -> str:
        return f"{self.level}_{self.statistic}"


def weight_bounds(threshold: Threshold) -> Bounds:
    """rollout_is_threshold as bounds: (None, C) truncates at C, (low, high) sets weights outside to 0."""
    key = "rollout_is_threshold"
    if threshold is None:
        return Bounds(None, None)
    low, high = _split(key, threshold)
    if low is None:
        # "0.5_5" without quotes and decimals is the number 0.55 to YAML and to the command line.
        fix = 'a cap below 1 cuts weights that are right; for two bounds write "low_high" with decimals: "0.5_5.0"'
        require(high >= 1, key, threshold, fix)
    else:
        require(0 <= low <= 1 <= high, key, threshold, 'two bounds "low_high" must enclose 1')
    return Bounds(low, high)


def parse_rejections(options: str | None, threshold: Threshold) -> tuple[Rejection, ...]:
    """rollout_rs with its thresholds. Raises ValueError that names the key, its value and the fix."""
    names = _parts(options)
    if not names:
        return ()
    require(threshold is not None, "rollout_rs_threshold", threshold, f"rollout_rs={options!r} needs a bound")
    limits = _parts(str(threshold)) if isinstance(threshold, str) else [threshold]
    fix = f"give one bound, or one for each of the {len(names)} options of rollout_rs"
    require(len(limits) in (1, len(names)), "rollout_rs_threshold", threshold, fix)
    limits = limits * len(names) if len(limits) == 1 else limits
    return tuple(_rejection(name, limit) for name, limit in zip(names, limits, strict=True))


def _rejection(name: str, limit: Threshold) -> Rejection:
    require(name in RS_OPTIONS, "rollout_rs", name, f"choose from {', '.join(RS_OPTIONS)}")
    level, _, statistic = name.rpartition("_")
    key = "rollout_rs_threshold"
    low, high = _split(key, limit)
    if statistic == "k1":
        fix = f'{name} takes ratios, "low_high" with 0 < low <= high, or one number of 1 or more'
        require(high > 0 and (low is None or low > 0), key, limit, fix)
        low = 1 / high if low is None else low
        require(low <= high, key, limit, fix)
    elif statistic == "diff":
        fix = f'{name} takes differences of probabilities, "low_high", for instance "-0.2_0.2"'
        require(low is not None and low <= high, key, limit, fix)
    else:
        require(low is None and high > 0, key, limit, f"{name} takes one upper bound above 0")
    return Rejection(level, statistic, Bounds(low, high))


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _split(key: str, limit: Threshold) -> tuple[float | None, float]:
    """ "low_high" or one number."""
    numbers = str(limit).split("_")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    legal = len(values) in (1, 2) and all(value == value for value in values)
    require(legal, key, limit, 'write a number, or "low_high", for instance "0.5_2.0"')
    return (None, values[0]) if len(values) == 1 else (values[0], values[1])


def corrects(correction: RolloutCorrectionConfig) -> bool:
    """Return True where anything but bypass_mode is asked for."""
    return correction.rollout_is is not None or rejects(correction)


def rejects(correction: RolloutCorrectionConfig) -> bool:
    """Return True where tokens or rows may be rejected."""
    return bool(_parts(correction.rollout_rs)) or correction.rollout_token_veto_threshold is not None
