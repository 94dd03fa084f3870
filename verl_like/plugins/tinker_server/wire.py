"""Protobuf bodies of the protocol, to and from our rows; the tinker package is not needed for it.

Field numbers are those of tinker's public schema, version 0.38. A map is a repeated pair, an enum a number: the same
bytes. Arrays travel as raw bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from verl_like.plugins.tinker_server.bodies import Refused
from verl_like.plugins.tinker_server.engine import Answer, Row, Work
from verl_like.plugins.tinker_server.images import Picture
from verl_like.plugins.tinker_server.losses import HIGH, LOSSES, LOW
from verl_like.plugins.tinker_server.prompts import Limits

PROTOBUF = "application/x-protobuf"
_MESSAGES = """
SparseCsr: values bytes 1, crow_indices bytes 2, col_indices bytes 3
Tensor: dense bytes 1, sparse_csr SparseCsr 2, dtype int32 3, shape int64* 4
NamedTensor: key string 1, value Tensor 2
EncodedText: tokens bytes 1
Other: data bytes 1
Image: data bytes 1, format string 2, expected_tokens int32 3, override_dimensions Other 4
Chunk: encoded_text EncodedText 1, image Image 2, dmel Other 3
Datum: model_input Chunk* 1, loss_fn_inputs NamedTensor* 2, model_input_spans Other* 3
Number: key string 1, value double 2
Setting: number double 1, text string 2
NamedSetting: key string 1, value Setting 2
Pass: model_id string 1, seq_id int32 2, data Datum* 3, loss_fn string 4, loss_fn_config Number* 5, forward_only bool 6,
loss_fn_config_v2 NamedSetting* 7
Batched: data bytes 1, offsets bytes 2, dtype int32 3, trailing_shape int64* 4
NamedBatched: key string 1, value Batched 2
Record: type_tag string 1, fields NamedBatched* 2, num_datums int64 3
PassOutput: loss_fn_output_type string 1, loss_fn_outputs Record* 2, metrics Number* 3
Topk: token_ids bytes 1, logprobs bytes 2, k uint32 3, length uint32 4
Sequence: stop_reason int32 1, tokens bytes 2, logprobs bytes 3, topk_sampled_logprobs Topk 4
Samples: sequences Sequence* 1, prompt_logprobs bytes 2, topk_prompt_logprobs Topk 3, target_prompt_logprobs Tensor 5
"""
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64)}


def _classes() -> dict[str, Any]:
    """Message classes of _MESSAGES, in a pool of their own: the tinker package may be loaded in the same process."""
    file = descriptor_pb2.FileDescriptorProto(name="wire.proto", package="wire", syntax="proto3")
    for name, fields in re.findall(r"^(\w+): (.+)$", _MESSAGES.replace(",\n", ", "), re.M):
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            key, kind, number = field.split()
            described = message.field.add(name=key, number=int(number), label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            if kind in _TYPES:
                described.type = _TYPES[kind]  # pyright: ignore[reportAttributeAccessIssue]
            else:
                described.type_name = f".wire.{kind}"  # which says that it is a message
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"wire.{name}")) for name in names}


MESSAGES = _classes()


def parsed_pass(body: bytes) -> Any:
    """Read a forward_backward body as far as model_id and seq_id can be relied on. Raises Refused for anything else."""
    message = MESSAGES["Pass"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is no ForwardBackwardRequest: {error}") from error
    if not message.model_id:
        raise Refused("the body has no model_id")
    return message


def work_of(message: Any, limits: Limits) -> Work:
    """Check a pass. Raises Refused for what cannot be computed."""
    name = message.loss_fn
    if name not in LOSSES:
        raise Refused(f"loss_fn={name!r} is not available; choose one of {', '.join(LOSSES)}")
    settings = dict(LOSSES[name].settings)
    given: dict[str, Any] = {each.key: each.value for each in message.loss_fn_config}
    given |= {each.key: each.value.text or each.value.number for each in message.loss_fn_config_v2}
    for key, value in given.items():
        if key not in settings:
            has = f"has {', '.join(settings)}" if settings else "has none"
            raise Refused(f"loss_fn_config.{key}={value!r}: loss_fn={name} {has}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise Refused(f"loss_fn_config.{key}={value!r} must be a finite number")
        settings[key] = value
    if not message.data:
        raise Refused("data is empty: give one datum at least")
    rows, places, width = list[Row](), 0, 0
    for i, datum in enumerate(message.data):
        place = f"data[{i}].model_input"
        ids, media = limits.reader.content(_parts(datum.model_input, place), place)
        if not 1 <= len(ids) <= limits.longest:
            raise Refused(f"{place} has {len(ids)} tokens, where 1 to {limits.longest} fit the model")
        rows.append(dataclasses.replace(_row(datum, f"data[{i}]", name, limits, ids), media=media))
        places, width = places + len(ids), max(width, rows[-1].targets.shape[1])
        if places * width > limits.numbers:  # rows share a block as wide as the widest
            raise Refused(f"data: {places:,} tokens by {width:,} targets; send fewer than {limits.numbers:,} at a time")
    if len({tuple(sorted(row.columns)) for row in rows}) > 1:
        raise Refused(f"data: the loss_fn_inputs of all rows must have the same names for loss_fn={name}")
    return Work(model=message.model_id, rows=rows, loss=name, settings=settings)


def _row(datum: Any, place: str, loss: str, limits: Limits, ids: NDArray[np.int32]) -> Row:
    needed, given = LOSSES[loss].inputs, datum.loss_fn_inputs
    inputs = {each.key: _tensor(each.value, f"{place}.loss_fn_inputs.{each.key}", limits.numbers) for each in given}
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype != np.int64:
        raise Refused(f"{place}.loss_fn_inputs.target_tokens must be there, int64")
    optional = (LOW, HIGH) if LOW in LOSSES[loss].settings else ()
    for name in needed:
        if name not in inputs:
            raise Refused(f"{place}.loss_fn_inputs.{name} is missing: loss_fn={loss} needs {', '.join(needed)}")
    if extra := sorted({*inputs} - {*needed, *optional}):
        raise Refused(f"{place}.loss_fn_inputs.{extra[0]}: loss_fn={loss} reads {', '.join((*needed, *optional))}")
    wide = targets.ndim == 2 and loss == "cross_entropy"
    if not (targets.ndim == 1 or wide) or len(targets) != len(ids) or not targets.size:
        shape = f"[{len(ids)}] or [{len(ids)}, K]" if loss == "cross_entropy" else f"[{len(ids)}]"
        raise Refused(f"{place}.loss_fn_inputs.target_tokens has shape {list(targets.shape)}, not {shape}")
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise Refused(
                f"{place}.loss_fn_inputs.{name} has shape {list(values.shape)}, target_tokens {list(targets.shape)}"
            )
        if not np.isfinite(values).all():
            raise Refused(f"{place}.loss_fn_inputs.{name} has numbers that are not finite")
    _check_ids(ids, f"{place}.model_input", limits.vocabulary)
    _check_ids(targets, f"{place}.loss_fn_inputs.target_tokens", limits.vocabulary)
    columns = {name: values.astype(np.float32) for name, values in inputs.items()}
    return Row(ids=ids, targets=targets.reshape(len(ids), -1).astype(np.int32), columns=columns)


def _parts(chunks: Any, place: str) -> Iterator[NDArray[np.int32] | Picture]:
    for number, chunk in enumerate(chunks):
        if chunk.HasField("image"):
            if chunk.image.HasField("override_dimensions"):
                raise Refused(f"{place}.chunks[{number}].override_dimensions is not available: scale the image before")
            yield Picture(data=chunk.image.data, expected=chunk.image.expected_tokens or None)
        elif not chunk.HasField("encoded_text"):
            raise Refused(f"{place}.chunks[{number}] is neither text nor an image")
        elif len(chunk.encoded_text.tokens) % 4:
            raise Refused(f"{place}: the tokens of a chunk are not whole 32-bit numbers")
        else:
            yield np.frombuffer(chunk.encoded_text.tokens, np.int32)


def _tensor(message: Any, place: str, most: int) -> NDArray[Any]:
    """Read a tensor, one in sparse rows (CSR) as a dense one. Raises Refused where its parts do not fit each other.

    most: numbers that it may have, before anything of that size is made.
    """
    if message.dtype not in _DTYPES:
        raise Refused(f"{place} has dtype {message.dtype}, not float32 (1) or int64 (2)")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > most:
        raise Refused(f"{place} has shape {list(shape)}, where {most:,} numbers are taken at a time")
    try:
        if not message.HasField("sparse_csr"):
            values = np.frombuffer(message.dense, dtype)
            return values.reshape(shape) if shape else values
        sparse = message.sparse_csr
        crow, col = (np.frombuffer(part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
        counts, values = np.diff(crow), np.frombuffer(sparse.values, dtype)
        ends = len(crow) > 0 and crow[0] == 0 and crow[-1] == len(col) == len(values)
        if len(shape) != 2 or len(counts) != shape[0] or not ends or (counts < 0).any() or (col < 0).any():
            raise ValueError("its row pointers, columns and values are not those of its shape")
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), counts), col] = values
        return dense
    except (ValueError, IndexError) as error:
        raise Refused(f"{place} of shape {list(shape)}: {error}") from error


def _check_ids(ids: NDArray[Any], place: str, vocabulary: int) -> None:
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise Refused(f"{place} has ids from {ids.min()} to {ids.max()}, where the tokenizer has 0 to {vocabulary - 1}")


def pass_output(rows: Sequence[Row], log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Write what a pass gives: log-probs of each row's targets, and the metrics of the loss."""
    message = MESSAGES["PassOutput"](loss_fn_output_type="ArrayRecord")
    for values, row in zip(log_probs, rows, strict=True):  # a record each: widths may differ
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        data = np.ascontiguousarray(values, np.float32).tobytes()
        offsets = np.array([0, len(data)], np.int64).tobytes()
        trailing = [values.shape[1]] if row.targets.shape[1] > 1 else []
        field = record.fields.add(key="logprobs")
        field.value.MergeFrom(MESSAGES["Batched"](data=data, offsets=offsets, dtype=_FLOAT32, trailing_shape=trailing))
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return message.SerializeToString()


def samples_output(answer: Answer) -> bytes:
    """Write what a sampler gives."""
    message = MESSAGES["Samples"]()
    for i, (ids, log_probs, stopped) in enumerate(answer.samples):
        sequence = message.sequences.add(stop_reason=0 if stopped else 1, tokens=ids.astype(np.int32).tobytes())
        sequence.logprobs = log_probs.astype(np.float32).tobytes()
        if answer.topk_sampled is not None:
            sequence.topk_sampled_logprobs.MergeFrom(_topk(*answer.topk_sampled[i]))
    if answer.log_probs is not None:
        message.prompt_logprobs = answer.log_probs.tobytes()
    if answer.topk is not None:
        message.topk_prompt_logprobs.MergeFrom(_topk(*answer.topk))
    if answer.targets is not None:
        targets = answer.targets
        dense = MESSAGES["Tensor"](dense=targets.tobytes(), dtype=_FLOAT32, shape=targets.shape)
        message.target_prompt_logprobs.MergeFrom(dense)
    return message.SerializeToString()


def _topk(ids: NDArray[np.int32], values: NDArray[np.float32]) -> Any:
    length, k = ids.shape
    data = {"token_ids": ids.astype(np.int32).tobytes(), "logprobs": values.astype(np.float32).tobytes()}
    return MESSAGES["Topk"](**data, k=k, length=length)
