"""`serve.*`: one base model for many clients of the Tinker protocol. docs/tinker_server.md says what is answered."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, between, key, one_of, require


@dataclass(kw_only=True, slots=True)
class ServeConfig(ConfigNode):
    """`serve.*`: who may ask, how much, and what each tenant gets. State is in trainer.default_local_dir."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but the loopback address needs api_keys."""
    port: int = key(8000, between(0, 65535), unit="port")
    """Port; 0: a free one, which the log names."""
    api_keys: str | None = None
    """File with a tenant's name and its key on each line; keys begin with tml-. Null: whoever reaches the port is one
    and the same tenant, whatever key it sends."""
    model_name: str | None = None
    """Name of the base model to clients. Null: model.path."""
    isolation: str = key("exact", one_of("exact", "shared"))
    """exact: every request is a pass of its own, and a client gets, bit for bit, what it would get alone. shared:
    forward_backward requests that wait go through the base together, samples into one batch: more tokens a second, and
    numbers that differ in the last digits from those alone."""
    lora_alpha: float = key(32.0, above(0))
    """Numerator of every adapter's scale, alpha / rank; clients ask for ranks alone."""
    max_lora_rank: int = key(128, at_least(1))
    """Largest rank that a client may ask for."""
    checkpoint_freq: int = key(1, at_least(1), unit="steps")
    """Write a model's state after every so many of its optimizer steps. Requests since then are kept, and are computed
    again by a server that was killed."""
    max_request_megabytes: int = key(64, at_least(1), unit="MB")
    """Largest body of a request."""
    max_queued: int = key(1024, at_least(1), unit="requests")
    """Requests of one tenant that may wait; further ones are sent back, and come again later."""
    max_queued_megabytes: int = key(1024, at_least(1), unit="MB")
    """Size of these together."""
    max_models: int = key(64, at_least(1), unit="models")
    """Models in memory, of all tenants. One more, and of the tenant who has most of them there the one that was used
    longest ago leaves: its next request loads its state, and computes again what was done since."""
    session_timeout: float = key(600.0, above(0), unit="s")
    """A session whose client has been silent for so long ends: what waits is dropped, its models leave the memory."""

    def check(self) -> None:
        local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        fix = "whoever reaches it could train and sample; set api_keys too, or listen on 127.0.0.1"
        require(local or self.api_keys is not None, "host", self.host, fix)
