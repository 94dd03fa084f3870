"""Report on all rows of a supervised run: which cannot be used, and of which nothing is trained."""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from verl_like.config import DataConfig
from verl_like.config.errors import ConfigError
from verl_like.plugins.sft.turns import Answer, Row

logger = logging.getLogger(__name__)
Answers = list[Answer]
Kinds = dict[str, tuple[str, list[str]]]  # by kind: the text of the first, and the places of all

_NAMED, _TOLD = 3, 5  # rows that are named of each kind, and kinds that are told


class RowReport:
    """Counts over rows. key: of their files; limit: sft.max_length; ends: tokens that say nothing."""

    def __init__(self, key: str, num_rows: int, limit: int, data: DataConfig, ends: Sequence[int]) -> None:
        self._key, self._num_rows, self._limit, self._data, self._ends = key, num_rows, limit, data, ends
        self._faults, self._left_out, self._silent = Kinds(), Kinds(), list[str]()
        self._sums, self._longest = Counter[str](), 0

    def refuse(self, place: str, error: ValueError) -> None:
        """Take note of a row that cannot be used."""
        _note(self._faults, place, str(error).removeprefix(f"{place}: "))

    def kept(self, place: str, whole: Answers, cut: Callable[[Answers], Answers]) -> Answers | None:
        """Count what is trained of a row's answers, before and after `cut`, and return them; None: of no use."""
        longest = max((len(row.ids) for answer in whole for row in answer), default=0)
        self._longest = max(self._longest, longest)
        if self._data.filter_overlong_prompts and longest > self._limit:
            _note(self._left_out, place, f"longer than sft.max_length={self._limit}")
            return None
        answers = cut(whole)
        short = [*itertools.chain(*answers)]
        had, has = (sum(int(row.trained[1:].sum()) for row in each) for each in (itertools.chain(*whole), short))
        tokens = sum(len(row.ids) for row in short) if has else 0
        self._sums.update(kept=has > 0, tokens=tokens, trained=has, cut=had - has)
        if any(_is_silent(row, self._ends) for row in short):
            self._silent.append(place)
        lost = f"data.truncation={self._data.truncation} at sft.max_length={self._limit} cuts the answers off"
        if has:
            return answers
        _note(self._left_out, place, lost if had else "no assistant's message is trained")
        return None

    def tell(self) -> None:
        """Log the counts. Raises ConfigError for rows that cannot be used, and where none is left."""
        sums = self._sums
        if self._faults:
            longest = f"\n     the longest row has {self._longest:,} tokens" if self._longest > self._limit else ""
            raise ConfigError([self._told("cannot be used: correct them, or leave them out", self._faults) + longest])
        left_out = self._told("are left out", self._left_out)
        if not sums["kept"]:
            raise ConfigError([f"{left_out}\n     and no others are there to train"])
        if self._left_out:
            logger.warning("%s", left_out)
        if self._silent:
            what = "%s: %d rows have an empty answer, whose end alone is trained (leave them out, if not meant): %s"
            logger.warning(what, self._key, len(self._silent), _named(self._silent))
        if sums["cut"]:
            what = "%s: data.truncation=%s at sft.max_length=%d cuts %d of %d trained tokens off"
            before = sums["cut"] + sums["trained"]
            logger.warning(what, self._key, str(self._data.truncation), self._limit, sums["cut"], before)
        what = "%s: %d rows with %d tokens, of which %d are trained; the longest has %d"
        logger.info(what, self._key, sums["kept"], sums["tokens"], sums["trained"], self._longest)

    def _told(self, what: str, kinds: Kinds) -> str:
        most = sorted(kinds.values(), key=lambda kind: -len(kind[1]))
        lines = [f"{_named(places)}: {text}" for text, places in most[:_TOLD]]
        number = sum(len(places) for _, places in most)
        return "\n     ".join([f"{self._key}: {number:,} of {self._num_rows:,} rows {what}", *lines])


def _is_silent(row: Row, ends: Sequence[int]) -> bool:
    """True where one of the answers is nothing but its end."""
    runs = np.split(np.stack([row.ids, row.trained]), np.flatnonzero(np.diff(row.trained)) + 1, axis=1)
    return any(trained.all() and np.isin(ids, ends).all() for ids, trained in runs)


def _note(kinds: Kinds, place: str, text: str) -> None:
    kinds.setdefault(re.sub(r"\d+", "", text)[:40], (text, []))[1].append(place)


def _named(places: Sequence[str]) -> str:
    """Write the first of these places, a file once."""
    file, more = places[0].rpartition("row ")[0], len(places) - _NAMED
    names = [places[0], *(place.removeprefix(file) for place in places[1:_NAMED])]
    return ", ".join(names) + (f" and {more:,} more" if more > 0 else "")
