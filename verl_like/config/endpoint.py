"""Settings of a model behind an OpenAI-compatible endpoint: `actor_rollout_ref.rollout.openai.*`, and part of
`reward_model.judge.*`."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, key, such_that

WEB_ADDRESS = such_that(
    lambda url: url.startswith(("http://", "https://")), "write it with http:// or https:// in front"
)


@dataclass(kw_only=True, slots=True)
class EndpointConfig(ConfigNode):
    """`actor_rollout_ref.rollout.openai.*`: the model that rollout.name=openai evaluates."""

    url: str | None = key(None, WEB_ADDRESS)
    """Base address, as in http://host:8000/v1; chat/completions is added. Null: there is none."""
    model: str = "default"
    """Model name that is sent."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key. Null: none is sent."""
    max_concurrent: int = key(16, at_least(1), unit="requests")
    """Most requests at a time."""
    timeout: float = key(300.0, above(0), unit="s")
    """A request whose answer is not complete after so long has failed."""
    max_retries: int = key(3, at_least(0), unit="requests")
    """Further tries after a transient error."""
    retry_delay: float = key(1.0, at_least(0), unit="s")
    """Pause before the first further try; doubles with each."""
