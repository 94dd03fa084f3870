"""JSON bodies of the protocol, as far as the server reads them. What else is in a body is let through unread."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

T = TypeVar("T", bound="Body")
_Seq = Field(ge=0, lt=2**62)
_YEARS = 10 * 366 * 86400
_MOST_TEXT = 1000


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


_Told = dict[str, Annotated[str, BeforeValidator(_as_text)]] | None  # the protocol answers with texts


class Refused(ValueError):
    """Request that is not taken. status: of HTTP, where it has no future to fail.

    text: shortened where a client's own words in it are many.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text):,} characters)")
        self.status = status


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(protected_namespaces=(), strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class CreateSession(Body):
    user_metadata: _Told = None
    display_name: str | None = Field(None, max_length=1000)


class AdapterSpec(Body):
    """Rank and targets of an adapter. seed: of the first values; None: the server chooses it."""

    rank: int = Field(ge=1)
    seed: int | None = Field(None, ge=0, lt=2**62)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    type: str = "adamw"


class Create(Body):
    session_id: str
    model_seq_id: int = _Seq
    base_model: str | None = None
    user_metadata: _Told = None
    optimizer_config: Optimizer | None = None


class CreateModel(Create):
    lora_config: AdapterSpec | None = None


class Adam(Body):
    learning_rate: float = Field(1e-4, ge=0, le=1e6)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OfModel(Body):
    """A request in a model's order."""

    model_id: str
    seq_id: int = Field(ge=1, lt=2**31)


class OptimStep(OfModel):
    adam_params: Adam


class Save(OfModel):
    """A checkpoint, or without a path the snapshot of a sampling client."""

    path: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(None, ge=1, le=_YEARS)
    overwrite: bool = False
    user_metadata: _Told = None


class Load(OfModel):
    path: str
    optimizer: bool


class CreateByLoad(Create):
    path: str
    optimizer: bool


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int = _Seq
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] = []
    data: str = ""  # of an image, in base64
    expected_tokens: int | None = None


class Tokens(Body):
    chunks: list[Chunk]


class Params(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, le=1e6)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)


class Targets(Body):
    data: list[int] | list[float]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None


class Sample(Body):
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Tokens
    sampling_params: Params
    sampling_session_id: str | None = None
    seq_id: int | None = Field(None, ge=0, lt=2**62)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=128)
    topk_sample_logprobs: int = Field(0, ge=0, le=128)
    target_prompt_logprobs: Targets | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class Ttl(Body):
    ttl_seconds: int | None = Field(None, ge=1, le=_YEARS)


def read(kind: type[T], body: bytes) -> T:
    """Read a JSON body. Raises Refused with the first field that is wrong."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(f"{place}: {first['msg']}", 422) from error


def text(body: bytes, name: str) -> str:
    """Read one text of a JSON body. Raises Refused where it is none."""
    return getattr(read(_named(name), body), name)


@cache
def _named(name: str) -> type[Body]:
    return create_model("Named", __base__=Body, **{name: (str, ...)})  # pyright: ignore[reportCallIssue, reportArgumentType]
