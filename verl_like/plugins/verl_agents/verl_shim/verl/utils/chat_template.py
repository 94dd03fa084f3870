"""verl.utils.chat_template: what a template writes before the first message."""

from __future__ import annotations

from typing import Any


def initialize_system_prompt(tokenizer: Any, **apply_chat_template_kwargs: Any) -> list[int]:
    """The tokens of a default system prompt, from renderings of one and of two empty messages."""
    message, options = {"role": "user", "content": ""}, {"add_generation_prompt": False, "tokenize": True}
    one, two = (
        tokenizer.apply_chat_template([message] * number, **options, **apply_chat_template_kwargs) for number in (1, 2)
    )
    return one[: 2 * len(one) - len(two)]
