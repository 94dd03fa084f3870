"""Teacher behind an HTTP server that tells the log-probs of given tokens: vLLM's, SGLang's, an OpenAI-compatible one.

A request is one row, prompt and response as token ids. Formats: vLLM's prompt_logprobs in completions, SGLang's
input_token_logprobs of /generate, and OpenAI's echo with logprobs, which names tokens by text and so tells the given
ones alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from verl_like.batch import Evaluated, Rollouts
from verl_like.config.distillation import Teacher
from verl_like.plugins.http_json import Service, ServiceError, TransientError, chat_service

# inference.name -> the form in which such a server tells log-probs of a prompt
_FORMATS = {"vllm": "prompt_logprobs", "sglang": "generate", "openai": "echo"}
_ROUNDING = 1e-3  # by which a log-prob may be above 0
_NOTHING = -1e4  # log-prob of a place for which a server has no id
Scored = list[tuple[list[float], list[int]]]  # of each token: log-probs and ids, of the likeliest or its own


class ServerTeacher:
    """One server. vocabulary: ids of the policy. k: likeliest tokens that are wanted; 0: the given tokens alone."""

    def __init__(self, teacher: Teacher, vocabulary: int, k: int) -> None:
        """Read the API key. Raises ValueError where its variable is not set, or such a server cannot tell k ids."""
        own, self._section = teacher.config.inference, f"{teacher.place}.inference"
        self._kind, self._k, self._vocabulary, self._threads = _FORMATS[own.name], k, vocabulary, own.max_concurrent
        self._model = teacher.path if own.model == "default" else own.model
        if k and self._kind == "echo":
            raise ValueError(
                f"{self._section}.name=openai: such a server tells no ids of its likeliest tokens; set name=vllm or "
                "sglang for loss_mode=forward_kl_topk, or loss_mode=k3"
            )
        path = "/generate" if self._kind == "generate" else "/completions"
        base = (own.url or "").rstrip("/")
        base = base.removesuffix("/v1") if self._kind == "generate" else base
        self._service: Service = dataclasses.replace(chat_service(own, self._section), url=base + path)

    def check(self) -> None:
        """Ask about two tokens. Raises ValueError where the server does not tell what is needed."""
        quick = dataclasses.replace(self._service, max_retries=0, timeout=min(30.0, self._service.timeout))
        try:
            quick.post(self._body([0, 0]), lambda reply: self.read(reply, [0, 0], 1))
        except ServiceError as error:
            raise ValueError(f"{self._section}.url: {error}") from error

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        """Ask about each row. Raises RuntimeError where the server fails, after its retries."""
        prompts = rollouts.prompt_lists()
        responses = [ids.tolist() for ids in rollouts.response_ids_T.split(rollouts.response_length_B.tolist())]
        with ThreadPoolExecutor(min(self._threads, len(prompts))) as pool:
            rows = list(pool.map(self._ask, prompts, responses))
        values_TK, ids_TK = (torch.tensor([each[part] for row in rows for each in row]) for part in (0, 1))
        length_B = rollouts.response_length_B
        if self._k:
            return Evaluated(response_length_B=length_B, teacher_log_probs_T=values_TK, teacher_ids_T=ids_TK.int())
        return Evaluated(response_length_B=length_B, teacher_log_probs_T=values_TK.flatten())

    def _ask(self, prompt: list[int], response: list[int]) -> Scored:
        ids = prompt + response
        return self._service.post(self._body(ids), lambda reply: self.read(reply, ids, len(response)))

    def _body(self, ids: list[int]) -> dict[str, Any]:
        if self._kind == "generate":
            more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": self._k}
            return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, **more}
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        return body | (
            {"prompt_logprobs": self._k} if self._kind == "prompt_logprobs" else {"echo": True, "logprobs": 1}
        )

    def read(self, reply: Any, ids: list[int], count: int) -> Scored:
        """Read the last `count` of the given tokens. Raises TransientError for a reply without their log-probs."""
        wanted = range(len(ids) - count, len(ids))
        try:
            if self._kind == "generate":
                told = reply["meta_info"]
                _same([each[1] for each in told["input_token_logprobs"]], ids)
                if self._k:
                    return [
                        self._likeliest((pair[0], pair[1]) for pair in told["input_top_logprobs"][i]) for i in wanted
                    ]
                return [([_log_prob(told["input_token_logprobs"][i][0])], [ids[i]]) for i in wanted]
            choice = reply["choices"][0]
            if self._kind == "echo":
                told = choice["logprobs"]["token_logprobs"]
                _same(min(len(told), len(ids) + 2), len(ids) + 1)  # with the one token that had to be sampled
                return [([_log_prob(told[i])], [ids[i]]) for i in wanted]
            told = [choice["prompt_logprobs"][i] for i in wanted]
            own = [([_log_prob(row[str(ids[i])]["logprob"])], [ids[i]]) for i, row in zip(wanted, told, strict=True)]
            if not self._k:
                return own
            return [self._likeliest((each["logprob"], int(token)) for token, each in row.items()) for row in told]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"the reply has no log-probs of the tokens sent ({error!r})"
            raise TransientError(f"{what}: {str(reply)[:300]}") from error

    def _likeliest(self, pairs: Iterable[tuple[float, int]]) -> tuple[list[float], list[int]]:
        return likeliest(pairs, self._k, self._vocabulary)


def _log_prob(value: Any) -> float:
    """Read a log-prob. Raises ValueError for what is none."""
    if not float(value) <= _ROUNDING:
        raise ValueError(f"{value} is no log-prob")
    return max(float(value), _NOTHING)


def _same(told: object, asked: object) -> None:
    """Raise ValueError where a server has other tokens than it was sent: one that puts its own before them, say."""
    if told != asked:
        raise ValueError("other tokens")


def likeliest(pairs: Iterable[tuple[float, int]], k: int, vocabulary: int) -> tuple[list[float], list[int]]:
    """Take the k likeliest ids of the policy's vocabulary, filled up where there are fewer."""
    known = sorted(((value, token) for value, token in pairs if token < vocabulary), reverse=True)[:k]
    known += [(_NOTHING, 0)] * (k - len(known))
    return [_log_prob(value) for value, _ in known], [token for _, token in known]
