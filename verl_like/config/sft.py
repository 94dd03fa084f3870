"""`sft.*`: supervised training on answers that the data hold. The other keys of such a run are those of any run."""

from dataclasses import dataclass
from typing import Any

from verl_like.config.base import ConfigNode, at_least, key, such_that


def _path() -> Any:
    return such_that(
        lambda names: all(isinstance(name, str) for name in names), "give a list of names, as [answer]", "names"
    )


@dataclass(kw_only=True, slots=True)
class SFTConfig(ConfigNode):
    """`sft.*`."""

    response_key: str | None = None
    """Column with the answer to data.prompt_key. Null: data.messages_key holds whole conversations."""
    prompt_dict_keys: list[str] | None = key(None, _path(), idle="response_key is not set")
    """Names that lead from the cell of data.prompt_key, a dictionary, to the prompt. Null: the cell is the prompt."""
    response_dict_keys: list[str] | None = key(None, _path(), idle="response_key is not set")
    """Names that lead from the cell of response_key, a dictionary, to the answer. Null: the cell is the answer."""
    mask_key: str | None = None
    """Column with one truth value for each message of the row: which of the assistant's are trained. Null: all, but
    for a message that says `train: false` itself."""
    enable_thinking_key: str = "enable_thinking"
    """Column with the value of the chat template's enable_thinking for this row, where its file has one. Another name
    than the default must be in a file of data.train_files."""
    max_length: int = key(1024, at_least(2), unit="tokens")
    """Longest row, prompt and answers together; data.truncation says what becomes of a longer one: error, left (the
    end stays) or right (the start stays)."""
