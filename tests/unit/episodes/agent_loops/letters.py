"""A tokenizer with one token for each character: a worker that needs no other starts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

END = 3
_MARKS = {"<|im_start|>": 1, "<|im_end|>": END}


class Letters:
    """ChatML. Picklable: workers import this file."""

    chat_template: Any = "chatml"
    eos_token_id = END

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content'] or ''}<|im_end|>\n" for m in messages)
        text += "<|im_start|>assistant\n" * add_generation_prompt
        ids = self.encode(text)
        return ({"input_ids": ids} if return_dict else ids) if tokenize else text

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str, **options: Any) -> list[int]:
        for mark, number in _MARKS.items():
            text = text.replace(mark, chr(number))
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        marks = {number: "" if skip_special_tokens else mark for mark, number in _MARKS.items()}
        return "".join(marks.get(i, chr(i)) for i in ids)
