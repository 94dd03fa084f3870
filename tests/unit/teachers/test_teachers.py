"""Teachers that are no models of the run: servers in three formats, files, and what a hint adds to a prompt."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_like.batch import PromptRow, Rollouts
from verl_like.config import DataConfig, PPOConfig
from verl_like.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    TeacherInferenceConfig,
    TeacherModelConfig,
)
from verl_like.config.errors import RunStopped
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import PromptDataset
from verl_like.models.loading import load_tokenizer
from verl_like.plugins.http_json import TransientError
from verl_like.plugins.teachers.choice import FileTeacher, Teachers, check_rows, check_teachers, with_hints
from verl_like.plugins.teachers.server import ServerTeacher, likeliest

K = 3
PROMPTS, RESPONSES, TOKENS = [[5, 6], [7, 8, 9]], [[4, 3, 2], [10]], [4, 3, 2, 10]


def rollouts(**changes: Any) -> Rollouts:
    length_B = torch.tensor([len(ids) for ids in RESPONSES])
    total, columns = int(length_B.sum()), {"response_ids_T": torch.tensor(TOKENS).int()}
    columns |= {"prompt_ids_T": torch.tensor([5, 6, 7, 8, 9]).int(), "weight_version_T": torch.zeros(total).int()}
    rows = [PromptRow(index=i, data_source="s", messages=[{"role": "user", "content": "1+1="}]) for i in range(2)]
    made = {"prompt_length_B": torch.tensor([2, 3]), "response_length_B": length_B, "rows": rows} | changes
    mask_T = torch.ones(total).bool()
    return Rollouts(**columns, **made, response_mask_T=mask_T, group_B=length_B, finish_reasons=["stop"] * 2)


@pytest.fixture(scope="module")
def log_softmax(tiny_model: Path) -> Callable[[list[int]], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)

    @torch.no_grad()
    def of(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return of


@pytest.fixture(scope="module")
def address(log_softmax: Callable[[list[int]], torch.Tensor]) -> Iterator[str]:
    """A server that answers in all three formats with what a real model says."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = asked.get("prompt") or asked["input_ids"]
            told: list[Any] = [(None, None)]
            before = log_softmax(ids)
            for i, token in enumerate(ids[1:]):
                k = asked.get("prompt_logprobs", asked.get("top_logprobs_num", 0))
                top = before[i].topk(k)
                told.append(
                    (float(before[i, token]), list(zip(top.values.tolist(), top.indices.tolist(), strict=True)))
                )
            if self.path == "/generate":
                given = [[value, token, None] for (value, _), token in zip(told, ids, strict=True)]
                top = [pairs and [[v, t, None] for v, t in pairs] for _, pairs in told]
                reply: Any = {"meta_info": {"input_token_logprobs": given, "input_top_logprobs": top}}
            elif asked.get("echo"):
                reply = {"choices": [{"logprobs": {"token_logprobs": [value for value, _ in told] + [-1.0]}}]}
            else:
                listed = [
                    pairs if pairs is None else {str(t): {"logprob": v} for v, t in [*pairs, (value, token)]}
                    for (value, pairs), token in zip(told, ids, strict=True)
                ]
                reply = {"choices": [{"prompt_logprobs": listed}]}
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def teacher(address: str, name: str, k: int) -> ServerTeacher:
    inference = TeacherInferenceConfig(url=address, name=name, max_retries=0)
    model = TeacherModelConfig(model_path="m", inference=inference)
    found = DistillationConfig(enabled=True, teacher_model=model).teachers()["teacher"]
    assert not found.local
    return ServerTeacher(found, 18, k)


@pytest.mark.parametrize("name", ["vllm", "sglang", "openai"])
def test_a_server_tells_what_the_model_says(
    address: str, log_softmax: Callable[[list[int]], torch.Tensor], name: str
) -> None:
    expected = [
        log_softmax([*p, *r])[len(p) - 1 + i] for p, r in zip(PROMPTS, RESPONSES, strict=True) for i in range(len(r))
    ]
    teacher(address, name, 0).check()
    own = teacher(address, name, 0).log_probs(rollouts()).teacher_log_probs_T
    picked = [row[token] for row, token in zip(expected, TOKENS, strict=True)]
    torch.testing.assert_close(own, torch.stack(picked))
    if name == "openai":
        with pytest.raises(ValueError, match="name=openai: such a server tells no ids"):
            teacher(address, name, K)
        return
    found = teacher(address, name, K).log_probs(rollouts())
    top = torch.stack(expected).topk(K)
    torch.testing.assert_close(found.teacher_log_probs_T, top.values)
    assert torch.equal(found.teacher_ids_T, top.indices.int())


def test_ids_that_the_policy_lacks_and_servers_that_are_none_are_seen(address: str) -> None:
    assert likeliest([(-1.0, 30), (-2.0, 4), (-0.5, 17)], K, 18) == ([-0.5, -2.0, -1e4], [17, 4, 0])
    with pytest.raises(ValueError, match=r"distillation.teacher_model.inference.url: .*failed"):
        teacher(address.replace(":", ":1", 2).replace("http:1", "http:"), "vllm", K).check()


@pytest.mark.parametrize("told", [math.nan, 5.0])
def test_numbers_that_are_no_log_probs_are_refused(told: float) -> None:
    replies = {
        "vllm": {"choices": [{"prompt_logprobs": [None, {"4": {"logprob": told}}]}]},
        "sglang": {"meta_info": {"input_token_logprobs": [[None, 3, None], [told, 4, None]]}},
        "openai": {"choices": [{"logprobs": {"token_logprobs": [None, told, -1.0]}}]},
    }
    for name, reply in replies.items():
        assert scored(name, json.loads(json.dumps(reply).replace("NaN", "-3.0").replace("5.0", "-3.0"))) == [-3.0]
        with pytest.raises(TransientError, match=r"no log-probs of the tokens sent.*is no log-prob"):
            scored(name, reply)


def test_servers_that_put_tokens_of_their_own_before_those_sent_are_refused() -> None:
    """Else each number would be the one of the token before."""
    sglang = [[None, 1, None], [-1.0, 3, None], [-2.0, 4, None]]
    for name, reply in {
        "vllm": {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"4": {"logprob": -2.0}}]}]},
        "sglang": {"meta_info": {"input_token_logprobs": sglang}},
        "openai": {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, -2.0, -3.0]}}]},
    }.items():
        with pytest.raises(TransientError, match="no log-probs of the tokens sent"):
            scored(name, reply)


def scored(name: str, reply: Any) -> list[float]:
    """What is read of a reply about the tokens 3 and 4, of which 4 is the response."""
    (row,) = teacher("http://127.0.0.1:9/v1", name, 0).read(reply, [3, 4], 1)
    return row[0]


def test_rows_without_hint_or_teacher_are_told_before_the_start(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def dataset(*extra: dict[str, Any], **columns: list[Any]) -> PromptDataset:
        rows = [{"prompt": "1+1=", "extra_info": each} for each in extra]
        for name, cells in columns.items():
            rows = [row | {name: cell} for row, cell in zip(rows, cells, strict=True)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return PromptDataset(DataConfig(), str(tmp_path / "rows.jsonl"), load_tokenizer(str(tiny_model)), split="train")

    two = {name: {"model_path": "m", "key": name} for name in ("a", "b")}
    by_topic = DistillationConfig(enabled=True, teacher_key="topic", teacher_models=two)
    assert not list(check_rows(by_topic, dataset({"topic": "a"}, {"topic": "b"})))
    (told,) = check_rows(by_topic, dataset({"topic": "a"}, {"topic": "c"}))
    assert told.startswith("distillation.teacher_key=topic: no teacher has the rows of 'c'; there are those of a, b")
    (told,) = check_rows(replace(by_topic, teacher_key="topik"), dataset({"topic": "a"}, {"topic": "b"}))
    assert told.startswith("distillation.teacher_key=topik: a row has none in its extra_info: name another, or data_")
    for key in ("ability", "agent_name"):
        by_column = DistillationConfig(enabled=True, teacher_key=key, teacher_models=two)
        assert not list(check_rows(by_column, dataset({}, {}, **{key: ["a", "b"]})))
        (told,) = check_rows(by_column, dataset({}, {}, **{key: ["a", None]}))
        assert told.startswith(f"distillation.teacher_key={key}: no teacher has the rows of ''")
    sole = TeacherModelConfig(model_path="m")
    hints = DistillationConfig(enabled=True, hint_key="hint", teacher_model=sole)
    assert not list(check_rows(hints, dataset({"hint": "x"}, {"hint": ""}, {"hint": "y"})))
    assert "hint_key=hint: 1 of 3 rows have none" in caplog.text and "row 1" in caplog.text
    (told,) = check_rows(hints, dataset({"topic": "a"}, {"topic": "c"}))
    assert told.startswith("distillation.hint_key=hint: no row has this text in extra_info")


def test_more_likely_tokens_than_there_are_is_an_error_of_the_start(tiny_model: Path) -> None:
    facts = SimpleNamespace(tokenizer=load_tokenizer(str(tiny_model)), vision=None)
    size = len(facts.tokenizer)
    for k in (size, size + 1):
        loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=k)
        teacher = TeacherModelConfig(model_path=str(tiny_model))
        config = PPOConfig(distillation=DistillationConfig(enabled=True, teacher_model=teacher, distillation_loss=loss))
        told = [*check_teachers(config, facts)]
        assert len(told) == (k > size)
    assert f"distillation_loss.topk={size + 1}: the vocabulary has {size} tokens; set it to at most {size}" in told[0]


def test_a_file_is_looked_up_by_prompt_and_response(tmp_path: Path) -> None:
    file = tmp_path / "teacher.parquet"
    rows = [
        {
            "prompt_ids": p,
            "response_ids": r,
            "log_probs": [[-0.5 - t, -1.5, -2.5, -3.5] for t in r],
            "ids": [[t, 1, 2, 3] for t in r],
        }
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), file)
    found = FileTeacher("key", str(file), K).log_probs(rollouts())
    assert found.teacher_ids_T is not None and found.teacher_log_probs_T is not None
    assert found.teacher_ids_T.tolist() == [[t, 1, 2] for t in TOKENS]
    assert found.teacher_log_probs_T[:, 0].tolist() == [-0.5 - t for t in TOKENS]
    with pytest.raises(ValueError, match=r"key=.*: 1 of 2 responses are not in it \(the first: row 1\)"):
        other = rollouts().replace(response_ids_T=torch.tensor([4, 3, 2, 11]).int())
        FileTeacher("key", str(file), K).log_probs(other)
    known = DistillationConfig(enabled=True, teacher_model=TeacherModelConfig(log_probs_file=str(file)))
    with pytest.raises(RunStopped, match=r"the teachers cannot go on: key=.*: 1 of 2 responses are not in it"):
        encoder: Any = None  # of hints
        Teachers(known, encoder, {"teacher": FileTeacher("key", str(file), K)}).evaluate(other)
    with pytest.raises(ValueError, match="row 0 has not 5 log-probs and ids for each response token"):
        FileTeacher("key", str(file), 5)
    with pytest.raises(ValueError, match="cannot be read"):
        FileTeacher("key", str(tmp_path / "none.parquet"), 0)
    pq.write_table(pa.table({"prompt_ids": [[1]], "answer": ["x"]}), file)
    with pytest.raises(ValueError, match="there is no log_probs, response_ids, but prompt_ids, answer"):
        FileTeacher("key", str(file), 0)


def test_a_hint_is_for_the_teacher_alone(tiny_model: Path) -> None:
    """Behind the last user message, of rows that have one; responses stay."""
    tokenizer = load_tokenizer(str(tiny_model))
    rows = rollouts().rows
    rows[1].extra_info["hint"] = "2"
    shown = with_hints(rollouts(rows=rows), "hint", PromptEncoder(tokenizer, {}))
    assert shown.prompt_lists()[0] == PROMPTS[0]
    assert tokenizer.decode(shown.prompt_lists()[1]).replace(" ", "").startswith("1+1=")
    assert math.isclose(len(shown.prompt_lists()[1]), len(tokenizer("1+1=\n\n2").input_ids))
    assert shown.prompt_lists()[1][-1] == tokenizer("2").input_ids[-1]
    assert torch.equal(shown.response_ids_T, rollouts().response_ids_T)
