"""Passes and samples that models share, on the real engines: the numbers are those of each alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from verl_like.models.adapter_config import WEIGHTS
from verl_like.plugins.tinker_server.adapters import AdapterSpec
from verl_like.plugins.tinker_server.engine import Engines, Prompt, Row, Work
from verl_like.plugins.tinker_server.losses import LOSSES
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.compose import compose

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
STEP = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
SPECS = {
    "ann": AdapterSpec(rank=4, seed=1),
    "bob": AdapterSpec(rank=7, seed=2, train_unembed=False),
    "eve": AdapterSpec(rank=2, seed=3, train_mlp=False),
}


@pytest.fixture(scope="module")
def engines(shared_data: Path) -> Iterator[Engines]:
    """Engines on a CPU."""
    made = engines_on("cpu", shared_data / "stories260k" / "hf")
    yield made
    made.close()


def engines_on(device: str, model: Path, *words: str, specs: Mapping[str, AdapterSpec] = SPECS) -> Engines:
    """Engines of float32, with models that have taken a step, so that B is not zero."""
    keys = ["actor.ppo_max_token_len_per_gpu=64", "actor.fsdp_config.dtype=float32", "rollout.dtype=float32"]
    keys += ["rollout.max_num_seqs=6", f"model.path={model}"]
    config = compose(
        ["trainer.objective=serve", f"trainer.device={device}", *(f"actor_rollout_ref.{key}" for key in keys), *words]
    )
    made = Engines(config, device=device, tokenizer_size=512, max_model_len=128, run_id="shared")
    for name, spec in specs.items():
        made.create(name, spec)
        made.forward_backward([work(name)], backward=True, seed=1)
        made.optim_step(name, STEP)
    return made


def row(length: int, loss: str, width: int) -> Row:
    """A datum of random numbers that follow from its length."""
    random = np.random.default_rng(length)
    ids = random.integers(3, 500, length).astype(np.int32)
    targets = random.integers(3, 500, (length, width)).astype(np.int32)
    shape = (length, width) if loss == "cross_entropy" else (length,)
    given = {name: random.uniform(-1, 1, shape).astype(np.float32) for name in LOSSES[loss].inputs}
    return Row(ids=ids, targets=targets, columns=given)


LOSS_OF = defaultdict(
    lambda: ("cross_entropy", 1),
    {"ann": ("cross_entropy", 2), "bob": ("ppo", 1), "eve": ("importance_sampling", 1)},
)


def work(model: str, lengths: tuple[int, ...] = (5, 30, 17)) -> Work:
    loss, width = LOSS_OF[model]
    rows = [row(length + len(model) + ord(model[0]) % 5, loss, width) for length in lengths]
    return Work(model=model, rows=rows, loss=loss, settings=dict(LOSSES[loss].settings))


def gradients(engines: Engines, model: str) -> list[Tensor]:
    adapter = engines.models[model]
    found = [] if adapter.gradient is None else [*adapter.gradient.split([p.numel() for p in adapter.parameters()])]
    engines.drop_gradient(model)
    return found


def test_gradients_of_a_shared_pass_are_those_of_each_alone(engines: Engines, most: float = 1e-6) -> None:
    """Ranks, targets, losses, widths and lengths differ; micro-batches hold rows of several models."""
    asked = [work("ann"), work("bob"), work("eve", (9,)), work("ann", (12, 3))]
    alone = [engines.forward_backward([each], backward=True, seed=1)[0] for each in asked]
    expected = {name: gradients(engines, name) for name in SPECS}
    together = engines.forward_backward(asked, backward=True, seed=1)
    for name, parts in expected.items():
        found = gradients(engines, name)
        assert len(found) == len(parts)
        mine, other = (torch.cat([part.flatten() for part in each]) for each in (found, parts))
        assert float((mine - other).norm()) <= most * max(1.0, float(other.norm()))
    for each, (log_probs, told), (own, metrics) in zip(asked, together, alone, strict=True):
        assert told["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)
        for mine, other, given in zip(log_probs, own, each.rows, strict=True):
            assert mine.shape == given.targets.shape
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    forward = engines.forward_backward(asked, backward=False, seed=1)
    assert forward[1][1]["loss:sum"] == pytest.approx(alone[1][1]["loss:sum"], rel=1e-5)


def test_numbers_that_are_not_finite_stay_with_their_model(engines: Engines) -> None:
    """The pass breaks off with nothing added: the service computes each request alone."""
    engines.create("bad", AdapterSpec(rank=3, seed=4))
    engines.models["bad"].parameters()[1].data.fill_(torch.inf)
    bad = Work(model="bad", rows=work("ann").rows, loss="cross_entropy", settings={})
    for backward in (True, False):
        with pytest.raises(FloatingPointError, match="not finite"):
            engines.forward_backward([bad, work("bob")], backward=backward, seed=1)
    assert engines.models["bob"].gradient is None and engines.models["bad"].gradient is None
    assert all(p.grad is None for p in engines.models["bob"].parameters())
    engines.drop("bad")


def test_samples_of_several_models_share_a_batch(engines: Engines, tmp_path: Path) -> None:
    """More samples than places, answers of different lengths, one request cancelled before: tokens as alone."""
    for name in SPECS:
        engines.saver(name, tmp_path / name, optimizer=False)()
    folders = [tmp_path / "ann", None, tmp_path / "bob", tmp_path / "eve", tmp_path / "ann"]

    def prompt(i: int) -> Prompt:
        sampling = SamplingParams(max_tokens=4 + 3 * i, stop_token_ids=(2,))
        return Prompt(ids=[1, 300 + i, 41][: 1 + i % 3], sampling=sampling, seed=i, num_samples=2, scored=i == 3)

    asked = [(f"r{i}", folder, prompt(i)) for i, folder in enumerate(folders)]
    alone = [engines.sample([each])[0] for each in asked]
    found = engines.sample(asked)
    for mine, other in zip(found, alone, strict=True):
        assert mine is not None and other is not None
        for (ids, log_probs, stopped), (own, expected, ended) in zip(mine.samples, other.samples, strict=True):
            assert ids.tolist() == own.tolist() and stopped == ended
            np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-5)
    other = engines.sample([("base", None, prompt(0))])[0]
    assert alone[0] is not None and other is not None
    assert alone[0].samples[0][1].tolist() != other.samples[0][1].tolist(), "adapters make a difference"


def test_no_samples_of_a_model_that_diverged(engines: Engines, tmp_path: Path) -> None:
    engines.create("bad", AdapterSpec(rank=3, seed=4))
    engines.models["bad"].parameters()[1].data.fill_(torch.inf)
    engines.saver("bad", tmp_path / "bad", optimizer=False)()
    engines.drop("bad")
    prompt = Prompt(ids=[1, 300], sampling=SamplingParams(max_tokens=2), seed=1)
    with pytest.raises(ValueError, match="its weights diverged"):
        engines.sample([("bad", tmp_path / "bad", prompt)])
    assert engines.sample([("base", None, prompt)])[0] is not None


def test_states_come_back_and_snapshots_take_their_weights(engines: Engines, tmp_path: Path) -> None:
    """A loaded model takes the same next step; weights that did not change are one file, others are not."""
    state, snapshot, later = tmp_path / "state", tmp_path / "snapshot", tmp_path / "later"
    engines.saver("bob", state, optimizer=True)()
    engines.saver("bob", snapshot, optimizer=False)()
    assert (state / WEIGHTS).samefile(snapshot / WEIGHTS)
    engines.load("copy", state, optimizer=True)
    for name in ("bob", "copy"):
        engines.forward_backward([replace(work("bob"), model=name)], backward=True, seed=1)
        engines.optim_step(name, STEP)
    for mine, other in zip(engines.models["copy"].parameters(), engines.models["bob"].parameters(), strict=True):
        assert torch.equal(mine, other)
    engines.saver("bob", later, optimizer=False)()
    assert not torch.equal(*(load_file(each / WEIGHTS)[NAME] for each in (snapshot, later)))
    engines.drop("copy")
