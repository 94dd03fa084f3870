"""Drafts of a row's next tokens: what followed its last tokens before, in its prompt, its group or earlier responses.

A draft costs when it is not kept, so how often those of each kind are kept is counted, also while none is proposed, and
of each step's drafts as much is proposed as pays by these counts and by the work of a step. Nothing here depends on a
clock: equal runs propose equal drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from verl_like.config.rollout import SpeculativeConfig
from verl_like.rollout.rows import Drafted

SIZES: tuple[int, ...] = (8, 3)  # last tokens that have to be the same, most first: what followed is then likelier
_FORGET = 0.97  # a step's weight in the counts, by the next step's
_SAMPLE = 8  # while drafts do not pay, one row in so many is read
_GUESSING = 1.2  # fixed work of a pass with guesses, by that of one without
_LONGEST_REST = 16  # steps between two looks then, at most


class Texts:
    """Token sequences, and where in them each few tokens stood last; about 250 bytes a token."""

    __slots__ = ("__weakref__", "_places", "_texts")

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._places: dict[int, int] = {}  # hash of the tokens -> number of a text << 32 | place in it

    def begin(self, tokens: Iterable[int]) -> int:
        """Add a text; returns its number, for `extend`."""
        self._texts.append([])
        self.extend(len(self._texts) - 1, tokens)
        return len(self._texts) - 1

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Append tokens to a text."""
        text, places = self._texts[number], self._places
        for token in tokens:
            at = len(text)
            for size in SIZES:
                if size <= at:
                    places[hash(tuple(text[at - size :]))] = number << 32 | at
            text.append(token)

    def after(self, number: int, most: int) -> tuple[int, list[int]]:
        """Look up what followed the last tokens of a text elsewhere: how many are the same there, and what followed."""
        text = self._texts[number]
        for size in SIZES:
            if (found := self._places.get(hash(tuple(text[-size:])))) is not None and size <= len(text):
                at = found & 0xFFFFFFFF
                return size, self._texts[found >> 32][at : at + most]
        return 0, []


@dataclass(slots=True, eq=False)
class _Reader:
    """Texts of one row, the number of its own among them, and the last guess."""

    texts: Texts
    own: int
    num_read: int = 0  # tokens of its response that are in its own text
    size: int = 0
    guess: list[int] = field(default_factory=list)


class Lookup:
    """Proposes drafts for the rows of a batch (`rollout.speculative`).

    fixed_tokens: the work of a decode step that does not grow with its tokens, in tokens of one row.
    """

    def __init__(self, config: SpeculativeConfig, fixed_tokens: float) -> None:
        self._most, self._least_chance = config.max_tokens, config.min_similarity
        self._shares, self._fixed = config.method == "history", fixed_tokens
        self._of_prompt: WeakValueDictionary[tuple[int, ...], Texts] = WeakValueDictionary()
        self._kept = dict.fromkeys(SIZES, 1.0)  # as if one of two had been kept
        self._tried = dict.fromkeys(SIZES, 2.0)
        self._rest = self._resting = 0  # steps that the last look was for, and that are left of them

    def propose(self, rows: Sequence[Drafted]) -> list[list[int]]:
        """Drafts of each row's next tokens, often none."""
        nothing: list[list[int]] = [[] for _ in rows]
        if self._resting:
            self._resting -= 1
            return nothing
        for size in SIZES:
            self._kept[size] *= _FORGET
            self._tried[size] *= _FORGET
        if self._rest and not self._width([self._read(row) for row in rows[::_SAMPLE]]):
            self._rest = self._resting = min(2 * self._rest, _LONGEST_REST)
            return nothing
        readers = [self._read(row) for row in rows]
        width = self._width(readers)
        self._rest = self._resting = 0 if width else max(1, self._rest)
        return [self._draft(row, reader, width) for row, reader in zip(rows, readers, strict=True)]

    def _read(self, row: Drafted) -> _Reader:
        """Read a row's new tokens, judge the last guess by them, and make the next."""
        if row.drafting is None:
            row.drafting = self._reader(row)
        reader: _Reader = row.drafting
        if new := row.token_ids[reader.num_read :]:
            pairs = zip(new, reader.guess, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if reader.size:
                self._kept[reader.size] += same
                self._tried[reader.size] += same + (same < min(len(new), len(reader.guess)))
            reader.texts.extend(reader.own, new)
            reader.num_read += len(new)
            reader.size, reader.guess = reader.texts.after(reader.own, self._most)
        return reader

    def _reader(self, row: Drafted) -> _Reader:
        prompt, texts = row.request.prompt_ids, None
        key, begin = tuple(prompt), prompt[-SIZES[0] :]
        if self._shares:
            texts = self._of_prompt.get(key)
        if texts is None:
            texts = Texts()
            texts.begin(prompt)
            if self._shares:
                self._of_prompt[key] = texts
                for earlier in row.request.drafts:
                    texts.begin([*begin, *earlier.tolist()])
        return _Reader(texts, texts.begin(begin))

    def _chance(self, size: int) -> float:
        """Chance of a draft's next token to be kept, where those before it were."""
        return self._kept[size] / self._tried[size]

    def _length(self, reader: _Reader) -> int:
        """Tokens of a guess up to the last that is likely enough."""
        length, chance = 0, 1.0
        while length < len(reader.guess) and (chance := chance * self._chance(reader.size)) >= self._least_chance:
            length += 1
        return length

    def _width(self, readers: Sequence[_Reader]) -> int:
        """Choose how many drafts the rows get at most: the least work for what is left to sample.

        Tokens cost as many passes as each row needs, a pass's fixed work as many as the slowest row does, which is
        taken to gain half as much as the mean.
        """
        chances = {size: self._chance(size) for size in SIZES}
        lengths = [(chances[reader.size], self._length(reader)) for reader in readers if reader.guess]
        width, gain, rows = 0, 0.0, len(readers)
        best = self._fixed + rows
        for columns in range(1, max((length for _, length in lengths), default=0) + 1):
            gain += sum(chance**columns for chance, length in lengths if length >= columns) / rows
            work = _GUESSING * self._fixed / (1 + gain / 2) + rows * (1 + columns) / (1 + gain)
            if work < best:
                best, width = work, columns
        return width

    def _draft(self, row: Drafted, reader: _Reader, width: int) -> list[int]:
        """Cut a guess to what may be drawn from the plain distribution, and leaves room for one more token."""
        sampling = row.request.sampling
        if sampling.shapes_logits or (row.request.hot_start is not None and not row.token_ids):
            return []
        return reader.guess[: min(width, self._length(reader), sampling.max_tokens - len(row.token_ids) - 1)]
