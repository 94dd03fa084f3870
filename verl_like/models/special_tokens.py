"""Special tokens that a text spells out: what users, tools and environments write never becomes a control token.

    content "a<|im_end|>b"  --marked-->    "a<M|im_end|>b"                                  M: digits nobody can guess
                            --template-->  "<|im_start|>user\\na<M|im_end|>b<|im_end|>"
                            --encode-->    the template's own are renamed, and read by a copy of the tokenizer that
                                           knows its special tokens by these names alone: it takes the others for text

The copy differs in nothing but names, so ids are those that the tokenizer itself gives to such a text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE


class SpecialTokens:
    """Control tokens of a tokenizer: its special tokens and `others`, added tokens that mark turns. Picklable."""

    def __init__(self, tokenizer: Any, others: Collection[str] = ()) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})  # a tokenizer of one's own may know none
        self._tokenizer = tokenizer
        self.ids = {
            token.content: number
            for number, token in added.items()
            if (token.special or token.content in others) and not self._is_word(token.content, number)
        }
        self.control = {number: text for text, number in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        secret = secrets.randbelow(10**12)
        self.mark = f"{secrets.randbelow(10**24):024}"  # no template changes or escapes digits
        self._names = {text: f"\ufdd0{number}:{secret}\ufdd1" for text, number in self.ids.items()}

    def _is_word(self, text: str, number: int) -> bool:
        """True for an ordinary word or sign made special (pad_token="!"), which texts hold without meaning it."""
        model: Any = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        may_be = isinstance(model, BPE) and (text.isalnum() or len(text) < 3)
        return may_be and [token.id for token in model.tokenize(text)] == [number]

    def spelled(self, value: Any) -> list[str]:
        """Find the control tokens that texts in a value (messages, tools) spell out."""
        return list(dict.fromkeys(self._pattern.findall(json.dumps(value, ensure_ascii=False, default=str))))

    def marked(self, value: Any) -> Any:
        """Copy a value with a mark behind the first character of each control token that a text spells out."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][0] + self.mark + found[0][1:], value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        items = [self.marked(item) for item in value]
        parts = [item for item in items if isinstance(item, dict) and isinstance(item.get("text"), str)]
        for part in parts if self._pattern.search("".join(part["text"] for part in parts)) else ():
            part["text"] = self.mark + part["text"]  # only together they spell one
        return items

    def unmarked(self, text: str) -> str:
        """Remove the marks from a text."""
        return text.replace(self.mark, "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a rendered text with marks to token ids."""
        if not self._tokenizer.is_fast:  # it is written in Python, and asked for what stands between control tokens
            ids = list[int]()
            for number, piece in enumerate(re.split(f"({self._pattern.pattern})", text)):
                plain = self._tokenizer(self.unmarked(piece), add_special_tokens=False, split_special_tokens=True)
                ids += [self.ids[piece]] if number % 2 else plain["input_ids"]
            return self._tokenizer.build_inputs_with_special_tokens(ids) if add_special_tokens else ids
        renamed = self._pattern.sub(lambda found: self._names[found[0]], text)
        return self._copy.encode(self.unmarked(renamed), add_special_tokens=add_special_tokens).ids

    @functools.cached_property
    def _copy(self) -> Tokenizer:
        state = self._tokenizer.backend_tokenizer.to_str()
        for text, name in self._names.items():
            state = state.replace(json.dumps(text, ensure_ascii=False), json.dumps(name, ensure_ascii=False))
        model = (parsed := json.loads(state))["model"]
        if model["type"] == "BPE":  # a merge that gives a control token has nothing to give
            pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
            model["merges"] = [merge for merge, pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
        copy = Tokenizer.from_str(json.dumps(parsed, ensure_ascii=False))
        copy.no_padding()
        copy.no_truncation()
        return copy

    def shown(self, ids: Iterable[int]) -> list[tuple[str, bool]]:
        """Decode token ids to text, cut at control tokens: (text, true for a control token) each."""
        runs = itertools.groupby(ids, key=lambda number: self.control.get(number))
        decode = self._tokenizer.decode
        return [(text or decode(list(run), skip_special_tokens=False), text is not None) for text, run in runs]
