"""`verl-like export`: what comes out is what the engine held, from our checkpoints and from verl's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3MoeConfig

from tests.unit.engine import tiny
from verl_like.checkpoint.checksums import collect
from verl_like.checkpoint.layout import commit, prepare_step_dir, write_trainer_state
from verl_like.cli.main import main
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit import export as exporting
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed

CONTENTS = ["model", "optimizer", "extra"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, process: ProcessInfo) -> str:
    """A folder with weights: a run starts from a trained model."""
    return tiny.trained_folder(tmp_path_factory.mktemp("model"), process)


def saved(engine: FSDPEngine, run: Path, role: str = "actor", step: int = 2) -> Path:
    """A checkpoint as a run writes it, after one update."""
    batch = tiny.experience(5)
    loss: Any = tiny.PolicyLoss() if role == "actor" else tiny.ValueLoss()
    engine.train_minibatch(batch, loss, tiny.denominators(batch), rule=tiny.ONE_BATCH)
    written = prepare_step_dir(run, step)
    assert engine.save(str(written / role), contents=CONTENTS) == []
    (written / role / "huggingface" / "tokenizer.json").write_text("{}")
    write_trainer_state(written, {})
    collect(written)
    return commit(written)


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


def test_a_run_becomes_the_folder_that_the_engine_would_write(
    process: ProcessInfo, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny.build_engine(process, path)
    saved(engine, tmp_path / "run")
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    engine.export_hf(str(tmp_path / "own"))
    assert_equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "own"))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float32 and "27 tensors, 0.00 GB in float32, 1 file(s)" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "own", "run"]


def test_casting_and_several_files(
    process: ProcessInfo, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.build_engine(process, path)
    step = saved(engine, tmp_path / "run")
    monkeypatch.setattr(exporting, "FILE_BYTES", 40_000)
    main(["export", str(step), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    expected = {name: tensor.bfloat16() for name, tensor in dict(engine.export_weights(torch.float32)).items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")  # by the index
    assert model.dtype == torch.bfloat16
    assert_equal({name: p.detach() for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("random_base", [False, True])
def test_adapters_are_merged_or_apart(process: ProcessInfo, path: str, tmp_path: Path, random_base: bool) -> None:
    """Without weights in model.path the checkpoint holds the base too."""
    base = tiny.model_folder(tmp_path / "base") if random_base else path
    engine = tiny.build_engine(process, base, model={"lora_rank": 4, "lora_alpha": 8})
    step = saved(engine, tmp_path / "run")
    main(["export", str(step), str(tmp_path / "merged")])
    expected = {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}
    assert_equal(weights_of(tmp_path / "merged"), expected)
    main(["export", str(step), str(tmp_path / "apart"), "--lora", "apart"])
    assert_equal(weights_of(tmp_path / "apart"), weights_of(step / "actor" / "adapter"))
    assert json.loads((tmp_path / "apart" / "adapter_config.json").read_text())["lora_alpha"] == 8
    assert not (tmp_path / "apart" / "config.json").exists() and (tmp_path / "apart" / "tokenizer.json").exists()


def test_a_base_model_that_moved_is_named(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = tiny.build_engine(process, path, model={"lora_rank": 4, "lora_alpha": 8})
    adapter = saved(engine, tmp_path / "run") / "actor" / "adapter" / "adapter_config.json"
    settings = json.loads(adapter.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
    adapter.write_text(json.dumps(settings))
    (adapter.parents[2] / "checksums.json").unlink()
    with pytest.raises(SystemExit, match=r"gone, which cannot be loaded.*--base MODEL"):
        main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--base", path])
    assert_equal(weights_of(tmp_path / "out"), {n: t.clone() for n, t in engine.export_weights(torch.float32)})


def test_a_critic_keeps_its_head(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = tiny.build_engine(process, path, kind="value")
    step = saved(engine, tmp_path / "run", role="critic")
    main(["export", str(step), str(tmp_path / "out"), "--role", "critic"])
    assert_equal(weights_of(tmp_path / "out"), {n: t.clone() for n, t in engine.export_weights(torch.float32)})
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(model.score.weight, weights_of(tmp_path / "out")["score.weight"])


def test_experts_and_tied_embeddings_have_the_names_of_files(process: ProcessInfo, tmp_path: Path) -> None:
    settings = Qwen3MoeConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    settings.save_pretrained(tmp_path / "moe")
    engine = tiny.build_engine(process, str(tmp_path / "moe"))
    saved(engine, tmp_path / "run")
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    got = weights_of(tmp_path / "out")
    assert_equal(got, {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)})
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in got and "lm_head.weight" not in got


def test_damage_and_wrong_folders_are_told(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    step = saved(tiny.build_engine(process, path), tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(SystemExit, match="full exists and is not empty"):
        main(["export", str(step), str(tmp_path / "full")])
    with pytest.raises(SystemExit, match="is neither a run's folder"):
        main(["export", str(tmp_path / "full"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="critic/model"):
        main(["export", str(step), str(tmp_path / "out"), "--role", "critic"])
    (shard,) = (step / "actor" / "model").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(SystemExit, match=r"damaged \(CRC-32"):
        main(["export", str(step), str(tmp_path / "out")])


def write_verl(
    folder: Path, tensors: dict[str, Tensor], mesh: tuple[int, ...], config: Path, names: tuple[str, ...]
) -> None:
    """Files as verl's FSDP checkpoint manager writes them: a state dict of DTensors per rank."""
    world = int(torch.tensor(mesh).prod())
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text((config / "config.json").read_text())
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            place = [Replicate()] * (len(mesh) - 1) + [Shard(0)]
            state = {}
            for name, tensor in tensors.items():
                chunks = tensor.chunk(mesh[-1])  # the last ranks of an uneven one have less, or nothing
                number = rank % mesh[-1]
                local = chunks[number].clone() if number < len(chunks) else tensor[:0].clone()
                state[name] = DTensor.from_local(
                    local, device_mesh, place, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.fixture
def outside(process: ProcessInfo) -> Iterator[None]:
    """Without the module's process group, as the command runs, and as another one is made here."""
    shutdown_distributed()
    yield
    tiny.single_process()


@pytest.mark.parametrize(("mesh", "names"), [((3,), ("fsdp",)), ((2, 2), ("ddp", "fsdp"))])
def test_verls_files_become_a_folder(
    path: str, tmp_path: Path, outside: None, mesh: tuple[int, ...], names: tuple[str, ...]
) -> None:
    full = weights_of(Path(path))
    write_verl(tmp_path / "step" / "actor", full, mesh, Path(path), names)
    main(["export", str(tmp_path / "step"), str(tmp_path / "out")])
    assert_equal(weights_of(tmp_path / "out"), full)
    assert not (tmp_path / "out" / "fsdp_config.json").exists()
    (tmp_path / "step" / "actor" / f"model_world_size_{4 if len(mesh) > 1 else 3}_rank_1.pt").unlink()
    with pytest.raises(SystemExit, match=r"does not hold the files of one run's ranks"):
        main(["export", str(tmp_path / "step" / "actor"), str(tmp_path / "other")])


def test_verls_lora_is_merged(path: str, tmp_path: Path, outside: None) -> None:
    full = weights_of(Path(path))
    target = "model.layers.0.self_attn.q_proj"
    a, b = torch.randn(4, 64), torch.randn(full[f"{target}.weight"].shape[0], 4)
    state = {
        f"base_model.model.{name.replace(target, target + '.base_layer')}": tensor for name, tensor in full.items()
    }
    state[f"base_model.model.{target}.lora_A.default.weight"] = a
    state[f"base_model.model.{target}.lora_B.default.weight"] = b
    write_verl(tmp_path / "actor", state, (2,), Path(path), ("fsdp",))
    with pytest.raises(SystemExit, match="which tell alpha"):
        main(["export", str(tmp_path / "actor"), str(tmp_path / "out")])
    (tmp_path / "actor" / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    main(["export", str(tmp_path / "actor"), str(tmp_path / "out")])
    got = weights_of(tmp_path / "out")
    torch.testing.assert_close(got[f"{target}.weight"], full[f"{target}.weight"] + 4 * b @ a)
    others = [name for name in full if name != f"{target}.weight"]
    assert got.keys() == full.keys() and all(torch.equal(got[name], full[name]) for name in others)


def test_a_pickle_that_runs_code_is_refused(path: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "ran").touch, ())

    (tmp_path / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "actor" / "huggingface" / "config.json").write_text((Path(path) / "config.json").read_text())
    torch.save({"weight": Evil()}, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    with pytest.raises(SystemExit, match="--trust-pickle"):
        main(["export", str(tmp_path / "actor"), str(tmp_path / "out")])
    assert not (tmp_path / "ran").exists()
