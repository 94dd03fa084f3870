"""Rules of `actor_rollout_ref.rollout.val_kwargs.*`: sampling in validations."""

from verl_like.config.ppo import PPOConfig
from verl_like.config.rule import Findings, rule

_VAL = "actor_rollout_ref.rollout.val_kwargs"
_LENGTHS = ("actor_rollout_ref.rollout.min_tokens", "actor_rollout_ref.rollout.response_length")


@rule(f"{_VAL}.min_tokens", "max_tokens", _LENGTHS[1], reads=_LENGTHS[:1])
def lengths_of_a_validation(config: PPOConfig) -> Findings:
    """In a validation min_tokens <= max_tokens <= response_length holds."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    longest = val.max_tokens or rollout.response_length
    least = rollout.min_tokens if val.min_tokens is None else val.min_tokens
    if not least <= longest <= rollout.response_length:
        inherited = _LENGTHS[:1] if val.min_tokens is None and least else ()
        names = (f"{_VAL}.min_tokens", *inherited, "max_tokens", _LENGTHS[1])
        return names, "each must be the next one's value at most (null: the training's)"


@rule(f"{_VAL}.do_sample", "temperature")
def temperature_of_a_validation(config: PPOConfig) -> Findings:
    """Sampling needs a temperature."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        return f"sampling needs a temperature; set {_VAL}.temperature above 0 or do_sample=false"


@rule(f"{_VAL}.n", "do_sample", kind="risky")
def responses_of_a_validation_differ(config: PPOConfig) -> Findings:
    """Several responses to a validation prompt are sampled, not greedy."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if not val.do_sample and val.n != 1:
        return (
            f"all responses to a validation prompt will be equal; set {_VAL}.do_sample=true and a temperature, or n=1"
        )
