"""Choice of a teacher for each row, what it is shown, and the checks before a start.

One teacher is a parquet file of log-probs: of responses that are known before, as recorded steps have them. Columns:
prompt_ids and response_ids (lists of ids), log_probs (a number for each response token, or a list of K), and with lists
ids (the K ids of each token).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.batch import Evaluated, PromptRow, Rollouts
from verl_like.config import DistillationConfig, ModelConfig, PPOConfig
from verl_like.config.distillation import TOP_K, Teacher
from verl_like.config.errors import RunStopped, problems_of
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.models import families, loading
from verl_like.plugins.http_json import ServiceError
from verl_like.plugins.teachers.server import ServerTeacher


class FileTeacher:
    """Log-probs by prompt and response. k: likeliest tokens that are wanted; 0: a number for each token."""

    def __init__(self, key: str, path: str, k: int) -> None:
        """Read the file. Raises ValueError, with `key`, for one that is not there, or has not what is wanted."""
        self._key, self._k, file = f"{key}={path}", k, Path(path).expanduser()
        wanted = ["prompt_ids", "response_ids", "log_probs", *(["ids"] if k else [])]
        try:
            if missing := set(wanted) - set(names := pq.read_schema(file).names):
                raise ValueError(f"there is no {', '.join(sorted(missing))}, but {', '.join(names)}")
            table = pq.read_table(file, columns=wanted)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self._key}: cannot be read ({error}); it needs the columns {', '.join(wanted)}"
            ) from error
        self._rows: dict[Any, dict[str, Any]] = {}
        for row in table.to_pylist():
            name = tuple(row["prompt_ids"]), tuple(row["response_ids"])
            widths = {len(each) for each in row["log_probs"]} if k else {k}
            if len(row["log_probs"]) != len(name[1]) or min(widths, default=k) < k:
                what = f"{k} log-probs and ids" if k else "a log-prob"
                raise ValueError(f"{self._key}: row {len(self._rows)} has not {what} for each response token")
            self._rows[name] = row

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        """Look the rows up. Raises ValueError for one that the file has not."""
        lengths = rollouts.response_length_B
        responses = rollouts.response_ids_T.split(lengths.tolist())
        names = [(tuple(p), tuple(r.tolist())) for p, r in zip(rollouts.prompt_lists(), responses, strict=True)]
        missing = [row for row, name in enumerate(names) if name not in self._rows]
        if missing:
            raise ValueError(
                f"{self._key}: {len(missing)} of {len(names)} responses are not in it (the first: row {missing[0]}); "
                "a file knows given responses alone: actor_rollout_ref.rollout.name=recorded trains those of a run"
            )
        found = [self._rows[name] for name in names]
        if not self._k:
            return Evaluated(response_length_B=lengths, teacher_log_probs_T=_joined(found, "log_probs"))
        values_TK, ids_TK = (_joined(found, name, self._k) for name in ("log_probs", "ids"))
        return Evaluated(response_length_B=lengths, teacher_log_probs_T=values_TK, teacher_ids_T=ids_TK.int())


def _joined(rows: list[dict[str, Any]], name: str, k: int = 0) -> torch.Tensor:
    values = [value[:k] if k else value for row in rows for value in row[name]]
    return torch.tensor(values, dtype=torch.float64 if name == "ids" else torch.float32)


logger = logging.getLogger(__name__)
_FIELDS = {"data_source": "data_source", "ability": "ability", "agent_name": "agent"}  # teacher_key -> of a row
_SHOWN = 3


class Asked(Protocol):
    """One teacher: its log-probs of rows, as teacher_log_probs_T and teacher_ids_T."""

    def log_probs(self, rollouts: Rollouts) -> Evaluated: ...


class Teachers:
    """All teachers of a run, in the order of distillation.teachers().

    asked: each that is asked before the update, by the name of its role.
    """

    def __init__(self, distillation: DistillationConfig, encoder: PromptEncoder, asked: Mapping[str, Asked]) -> None:
        self._config, self._encoder = distillation, encoder
        self._asked = [asked[role] for role in distillation.teachers()]

    def evaluate(self, rollouts: Rollouts) -> Evaluated:
        """Ask each teacher about its rows; where the update itself compares with them, say which one a row has.

        Raises RunStopped for a row without a teacher, and where one fails.
        """
        try:
            return self._evaluate(rollouts)
        except (ValueError, ServiceError) as error:
            raise RunStopped(f"the teachers cannot go on: {error}") from error

    def _evaluate(self, rollouts: Rollouts) -> Evaluated:
        number_B = torch.tensor(teacher_numbers(self._config, rollouts.rows), dtype=torch.int64)
        if self._config.compares:
            return Evaluated(response_length_B=rollouts.response_length_B, teacher_B=number_B)
        shown = (
            rollouts if self._config.hint_key is None else with_hints(rollouts, self._config.hint_key, self._encoder)
        )
        parts, order = [], []
        for number, teacher in enumerate(self._asked):
            rows = (number_B == number).nonzero().flatten()
            if len(rows):
                parts.append(teacher.log_probs(shown.select(rows)))
                order.append(rows)
        return Evaluated.concat(parts).select(torch.argsort(torch.cat(order))).replace(teacher_B=number_B)


def open_teachers(config: PPOConfig, tokenizer: Any, encoder: PromptEncoder, models: Mapping[str, Asked]) -> Teachers:
    """Put the teachers of a run together. models: those that are frozen models of the run, by role."""
    k, asked = _wanted(config), dict(models)
    for role, teacher in config.distillation.teachers().items():
        if teacher.config.log_probs_file is not None:
            asked[role] = FileTeacher(f"{teacher.place}.log_probs_file", teacher.config.log_probs_file, k)
        elif not teacher.local:
            asked[role] = ServerTeacher(teacher, len(tokenizer), k)
    return Teachers(config.distillation, encoder, asked)


def _wanted(config: PPOConfig) -> int:
    """Count the likeliest ids of each token that the loss compares; 0: the sampled ones alone."""
    loss = config.distillation.distillation_loss
    return loss.topk if loss.loss_mode == TOP_K else 0


def with_hints(rollouts: Rollouts, key: str, encoder: PromptEncoder) -> Rollouts:
    """Exchange prompts for those with the row's hint, an own paragraph at the end of the last user message.

    Rows without a hint keep theirs. Raises ValueError for rows with media, whose places would move.
    """
    prompts = rollouts.prompt_lists()
    hinted = [i for i, row in enumerate(rollouts.rows) if row.extra_info.get(key)]
    told = []
    for row in (rollouts.rows[i] for i in hinted):
        users = [n for n, message in enumerate(row.messages) if message["role"] == "user"]
        if row.media or not users or not isinstance(row.messages[users[-1]]["content"], str):
            raise ValueError(
                f"distillation.hint_key={key}: row {row.index} of the data has no last user message of text"
            )
        messages = [dict(message) for message in row.messages]
        messages[users[-1]]["content"] += f"\n\n{row.extra_info[key]}"
        told.append((messages, row.tools))
    for i, ids in zip(hinted, encoder.encode(told), strict=True):
        prompts[i] = ids
    return rollouts.replace(
        prompt_ids_T=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int32),
        prompt_length_B=torch.tensor([len(ids) for ids in prompts]),
    )


def teacher_numbers(config: DistillationConfig, rows: Iterable[PromptRow]) -> list[int]:
    """Find each row's teacher by distillation.teacher_key. Raises ValueError for a row that has none."""
    if len(config.teachers()) == 1:
        return [0 for _ in rows]
    name = _FIELDS.get(config.teacher_key)
    values = (row.extra_info.get(config.teacher_key) if name is None else getattr(row, name) for row in rows)
    return _numbers(config, values)


def _numbers(config: DistillationConfig, values: Iterable[object]) -> list[int]:
    known = {teacher.rows: number for number, teacher in enumerate(config.teachers().values())}
    found = [(value, known.get(str(value))) for value in values]
    for value, number in found:
        if number is None:
            if value is None:
                why = f"a row has none in its extra_info: name another, or {', '.join(_FIELDS)}"
            else:
                there = f"there are those of {', '.join(known)}: give a teacher this key, or leave the rows out"
                why = f"no teacher has the rows of {value!r}; {there}"
            raise ValueError(f"distillation.teacher_key={config.teacher_key}: {why}")
    return [number for _, number in found if number is not None]


def check_rows(config: DistillationConfig, dataset: Dataset) -> Iterator[str]:
    """Yield what is wrong with rows: one without a teacher, or no row with a hint.

    Of files all are looked at; of a data set of the user's own all by data_source, and the first by other keys.
    """
    key, several = config.teacher_key, config.enabled and len(config.teachers()) > 1
    files = dataset if isinstance(dataset, PromptDataset) else None
    if several and key == "data_source":
        yield from problems_of(lambda: _numbers(config, dict.fromkeys(dataset.domains())))
    elif several and files is not None and key in _FIELDS:
        values = dict.fromkeys(str(cell or "") for _, cell in files.column(key))
        yield from problems_of(lambda: _numbers(config, values))
    elif several and files is not None:
        yield from problems_of(
            lambda: _numbers(config, dict.fromkeys(None if c is None else str(c) for _, c in files.extras(key)))
        )
    elif several:
        yield from problems_of(lambda: teacher_numbers(config, [dataset[0][1]]))
    hint = config.hint_key if config.enabled else None
    missing = [place for place, cell in files.extras(hint) if not cell] if files is not None and hint else []
    if missing and len(missing) == len(dataset):
        yield f"distillation.hint_key={hint}: no row has this text in extra_info: name one that is there, or null"
    elif missing:
        what = "distillation.hint_key=%s: %d of %d rows have none: their teacher sees what the policy saw; first %s"
        logger.warning(what, hint, len(missing), len(dataset), missing[0])


def check_teachers(config: PPOConfig, facts: Any) -> Iterator[str]:
    """Yield what is wrong with the teachers' tokens, kinds, files and servers."""
    if (k := _wanted(config)) > (most := len(facts.tokenizer)):
        yield (
            f"distillation.distillation_loss.topk={k}: the vocabulary has {most} tokens; set it to at most {most}, or "
            "compare all by distillation.distillation_loss.loss_mode=reverse_kl_full"
        )
        return
    for teacher in config.distillation.teachers().values():
        yield from problems_of(partial(_check, config, teacher, facts.tokenizer, facts.vision is not None))


def _check(config: PPOConfig, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, sees: bool) -> None:
    key, path, loss = f"{teacher.place}.model_path", teacher.path, config.distillation.distillation_loss
    trust = config.actor_rollout_ref.model.trust_remote_code
    if path:
        check_tokenizer(key, path, loading.load_tokenizer(path, trust, key), tokenizer)
    if teacher.local and sees and not families.sees(loading.load_hf_config(ModelConfig(path=path), key)):
        raise ValueError(
            f"{key}={path}: the policy looks at images, and this model reads text only; name one that sees"
        )
    if teacher.config.log_probs_file is not None:
        FileTeacher(f"{teacher.place}.log_probs_file", teacher.config.log_probs_file, _wanted(config))
    elif not teacher.local:
        own = loss.kd_temperature if loss.loss_mode == TOP_K else None
        temperature = own or config.actor_rollout_ref.rollout.temperature
        if temperature != 1.0:
            raise ValueError(
                f"{teacher.place}.inference.url={teacher.config.inference.url}: a server tells log-probs at "
                f"temperature 1, the policy's are at {temperature}; set actor_rollout_ref.rollout.temperature=1, or "
                "distillation.distillation_loss.kd_temperature=1 with loss_mode=forward_kl_topk"
            )
        ServerTeacher(teacher, len(tokenizer), _wanted(config)).check()


def check_tokenizer(key: str, path: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Check that a teacher knows each token of the policy under its id (ValueError, with some that it does not).

    It may know more: their probability is left out.
    """
    known = teacher.get_vocab()
    wrong = {token: number for token, number in policy.get_vocab().items() if known.get(token) != number}
    if wrong:
        shown = ", ".join(
            f"{token!r} is {number} and {known.get(token)}" for token, number in list(wrong.items())[:_SHOWN]
        )
        raise ValueError(
            f"{key}={path}: its tokenizer is not the policy's: {len(wrong)} of {len(policy)} tokens have another "
            f"id or none ({shown}); choose a teacher of the policy's family, whose tokens have the same ids"
        )
