"""The real `tinker` client, unmodified, against a server in a process of its own: numbers, isolation, a kill."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sft import TRAINED, tokens_of
from test_sft import run as sft
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models import tiny_vision
from tests.unit.models.tiny_vision import START, STOP
from tests.worlds.processes import start
from verl_like.data.chat import PromptEncoder

pytestmark = pytest.mark.engines
TEXT = "Once upon a time there was a little girl named Lily. She liked to play in the park."
ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}


def serve(words: list[str]) -> None:
    """The server's process."""
    from verl_like.cli.main import main

    main(["serve", *words])


@contextmanager
def server(model: Path, folder: Path, port: int = 0, **keys: Any) -> Iterator[tuple[str, Any]]:
    """(base URL, process) of a server; killed at the end."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    words = [f"model.path={model}", f"serve.port={port}", "trainer.device=cpu", f"trainer.default_local_dir={folder}"]
    words += [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    folder.mkdir(parents=True, exist_ok=True)
    process, url = start(serve, words, out=folder / "out.txt"), f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300  # vLLM takes half a minute of two quiet cores
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=1)
                break
            except OSError:
                assert process.is_alive() and time.monotonic() < deadline, (folder / "out.txt").read_text()
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def model(shared_data: Path) -> Path:
    """A model of 260 thousand weights, embedding and head tied."""
    return shared_data / "stories260k" / "hf"


@pytest.fixture(scope="module")
def place(fetched: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(base URL, folder of the state) of a server that most tests share."""
    folder = tmp_path_factory.mktemp("served") / "state"
    with server(model, folder) as (url, _):
        yield url, folder


class Client:
    """One session with one model. number: of the adapter's first values."""

    def __init__(self, url: str, model: Path, number: int = 7, **lora: Any) -> None:
        import tinker

        self.tinker = tinker
        self.service = tinker.ServiceClient(base_url=url)
        options = {"rank": 4, "seed": number} | lora
        self.training = self.service.create_lora_training_client(base_model=str(model), **options).result()
        tokenizer = self.training.get_tokenizer()
        ids = tokenizer.encode(TEXT)
        self.rows = [ids[:12], ids, ids[8:]]  # of different lengths

    def datum(self, ids: list[int], **columns: Any) -> Any:
        columns = columns or {"weights": torch.linspace(0, 1, len(ids) - 1)}
        inputs = {"target_tokens": torch.tensor(ids[1:]), **columns}
        return self.tinker.Datum(model_input=self.tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    def learn(self, rows: list[list[int]]) -> float:
        """One step on rows; its loss before it."""
        future = self.training.forward_backward([self.datum(ids) for ids in rows], "cross_entropy")
        step = self.training.optim_step(self.tinker.AdamParams(**ADAM))
        loss = future.result().metrics["loss:sum"]
        assert step.result().metrics["grad_norm:mean"] > 0
        return loss

    def sample(self, sampler: Any, ids: list[int], seed: int | None = 5, **more: Any) -> Any:
        params = self.tinker.SamplingParams(max_tokens=6, seed=seed)
        return sampler.sample(self.tinker.ModelInput.from_ints(ids), 2, params, **more).result()

    def saved(self, folder: Path, name: str) -> Path:
        """Folder in which the server keeps a state that is saved now."""
        path = self.training.save_state(name).result().path
        assert path == f"tinker://{self.training.model_id}/weights/{name}"
        return max(
            (folder / "saved" / self.training.model_id.replace(":", "_")).iterdir(), key=lambda each: int(each.name)
        )


def same_bits(folder: Path, other: Path) -> bool:
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    return all((folder / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_a_loop_of_the_client_is_a_plain_loop_of_torch_and_peft(place: tuple[str, Path], model: Path) -> None:
    """Losses, log-probs and weights of four steps, from the adapter that the server began with, which peft reads."""
    from peft import PeftModel

    url, folder = place
    client = Client(url, model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, client.saved(folder, "start"), is_trainable=True)
    trained = [p for p in plain.parameters() if p.requires_grad]
    options = {"lr": ADAM["learning_rate"], "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(trained, **options)

    def log_probs(ids: list[int]) -> Tensor:
        logits = plain(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    for _ in range(4):
        given = [torch.linspace(0, 1, len(ids) - 1) for ids in client.rows]
        losses = [-(weights * log_probs(ids)).sum() for weights, ids in zip(given, client.rows, strict=True)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        assert client.learn(client.rows) == pytest.approx(float(loss), rel=1e-5)
        optimizer.step()
    served = load_file(client.saved(folder, "end") / "adapter_model.safetensors")
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(served[name.replace(".default", "")], parameter.detach(), rtol=1e-3, atol=2e-5)
    found = client.training.forward([client.datum(client.rows[1])], "cross_entropy").result()
    torch.testing.assert_close(
        found.loss_fn_outputs[0]["logprobs"].to_torch(), log_probs(client.rows[1]).detach(), rtol=1e-4, atol=1e-5
    )


def test_samples_have_the_trainers_log_probs_and_old_samplers_keep_their_weights(
    place: tuple[str, Path], model: Path
) -> None:
    client = Client(place[0], model)
    client.learn(client.rows)
    prompt, old = client.rows[0][:6], client.training.save_weights_and_get_sampling_client().result()
    told = client.sample(old, prompt, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    assert told.prompt_logprobs[0] is None and told.topk_prompt_logprobs[0] is None
    for pair, own in zip(told.topk_prompt_logprobs[1:], told.prompt_logprobs[1:], strict=True):
        assert len(pair) == 2 and pair[0][1] >= max(pair[1][1], own - 1e-6)
    scored = old.compute_logprobs(client.tinker.ModelInput.from_ints(prompt)).result()
    assert scored == told.prompt_logprobs
    rows, advantages = [], []
    for place_, sequence in enumerate(told.sequences):
        ids, nothing = prompt + sequence.tokens, torch.zeros(len(prompt) - 1)
        advantage = torch.cat([nothing, torch.full((len(sequence.tokens),), 1.0 - 3 * place_)])
        sampled = torch.cat([nothing, torch.tensor(sequence.logprobs)])
        rows.append(client.datum(ids, logprobs=sampled, advantages=advantage))
        advantages.append(float(advantage.sum()))
    found = client.training.forward_backward(rows, "importance_sampling").result()
    assert found.metrics["loss:sum"] == pytest.approx(-sum(advantages), abs=1e-4), "all ratios are 1"
    for sequence, output in zip(told.sequences, found.loss_fn_outputs, strict=True):
        own = output["logprobs"].to_torch()[len(prompt) - 1 :]
        torch.testing.assert_close(own, torch.tensor(sequence.logprobs), rtol=1e-4, atol=1e-5)
    client.training.optim_step(client.tinker.AdamParams(learning_rate=0.1)).result()
    new = client.training.save_weights_and_get_sampling_client().result()
    again = client.sample(old, prompt)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in told.sequences]
    assert client.sample(new, prompt).sequences[0].logprobs != told.sequences[0].logprobs


def test_custom_losses_come_in_two_phases(place: tuple[str, Path], model: Path) -> None:
    """A loss in the client's process, whose gradient the server gets as weights: here that of the built-in one."""
    one, two = Client(place[0], model), Client(place[0], model)

    def loss(data: Any, log_probs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        given = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return torch.stack([-(w * p).sum() for w, p in zip(given, log_probs, strict=True)]).sum(), {"own": 1.0}

    future = one.training.forward_backward_custom([one.datum(ids) for ids in one.rows], loss)
    one.training.optim_step(one.tinker.AdamParams(**ADAM)).result()
    assert future.result().metrics["own"] == 1.0
    two.learn(two.rows)
    assert same_bits(one.saved(place[1], "own"), two.saved(place[1], "built_in"))


def act(client: Client, number: int) -> None:
    """What one of two clients does in its turn: rows, ranks and order differ."""
    client.learn(client.rows[number % 3 :])
    sampler = client.training.save_weights_and_get_sampling_client().result()
    ids = client.rows[0][:4] + client.sample(sampler, client.rows[0][:4], seed=None).sequences[0].tokens
    client.learn([ids])


def test_two_interleaved_clients_get_the_bits_of_two_alone(place: tuple[str, Path], model: Path) -> None:
    url, folder = place
    settings = ({"number": 3, "rank": 4}, {"number": 8, "rank": 6, "train_unembed": False})
    alone = []
    for each in settings:
        client = Client(url, model, **each)
        for number in range(3):
            act(client, number)
        alone.append(client.saved(folder, "alone"))
    clients = [Client(url, model, **each) for each in settings]
    for number in range(3):
        futures = [c.training.forward_backward([c.datum(c.rows[2])], "cross_entropy") for c in clients[::-1]]
        for client, future in zip(clients[::-1], futures, strict=True):  # what is dropped again must change nothing
            future.result()
            client.training.forward_backward([client.datum(client.rows[0])], "no_such_loss")
            with pytest.raises(client.tinker.RequestFailedError, match="no weight was changed"):
                client.training.optim_step(client.tinker.AdamParams()).result()
        for client in clients:
            act(client, number)
    for client, before in zip(clients, alone, strict=True):
        assert same_bits(client.saved(folder, "together"), before)


def test_a_state_goes_on_in_another_session(place: tuple[str, Path], model: Path) -> None:
    url, folder = place
    client = Client(url, model)
    client.learn(client.rows)
    path = client.training.save_state("here").result().path
    client.learn(client.rows)
    other = Client(url, model, number=1)
    other.training = other.service.create_training_client_from_state_with_optimizer(path).result()
    other.learn(other.rows)
    assert same_bits(client.saved(folder, "two"), other.saved(folder, "two"))
    weights = other.service.create_training_client_from_state(path).result()
    assert weights.get_info().lora_rank == 4


def test_a_client_does_not_notice_that_the_server_was_killed(fetched: Path, model: Path, tmp_path: Path) -> None:
    """Killed with a gradient half added up and requests under way, it begins again, and the client's loop goes on."""

    def loop(url: str, folder: Path, disturb: Callable[[], None]) -> Path:
        client = Client(url, model)
        client.learn(client.rows)
        first = client.training.forward_backward([client.datum(client.rows[0])], "cross_entropy")
        first.result()
        futures = [client.training.forward_backward([client.datum(ids)], "cross_entropy") for ids in client.rows]
        disturb()
        futures.append(client.training.optim_step(client.tinker.AdamParams(**ADAM)))
        for future in futures:
            future.result()
        client.learn(client.rows)
        return client.saved(folder, "end")

    with server(model, tmp_path / "quiet") as (url, _):
        expected = loop(url, tmp_path / "quiet", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    again: list[Any] = []

    def killed() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        again.append(server(model, tmp_path / "killed", port))
        again[0].__enter__()

    with server(model, tmp_path / "killed", port) as (url, process):
        found = loop(url, tmp_path / "killed", killed)
    again[0].__exit__(None, None, None)
    assert same_bits(found, expected)


@contextmanager
def losing_answers(url: str) -> Iterator[tuple[str, list[int]]]:
    """(URL, answers that were lost) of a line to a server, which breaks behind every third answer."""
    came, lost = list[int](), list[int]()

    def carry(client: socket.socket) -> None:
        port = int(url.rpartition(":")[2])
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as upstream:
            ends = {client: upstream, upstream: client}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(2**20)
                    came.extend([1] if end is upstream else [])
                    if not data or (end is upstream and len(came) % 3 == 0):
                        lost.extend([1] if data else [])
                        return
                    ends[end].sendall(data)

    def accept() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                threading.Thread(target=carry, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lost


def test_a_line_that_loses_answers_changes_nothing(place: tuple[str, Path], model: Path) -> None:
    """What the client sends again is the same request, also where the client numbers its sampler anew."""
    url, folder = place
    alone = Client(url, model)
    act(alone, 0)
    with losing_answers(url) as (line, lost):
        client = Client(line, model)
        act(client, 0)
        ended = client.saved(folder, "end")
    assert len(lost) > 3
    assert same_bits(ended, alone.saved(folder, "end"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_clients_do_not_notice_three_kills(fetched: Path, model: Path, tmp_path: Path) -> None:
    """Ten sessions at once, of other ranks, targets and rows; each ends with the bits that it has alone."""
    settings = [{"number": n, "rank": 2 + n % 3, "train_mlp": n % 2 == 0, "train_attn": True} for n in range(10)]

    def loop(url: str, folder: Path, place: int, done: list[int]) -> Path:
        client = Client(url, model, **settings[place])
        for number in range(3):
            act(client, number + place)
            done.append(place)
        return client.saved(folder, "end")

    with server(model, tmp_path / "quiet") as (url, _):
        expected = [loop(url, tmp_path / "quiet", place, []) for place in range(10)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state, done, kills = tmp_path / "killed", list[int](), list[int]()
    with ThreadPoolExecutor(10) as pool, ExitStack() as servers:
        url, process = servers.enter_context(server(model, state, port))
        found = [pool.submit(loop, url, state, place, done) for place in range(10)]
        for most in (4, 12, 20):
            while len(done) < most and not all(each.done() for each in found):
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills.append(len(done))
            _, process = servers.enter_context(server(model, state, port))
        ended = [each.result() for each in found]
    assert kills[-1] < 30 and len(done) == 30, kills
    for place, (mine, alone) in enumerate(zip(ended, expected, strict=True)):
        assert same_bits(mine, alone), place


@pytest.mark.timeout(900)
def test_samples_of_vllm_are_the_policys_and_outlive_a_kill(fetched: Path, chat_model: Path, tmp_path: Path) -> None:
    """Two adapters of other ranks and targets, and the base: to the bit what the server before gave."""
    pytest.importorskip("vllm")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = (chat_model, tmp_path / "state", free.getsockname()[1])
    with server(*place, actor_rollout_ref__rollout__name="vllm") as (url, process):
        test_samples_have_the_trainers_log_probs_and_old_samplers_keep_their_weights((url, place[1]), chat_model)
        clients = [Client(url, chat_model, rank=2), Client(url, chat_model, number=3, rank=8, train_unembed=False)]
        for client in clients:
            client.learn(client.rows)
        samplers = [client.training.save_weights_and_get_sampling_client().result() for client in clients]
        samplers.append(clients[0].service.create_sampling_client(base_model=str(chat_model)))
        params, ids = clients[0].tinker.SamplingParams(max_tokens=30, seed=9), clients[0].rows[0]
        prompt = clients[0].tinker.ModelInput.from_ints(ids)
        before = [each.sample(prompt, 2, params, topk_sample_logprobs=1).result().sequences for each in samplers]
        under_way = [each.sample(prompt, 2, params) for each in samplers]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert len({tuple(each[0].logprobs) for each in before}) == 3, "every adapter makes a difference"
    with server(*place, actor_rollout_ref__rollout__name="vllm"):
        for told, future, sampler in zip(before, under_way, samplers, strict=True):
            for again in (future.result().sequences, sampler.sample(prompt, 2, params).result().sequences):
                assert [(s.tokens, s.logprobs) for s in again] == [(s.tokens, s.logprobs) for s in told]


def test_images_of_the_client_are_seen_in_prompts_and_rows(fetched: Path, tmp_path: Path) -> None:
    """On-policy ratios are 1 behind images, another image gives other log-probs, and rows with images are learnt."""
    tiny_vision.save(tmp_path / "model", "qwen2_5_vl")
    with server(tmp_path / "model", tmp_path / "state") as (url, _):
        client = Client(url, tmp_path / "model")
        tinker, files = client.tinker, [tiny_vision.picture(number, 84, 56) for number in (1, 2)]

        def seen(file: bytes, ids: list[int]) -> Any:
            image = tinker.types.ImageChunk(data=file, format="png", expected_tokens=6)
            texts = [tinker.types.EncodedTextChunk(tokens=each) for each in ([7, START], [STOP, 8, *ids])]
            return tinker.ModelInput(chunks=[texts[0], image, texts[1]])

        def datum(file: bytes, ids: list[int], **columns: Any) -> Any:
            """The answer's tokens, of which all but the last are in the input; columns: of them, 0 before."""
            row, before = seen(file, ids[:-1]), 2 + 6 + 1
            inputs = {"target_tokens": torch.tensor([0] * before + ids)}
            inputs |= {name: torch.cat([torch.zeros(before), values]) for name, values in columns.items()}
            return tinker.Datum(model_input=row, loss_fn_inputs=inputs)

        sampler = client.training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=6, seed=5, stop=[])
        told = sampler.sample(seen(files[0], []), 2, params, include_prompt_logprobs=True).result()
        assert [each is None for each in told.prompt_logprobs] == [True, False, *[True] * 6, False, False]
        columns = [{"logprobs": torch.tensor(each.logprobs), "advantages": torch.ones(6)} for each in told.sequences]
        rows = [datum(files[0], each.tokens, **own) for each, own in zip(told.sequences, columns, strict=True)]
        found = client.training.forward_backward(rows, "importance_sampling").result()
        assert found.metrics["loss:sum"] == pytest.approx(-12, abs=1e-3)
        client.training.optim_step(tinker.AdamParams(**ADAM)).result()
        answer = told.sequences[0].tokens
        data = [datum(file, answer, weights=torch.ones(6)) for file in files]
        outputs = client.training.forward(data, "cross_entropy").result().loss_fn_outputs
        one, other = (output["logprobs"].to_torch()[-6:] for output in outputs)
        assert (one - other).abs().max() > 1e-3
        losses = []
        for _ in range(4):
            losses.append(client.training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            client.training.optim_step(tinker.AdamParams(**ADAM)).result()
        assert losses == sorted(losses, reverse=True)
        wrong = datum(b"no image", answer, weights=torch.ones(6))
        with pytest.raises(Exception, match="is neither a png nor a jpeg"):
            client.training.forward([wrong], "cross_entropy").result()


def test_keys_are_asked_for(fetched: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann tml-the-key-of-ann\nbob tml-the-key-of-bob # a comment\n")
    tinker = importlib.import_module("tinker")
    with server(model, tmp_path / "state", serve__api_keys=tmp_path / "keys") as (url, _):
        with pytest.raises(tinker.AuthenticationError, match="none of this server's"):
            tinker.ServiceClient(base_url=url, api_key="tml-nobody-at-all").create_lora_training_client("x").result()
        assert (
            tinker.ServiceClient(base_url=url, api_key="tml-the-key-of-bob")
            .create_sampling_client(base_model=str(model))
            .result()
        )


def test_losses_are_those_of_our_own_trainer(fetched: Path, chat_model: Path, tmp_path: Path) -> None:
    """`verl-like sft` from the adapter that the server began with: the same rows, the same curve."""
    with server(chat_model, tmp_path / "state") as (url, _):
        client = Client(url, chat_model, train_unembed=False)
        start_folder = client.saved(tmp_path / "state", "start")
        encoder = PromptEncoder(AutoTokenizer.from_pretrained(chat_model), {})
        losses = []
        for step in range(3):
            rows = [tokens_of(encoder, row) for row in TRAINED[8 * (step % 2) :][:8]]
            count = sum(int(mask.sum()) for _, mask in rows)
            data = [client.datum(ids[0].tolist(), weights=mask.float() / count) for ids, mask in rows]
            future = client.training.forward_backward(data, "cross_entropy")
            adam = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.01, "grad_clip_norm": 1.0}
            client.training.optim_step(client.tinker.AdamParams(learning_rate=1e-2, **adam)).result()
            losses.append(future.result().metrics["loss:sum"])
    lora = {"model.lora_adapter_path": start_folder, "model.lora_rank": 4, "model.lora_alpha": 32}
    records = sft(tmp_path, chat_model, "own", **lora)
    assert [record["train/loss"] for record in records] == pytest.approx(losses, abs=1e-4)
    assert losses[2] < losses[0] - 0.01
