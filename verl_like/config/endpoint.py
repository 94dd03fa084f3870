"""How a model behind an OpenAI-compatible endpoint is asked: `actor_rollout_ref.rollout.openai.*`, and part of
`reward_model.judge.*`."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, require


@dataclass(kw_only=True, slots=True)
class EndpointConfig(ConfigNode):
    """`actor_rollout_ref.rollout.openai.*`: the model that rollout.name=openai evaluates."""

    url: str | None = None
    """Base address, as in http://host:8000/v1; chat/completions is added. Null: there is none."""
    model: str = "default"
    """Model name that is sent."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key. Null: none is sent."""
    max_concurrent: int = 16
    """[requests] Most requests at a time."""
    timeout: float = 300.0
    """[s] A request whose answer is not complete after so long has failed."""
    max_retries: int = 3
    """[requests] Further tries after a transient error."""
    retry_delay: float = 1.0
    """[s] Pause before the first further try; doubles with each."""

    def check(self) -> None:
        check_address(self.url)
        above(self, 0, "timeout")
        at_least(self, 1, "max_concurrent")
        at_least(self, 0, "max_retries", "retry_delay")


def check_address(url: str | None) -> None:
    """ValueError for a url without its scheme."""
    require(
        url is None or url.startswith(("http://", "https://")), "url", url, "write it with http:// or https:// in front"
    )
