"""Requests that cannot be: each is told in the protocol's form, changes nothing, and disturbs nobody."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.models import tiny_vision
from tests.unit.tinker_server.fake import LORA, Running, Tenant, pass_body, run, running
from verl_like.checkpoint.lock import held
from verl_like.cli.main import main
from verl_like.config.errors import ConfigError
from verl_like.config.serve import ServeConfig
from verl_like.plugins.tinker_server.start import read_keys, serve
from verl_like.plugins.tinker_server.wire import MESSAGES, PROTOBUF
from verl_like.trainer.compose import compose

F, INT = np.float32, np.int64
FUTURE = 200  # taken, because it has its number in the model's order; it fails in its turn
Case = tuple[str, Any, int, str]


def bad_passes(model: str) -> list[Case]:
    def one(words: str, status: int = FUTURE, **changed: Any) -> Case:
        return "forward_backward", pass_body(model, 1, **changed), status, words

    def with_message(words: str, change: Any) -> Case:
        message = MESSAGES["Pass"]()
        message.ParseFromString(pass_body(model, 1))
        change(message)
        return "forward_backward", message.SerializeToString(), FUTURE, words

    sampled = {"weights": None, "logprobs": np.zeros(3, F), "advantages": np.ones(3, F)}
    clip = {"clip_low_threshold": "0.8"}
    return [
        ("forward_backward", b"\xff\xff no message", 400, "no ForwardBackwardRequest"),
        ("forward_backward", b"", 400, "no model_id"),
        ("forward_backward", pass_body(model, 1)[:-3], 400, "no ForwardBackwardRequest"),
        ("forward_backward", pass_body("nobody", 1), 404, "no model 'nobody'"),
        ("forward_backward", pass_body(model, 0), 400, "seq_id=0 must be at least 1"),
        ("forward_backward", pass_body(model, -4), 400, "seq_id=-4"),
        ("forward_backward", pass_body(model, 99_999), 400, "far beyond the one that is due, 1"),
        one("loss_fn='' is not available", loss_fn=""),
        one("loss_fn='stable_reinforce' is not available; choose one of cross_entropy", loss_fn="stable_reinforce"),
        one("loss_fn_config.beta=.*: loss_fn=cross_entropy has none", loss_fn_config=[{"key": "beta", "value": 1.0}]),
        one(
            "must be a finite number", loss_fn="dro", columns=sampled, loss_fn_config=[{"key": "beta", "value": np.nan}]
        ),
        one(
            "'0.8' must be a finite number",
            loss_fn="ppo",
            columns=sampled,
            loss_fn_config_v2=[{"key": k, "value": {"text": v}} for k, v in clip.items()],
        ),
        with_message("data is empty", lambda m: m.ClearField("data")),
        one("model_input has 0 tokens, where 1 to 32", ids=()),
        one("model_input has 33 tokens, where 1 to 32", ids=[5] * 33),
        one("model_input has ids from 5 to 100, where the tokenizer has 0 to 99", ids=(5, 100)),
        one("model_input has ids from -1 to 5", ids=(5, -1)),
        one("target_tokens has ids from -5 to 4", columns={"target_tokens": np.array([4, -5, 3], INT)}),
        one("target_tokens must be there, int64", columns={"target_tokens": None}),
        one("target_tokens must be there, int64", columns={"target_tokens": np.zeros(3, F)}),
        one(
            r"target_tokens has shape \[2\], not \[3\]",
            columns={"target_tokens": np.zeros(2, INT), "weights": np.ones(2, F)},
        ),
        one(
            r"target_tokens has shape \[3, 2\], not \[3\]$",
            loss_fn="ppo",
            columns={
                "target_tokens": np.zeros((3, 2), INT),
                "weights": None,
                "logprobs": np.zeros((3, 2), F),
                "advantages": np.ones((3, 2), F),
            },
        ),
        one(r"weights has shape \[4\], target_tokens \[3\]", columns={"weights": np.ones(4, F)}),
        one("weights is missing: loss_fn=cross_entropy needs weights", columns={"weights": None}),
        one(
            "logprobs is missing: loss_fn=cispo needs logprobs, advantages", loss_fn="cispo", columns={"weights": None}
        ),
        one("mask: loss_fn=cross_entropy reads weights", columns={"mask": np.ones(3, F)}),
        one("weights has numbers that are not finite", columns={"weights": np.array([1, np.inf, 0], F)}),
        with_message(r"chunks\[1\] is an image: the model", lambda m: m.data[0].model_input.add().image.SetInParent()),
        with_message("neither text nor an image", lambda m: m.data[0].model_input.add().dmel.SetInParent()),
        with_message(
            "not whole 32-bit numbers", lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"abc")
        ),
        with_message("has dtype 7", lambda m: setattr(m.data[0].loss_fn_inputs[0].value, "dtype", 7)),
        with_message("of shape", lambda m: m.data[0].loss_fn_inputs[0].value.shape.append(5)),
        with_message("has shape", lambda m: m.data[0].loss_fn_inputs[0].value.shape.extend([2**30, 2**30])),
        with_message("row pointers", lambda m: m.data[0].loss_fn_inputs[0].value.sparse_csr.SetInParent()),
        with_message("row pointers", far_pointers),
        with_message("columns and values", lambda m: sparse(m, [1, 2], [0, 2], [0, 1], [7])),
        with_message("where 8,388,608 numbers are taken", lambda m: sparse(m, [1, 2**24], [0, 1], [0], [7])),
        with_message("data: 6 tokens by 2,000,000 targets; send fewer", two_wide_rows),
        one(r"loss_fn='x+ \.\.\. \(50,", loss_fn="x" * 50_000),
    ]


def sparse(message: Any, shape: list[int], crow: list[int], columns: list[int], values: list[int]) -> None:
    """Make all inputs of the row sparse ones: few bytes may stand for many numbers."""
    for each in message.data[0].loss_fn_inputs:
        del each.value.shape[:]
        each.value.shape.extend(shape)
        each.value.sparse_csr.crow_indices = np.array(crow, INT).tobytes()
        each.value.sparse_csr.col_indices = np.array(columns, INT).tobytes()
        each.value.sparse_csr.values = np.array(values, INT if each.value.dtype == 2 else F).tobytes()


def two_wide_rows(message: Any) -> None:
    """Rows that fit one by one, and together do not."""
    sparse(message, [3, 2_000_000], [0] * 4, [], [])
    message.data.append(message.data[0])


def far_pointers(message: Any) -> None:
    """Pointers that ask for 16 GiB, over no columns."""
    value = message.data[0].loss_fn_inputs[0].value
    del value.shape[:]
    value.shape.extend([1, 4])
    value.sparse_csr.crow_indices = np.array([0, 2**31], np.int64).tobytes()


def bad_bodies(tenant: Tenant) -> list[Case]:
    place, session = {"model_id": tenant.model, "seq_id": 1}, {"session_id": tenant.session}
    new = {**session, "model_seq_id": 1, "base_model": "base", "lora_config": LORA}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    ask = {"sampling_session_id": tenant.sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}

    def params(**changed: Any) -> dict[str, Any]:
        return ask | {"sampling_params": {"max_tokens": 2} | changed}

    def tokens(*ids: Any) -> dict[str, Any]:
        return ask | {"prompt": {"chunks": [{"tokens": list(ids)}]}}

    return [
        ("optim_step", {**place, "adam_params": {"learning_rate": -1.0}}, FUTURE, "learning_rate"),
        ("optim_step", {**place, "adam_params": {"beta1": 1.0}}, FUTURE, "adam_params.beta1"),
        ("optim_step", {**place, "adam_params": {"eps": 0.0}}, FUTURE, "adam_params.eps"),
        ("optim_step", {**place, "adam_params": {"learning_rate": 1e38}}, FUTURE, "adam_params.learning_rate"),
        ("optim_step", {**place, "adam_params": {"learning_rate": "fast"}}, FUTURE, "adam_params.learning_rate"),
        ("optim_step", {**place, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}, FUTURE, "adam_params"),
        ("optim_step", {"model_id": tenant.model}, 422, "seq_id: Field required"),
        ("optim_step", {**place, "seq_id": "1"}, 422, "seq_id"),
        ("optim_step", {**place, "model_id": f"{tenant.session}:train:9"}, 404, "there is no model"),
        ("save_weights", {**place, "path": "../../etc"}, FUTURE, "path"),
        ("save_weights", {**place, "path": "a/b"}, FUTURE, "path"),
        ("save_weights", place, FUTURE, "path"),
        ("save_weights", {**place, "path": "x", "ttl_seconds": -5}, FUTURE, "ttl_seconds"),
        ("save_weights_for_sampler", place, FUTURE, "path or sampling_session_seq_id"),
        (
            "load_weights",
            {**place, "path": "tinker://no/weights/x", "optimizer": True},
            FUTURE,
            "there is no checkpoint",
        ),
        (
            "load_weights",
            {**session, "model_seq_id": 4, "path": "no", "optimizer": True},
            404,
            "there is no checkpoint",
        ),
        ("load_weights", [1, 2], 422, "no JSON object"),
        ("create_model", new | {"base_model": "other"}, 404, "base_model='other': this server has 'base'"),
        ("create_model", new | {"lora_config": LORA | {"rank": 9}}, 400, "rank=9: this server gives 8 at most"),
        ("create_model", new | {"lora_config": LORA | {"rank": 7}}, 400, "lora_config: rank=7: no"),
        ("create_model", new | {"lora_config": LORA | {"rank": 0}}, 422, "lora_config.rank"),
        ("create_model", new | {"lora_config": None}, 400, "trains adapters, not the base"),
        (
            "create_model",
            new | {"optimizer_config": {"type": "dimuon"}},
            400,
            "'dimuon' is not available; choose adamw",
        ),
        ("create_model", new | {"session_id": "nobody"}, 404, "there is no session 'nobody'"),
        ("asample", ask | {"sampling_session_id": "nobody"}, 404, "there is no sampling session"),
        (
            "asample",
            {k: v for k, v in ask.items() if k != "seq_id"},
            400,
            "sampling_session_id and seq_id must be given",
        ),
        ("asample", tokens(), 400, "prompt has 0 tokens, where 1 to 31 fit"),
        ("asample", tokens(*[3] * 32), 400, "prompt has 32 tokens"),
        ("asample", tokens(100), 400, "prompt has ids from 100 to 100"),
        ("asample", tokens(1.5), 422, "prompt.chunks.0.tokens.0"),
        ("asample", ask | {"prompt": {"chunks": [{"type": "image", "data": ""}]}}, 400, "reads text alone"),
        ("asample", ask | {"prompt": {"chunks": [{"type": "image", "data": "%"}]}}, 400, r"chunks\[0\]: .*base64"),
        ("asample", ask | {"prompt": {"chunks": [{"type": "image_asset_pointer"}]}}, 400, "the bytes of an image"),
        ("asample", params(temperature=-1.0), 422, "sampling_params.temperature"),
        ("asample", params(top_k=10**30), 422, "sampling_params.top_k"),
        ("asample", params(temperature=1e-45), 400, "sampling_params.temperature"),
        ("asample", params(stop=["x"] * 65), 400, "over 64 of them"),
        (
            "asample",
            ask | {"target_prompt_logprobs": {"data": [10**30], "shape": [1, 1]}},
            400,
            "target_prompt_logprobs",
        ),
        ("asample", ask | {"target_prompt_logprobs": {"data": [1.7], "shape": [1, 1]}}, 400, "are no ids"),
        ("asample", params(top_p=0.0), 422, "sampling_params.top_p"),
        ("asample", params(max_tokens=0), 422, "sampling_params.max_tokens"),
        ("asample", params(stop=[""]), 400, "stop has an empty text"),
        ("asample", params(stop=[500]), 400, "has ids that the tokenizer lacks"),
        ("asample", ask | {"num_samples": 0}, 422, "num_samples"),
        ("asample", ask | {"prompt_alt_tokens_k": 2}, 422, "prompt_alt_tokens_k"),
        ("asample", ask | {"record_stability_info": True}, 400, "record_stability_info=True is not available"),
        ("asample", ask | {"prompt_logprobs_last_n": 1}, 400, "needs prompt_logprobs"),
        ("asample", ask | {"target_prompt_logprobs": {"data": [1], "shape": [3, 1]}}, 400, r"not \[1, K\]"),
        ("asample", ask | {"target_prompt_logprobs": {"data": [777], "shape": [1, 1]}}, 400, "-1, or 0 to 99"),
        ("retrieve_future", {"request_id": "nobody:1"}, 404, "there is no request"),
        ("retrieve_future", {}, 422, "request_id: Field required"),
        ("create_sampling_session", {**session, "sampling_session_seq_id": 9}, 400, "model_path or base_model"),
        ("no_such_thing", {}, 404, "is no part of the protocol"),
        ("save_weights_external", {**place, "path": "x"}, 404, "is no part of the protocol"),
        ("healthz", {}, 405, "does not take this method"),
        ("get_info", {"model_id": "x" * 50_000}, 404, r"there is no model 'x+ \.\.\. \(50,"),
        ("create_session", {"user_metadata": {"a": float("nan")}}, 422, "user_metadata.a"),
        ("create_session", {"display_name": "x" * 70_000}, 413, "at most 0 MB"),
    ]


async def refused(server: Running, case: Case, tenant: Tenant) -> None:
    path, body, status, words = case
    found, told = await server.post(path, body)
    assert found == status, (case, told)
    if status == FUTURE:
        told = await tenant.result(told)
        assert told["category"] == "user"
        text = told["error"]
        tenant.seq = 1
    else:
        text = told["detail"]
        assert set(told) == {"detail", "error", "category"}
    assert re.search(words, text), (words, text)
    assert "Traceback" not in text and len(text) < 1100


def test_what_is_refused_changes_nothing_and_nobody_notices(tmp_path: Path) -> None:
    """Each case has a model of its own, beside a client that goes on, and is in the end where it would be alone."""

    async def go() -> None:
        async with running(tmp_path / "alone") as server:
            quiet = await Tenant(server).begin()
            expected = [await quiet.act("pass", n) for n in range(120)], quiet.weights()
        async with running(tmp_path / "all") as server:
            other, told = await Tenant(server).begin(), list[Any]()
            first = await Tenant(server).begin()
            await first.act("snapshot")
            number = len(bad_passes(first.model)) + len(bad_bodies(first))
            assert number >= 60
            for i in range(number):
                tenant = await Tenant(server).begin()
                tenant.sampler = first.sampler
                before = tenant.weights()
                case = [*bad_passes(tenant.model), *bad_bodies(tenant)][i]
                await refused(server, case, tenant)
                assert tenant.weights() == before, case
                if case[0] == "forward_backward" and tenant.seq:  # then the step of its pass is refused too
                    assert "no weight was changed" in (await tenant.act("step"))["error"]
                assert "metrics" in await tenant.act("step"), "and it goes on"
                told.append(await other.act("pass", i))
            told += [await other.act("pass", n) for n in range(number, 120)]
            assert (told, other.weights()) == expected

    run(go())


def test_a_line_that_breaks_within_a_body_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.http.port)
            writer.write(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            await writer.drain()
            await server.get("sessions")
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.05)
            assert (await server.get("sessions"))[0] == 200

    run(go())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_headers_that_are_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            for headers, status in (({"Content-Type": "application/json"}, 415), ({"Content-Encoding": "gzip"}, 415)):
                sent = {"Content-Type": PROTOBUF, "X-API-Key": "tml-x", **headers}
                async with server.http.post("/api/v1/forward_backward", data=b"x", headers=sent) as response:
                    assert response.status == status and "detail" in json.loads(await response.read())
            for query in ("limit=0", "limit=many", "offset=-1", f"offset={10**30}"):
                assert (await server.get(f"training_runs?{query}"))[0] == 400
            sent = {"data": b"[" * 60_000, "headers": {"X-API-Key": "tml-x", "Content-Type": "application/json"}}
            async with server.http.post("/api/v1/load_weights", **sent) as response:
                assert response.status == 422
        async with running(tmp_path, keys={"ann": "tml-the-key-of-ann"}) as server:
            for path, status in (("healthz", 200), ("sessions/healthz", 401)):
                assert (await server.get(path, "tml-nobody-at-all"))[0] == status
            key = b"tml-\xff".decode("utf-8", "surrogateescape")
            assert (await server.get("sessions", key))[0] == 401

    run(go())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("ann\n", "line 1: write a name and a key"),
        ("\nann sk-0123456789abc", "line 2: write a name and a key"),
        ("ann tml-short", "12 characters or more"),
        ("ann tml-0123456789\nann tml-9876543210", "line 2: the name or the key is there before"),
        ("ann tml-0123456789\nbob tml-0123456789", "line 2: the name or the key is there before"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        read_keys(tmp_path / "keys")
    assert "0123456789" not in str(error.value), "no key is told"


def test_samplers_that_cannot_be_are_refused_before_anything_starts(shared_data: Path, tmp_path: Path) -> None:
    rollout = ["name=vllm", "server=True"]
    words = ["trainer.objective=serve", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path / 'state'}"]
    words += [f"actor_rollout_ref.model.path={shared_data / 'stories260k' / 'hf'}", "serve.max_lora_rank=600"]
    with pytest.raises(ConfigError) as error:
        serve(compose([*words, *(f"actor_rollout_ref.rollout.{each}" for each in rollout)]))
    assert "rollout.name=vllm with server=True: not available under `verl-like serve`" in str(error.value)
    assert "serve.max_lora_rank=600: vllm keeps adapters up to rank 512" in str(error.value)


def test_the_folder_of_a_live_server_is_refused_in_a_line(shared_data: Path, tmp_path: Path) -> None:
    words = [f"model.path={shared_data / 'stories260k' / 'hf'}", f"trainer.default_local_dir={tmp_path}"]
    with held(tmp_path, "other"), pytest.raises(SystemExit, match=r"^error: .* belongs to a live run"):
        main(["serve", "trainer.device=cpu", *words])


def test_a_model_that_sees_samples_by_transformers(tmp_path: Path) -> None:
    tiny_vision.save(tmp_path / "model", "qwen2_vl")
    words = ["trainer.objective=serve", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path / 'state'}"]
    words += [f"actor_rollout_ref.model.path={tmp_path / 'model'}", "actor_rollout_ref.rollout.name=vllm"]
    with pytest.raises(ConfigError, match=r"rollout.name=vllm is not available for vision-.*set it to hf"):
        serve(compose(words))


def test_other_machines_get_in_with_keys_alone() -> None:
    with pytest.raises(ValueError, match=r"host='0.0.0.0': whoever reaches it could train and sample; set api_keys"):
        ServeConfig(host="0.0.0.0")
    assert ServeConfig(host="0.0.0.0", api_keys="keys.txt") and ServeConfig(host="127.0.0.1")
