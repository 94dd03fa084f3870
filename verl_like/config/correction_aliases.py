"""Presets and other spellings of `algorithm.rollout_correction.*`: those of verl 0.5 and 0.6, and ROLL's.

A spelling here may depend on several keys at once, so all settings are translated together, before the key-by-key
table of aliases.py. Standard library only.
"""

from dataclasses import dataclass
from typing import Any

from verl_like.config.errors import ConfigError

_SECTION = "algorithm.rollout_correction"
_ROLL = "algorithm.train_infer_correction"
_TIS = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_GEO, _K3, _SEQ = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01), ("seq_sum_k1", "0.5_2.0")
_ICEPOP = "0.5_5.0"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that the user sets: a dotted key and a plain value."""

    key: str
    value: Any


def _preset(
    weights: str | None = None,
    threshold: float | str = 2.0,
    rejection: tuple[str | None, float | str | None] = (None, None),
    bypass: str | None = None,
) -> dict[str, Any]:
    """All keys of the section, so that a later preset leaves nothing of an earlier one."""
    return {
        "rollout_is": weights,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": False,
        "rollout_rs": rejection[0],
        "rollout_rs_threshold": rejection[1],
        "rollout_token_veto_threshold": None,
        "bypass_mode": bypass is not None,
        "loss_type": bypass or "ppo_clip",
    }


# Names and numbers of verl's RolloutCorrectionConfig class methods.
PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _preset(),
    "decoupled_token_is": _preset("token"),
    "decoupled_seq_is": _preset("sequence"),
    "decoupled_token_icepop": _preset("token", _ICEPOP),
    "decoupled_seq_is_rs": _preset("sequence", rejection=_SEQ),
    "decoupled_geo_rs": _preset(rejection=_GEO),
    "decoupled_geo_rs_seq_tis": _preset("sequence", rejection=_GEO),
    "decoupled_geo_rs_token_tis": _preset("token", rejection=_GEO),
    "decoupled_k3_rs": _preset(rejection=_K3),
    "decoupled_k3_rs_seq_tis": _preset("sequence", rejection=_K3),
    "decoupled_k3_rs_token_tis": _preset("token", rejection=_K3),
    "bypass_ppo_clip": _preset(bypass="ppo_clip"),
    "bypass_ppo_clip_geo_rs": _preset(rejection=_GEO, bypass="ppo_clip"),
    "bypass_ppo_clip_k3_rs": _preset(rejection=_K3, bypass="ppo_clip"),
    "bypass_pg_is": _preset("sequence", bypass="reinforce"),
    "bypass_pg_token_icepop": _preset("token", _ICEPOP, bypass="reinforce"),
    "bypass_pg_geo_rs": _preset(rejection=_GEO, bypass="reinforce"),
    "bypass_pg_geo_rs_seq_tis": _preset("sequence", rejection=_GEO, bypass="reinforce"),
    "bypass_pg_geo_rs_token_tis": _preset("token", rejection=_GEO, bypass="reinforce"),
}

# rollout_rs of verl 0.6 -> the option that computes the same.
_OLD_OPTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1", "k3": "seq_mean_k3"}
_ROLL_LEVELS = {"token": "token", "segment": "segment_mean", "geometric": "seq_mean", "sequence": "seq_sum"}


def correction_spellings(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Settings under today's names, and one warning line for each translation.

    As everywhere, a later setting wins over an earlier one: so does a preset, with a warning.
    Raises ConfigError for an unknown preset and for a setting that is not offered.
    """
    warnings: list[str] = []
    changes = _with_presets(changes, warnings)
    result: list[Change] = []
    for change in changes:
        value = change.value
        if change.key == _TIS:
            new = "rollout_is=token with rollout_is_threshold"
            warnings.append(f"{_TIS} is another spelling of {_SECTION}.{new}; use them")
            result += _set(rollout_is="token", rollout_is_threshold=value) if value is not None and value > 0 else []
        elif change.key == f"{_SECTION}.use_policy_gradient":
            kind = "reinforce" if value else "ppo_clip"
            warnings.append(f"{change.key} is another spelling of {_SECTION}.loss_type; use loss_type={kind}")
            result += _set(loss_type=kind)
        elif not change.key.startswith((f"{_ROLL}.", f"{_SECTION}.rollout_rs")):
            result.append(change)
    return result + _roll(changes, warnings) + _rejection_settings(changes, warnings), warnings


def _with_presets(changes: list[Change], warnings: list[str]) -> list[Change]:
    """Each preset replaced by the keys it sets."""
    result: list[Change] = []
    for change in changes:
        if change.key != f"{_SECTION}.preset":
            result.append(change)
            continue
        before = {earlier.key: earlier.value for earlier in result}
        expanded = _expanded(change.value)
        lost = [c for c in expanded if c.key in before and before[c.key] != c.value]
        if lost:
            shown = ", ".join(f"{c.key}={before[c.key]}" for c in lost)
            warnings.append(f"{change.key}={change.value} overrides {shown}, set before it; write the preset first")
        result += expanded
    return result


def _set(**values: Any) -> list[Change]:
    return [Change(f"{_SECTION}.{name}", value) for name, value in values.items()]


def _expanded(name: Any) -> list[Change]:
    if name is None:
        return []
    if name not in PRESETS:
        raise ConfigError([f"{_SECTION}.preset={name}: choose one of {', '.join(PRESETS)}"])
    return _set(**PRESETS[name])


def _rejection_settings(changes: list[Change], warnings: list[str]) -> list[Change]:
    """rollout_rs and its bounds; a list as text, and verl 0.6's names with their separate lower bound."""
    given = {c.key.removeprefix(f"{_SECTION}."): c.value for c in changes if c.key.startswith(f"{_SECTION}.rollout_rs")}
    lower = given.pop("rollout_rs_threshold_lower", None)
    settings = {name: _joined(value) for name, value in given.items()}
    option, upper = settings.get("rollout_rs"), settings.get("rollout_rs_threshold")
    if isinstance(option, str) and option in _OLD_OPTIONS:
        settings["rollout_rs"] = _OLD_OPTIONS[option]
        warnings.append(f"{_SECTION}.rollout_rs={option} is another spelling of rollout_rs={_OLD_OPTIONS[option]}")
    if lower is not None:
        warnings.append(f'{_SECTION}.rollout_rs_threshold_lower is another spelling of rollout_rs_threshold="low_high"')
        if not isinstance(upper, int | float):
            fix = "needs rollout_rs_threshold to be one number, the upper bound"
            raise ConfigError([f"{_SECTION}.rollout_rs_threshold_lower={lower}: {fix}"])
        # These bounds are ratios trainer / sampler; k1's are sampler / trainer.
        settings["rollout_rs_threshold"] = f"{1 / float(upper)}_{1 / float(lower)}"
    return _set(**settings)


def _joined(value: Any) -> Any:
    return ",".join(str(item) for item in value) if isinstance(value, list) else value


def _roll(changes: list[Change], warnings: list[str]) -> list[Change]:
    """ROLL's train_infer_correction: is_weight.{enabled, weight_type, upper_bound, detach} and a list of filters."""
    given = {c.key.removeprefix(f"{_ROLL}."): c.value for c in changes if c.key.startswith(f"{_ROLL}.")}
    if not given:
        return []
    warnings.append(f"{_ROLL} is ROLL's spelling of {_SECTION}; use rollout_is and rollout_rs")
    if given.get("is_weight.detach", True) is False:
        raise ConfigError([f"{_ROLL}.is_weight.detach=False: weights are constants here; leave it out"])
    settings: dict[str, Any] = {}
    if given.get("is_weight.enabled", False):
        settings["rollout_is"] = given.get("is_weight.weight_type", "token")
        settings["rollout_is_threshold"] = given.get("is_weight.upper_bound", 1.2)
    rejections = [pair for rule in given.get("filters") or [] if rule.get("enabled") for pair in _roll_filter(rule)]
    if rejections:
        settings["rollout_rs"] = ",".join(option for option, _ in rejections)
        settings["rollout_rs_threshold"] = ",".join(bounds for _, bounds in rejections)
    return _set(**settings)


def _roll_filter(rule: dict[str, Any]) -> list[tuple[str, str]]:
    """One filter as (option, bounds): its ratio is trainer / sampler, k1's is sampler / trainer."""
    level = _ROLL_LEVELS[rule.get("agg_type", "token")]
    found = []
    if rule.get("ratio_enabled", True):
        found.append((f"{level}_k1", f"{1 / rule.get('ratio_high', 1.2)}_{1 / rule.get('ratio_low', 0.8)}"))
    if rule.get("diff_enabled", False):
        found.append((f"{level}_diff", f"{rule.get('diff_low', -0.2)}_{rule.get('diff_high', 0.2)}"))
    return found
