"""One rollout engine in this process with the weights of a finished model: for `verl-like eval` and `chat`.

No training engine is built, so that a model needs the memory of its weights alone, in the rollout's precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from verl_like.cluster.local import LocalWorkerGroup
from verl_like.cluster.worker_group import RankEnv, WorkerError, new_run_id
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.kit.export import Choices, export
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.families import model_class
from verl_like.models.loading import has_weights
from verl_like.parallel.dist import init_distributed, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.client import LocalLink, RolloutClient
from verl_like.rollout.router import Router
from verl_like.trainer.replicas import SamplingClient
from verl_like.trainer.resume import CONFIG_FILE
from verl_like.workers.rollout import start_engine

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ROLLOUT = "actor_rollout_ref.rollout"
ONE_PROCESS = (
    "algorithm.adv_estimator=grpo",  # no critic
    "actor_rollout_ref.model.lora_rank=0",  # an exported model has its adapters merged
    "actor_rollout_ref.model.lora_adapter_path=null",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
)
"""Keys of a configuration under which a model is served; they do not change what it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A Hugging Face folder or hub name. config_file: of the run that trained it, where it came from a checkpoint."""

    path: str
    config_file: Path | None = None


@contextmanager
def model_of(path: str) -> Iterator[Model]:
    """A model as it is; of a checkpoint or a run's folder, its export (LoRA merged), removed again at the end."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").exists():
        yield Model(path=path)
        return
    with TemporaryDirectory(prefix="verl_like_model_") as temporary:
        try:
            (came_from, *_) = export(folder, Path(temporary) / "model", Choices())
        except ValueError as error:
            raise ConfigError([f"{path} is no Hugging Face folder (config.json), and {error}"]) from error
        role = Path(came_from.removeprefix("from "))
        file = role.parent / CONFIG_FILE
        yield Model(path=str(Path(temporary) / "model"), config_file=file if file.exists() else None)


@contextmanager
def served(
    config: PPOConfig, hf_config: PretrainedConfig, *, tokenizer_size: int, max_model_len: int, device: str
) -> Iterator[OneReplica]:
    """The engine of rollout.name, filled with the weights of actor_rollout_ref.model.path."""
    server: list[_Server] = []

    def start(_: None, env: RankEnv) -> _Server:
        server.append(_Server(config, hf_config, env, tokenizer_size, max_model_len))
        return server[0]

    try:
        group = LocalWorkerGroup(start, device=device, run_id=new_run_id())
    except WorkerError as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise ConfigError([str(error.__cause__)]) from error
        raise
    try:
        yield OneReplica(server[0].engine)
    finally:
        group.shutdown()


class OneReplica:
    """Replicas of the collector's protocol (`episodes.collector.Replicas`): one engine, in this process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Run `work` with the engine open until its future is done."""
        router = Router([LocalLink("the rollout engine", self.engine)], max_running_requests=None)
        try:
            future = work(SamplingClient(router))
            with self.engine.opened():
                return future.result()
        finally:
            router.close()


class _Server:
    """The one rank: joins a process group of its own, as every engine expects."""

    def __init__(
        self, config: PPOConfig, hf_config: PretrainedConfig, env: RankEnv, tokenizer_size: int, max_model_len: int
    ) -> None:
        policy = config.actor_rollout_ref
        address = (env.master_address, env.master_port)
        process = init_distributed(env.rank, env.world_size, env.local_rank, env.local_world_size, *address, env.device)
        with ExitStack() as stack:
            stack.callback(shutdown_distributed)
            self.engine = start_engine(
                policy.rollout,
                policy.model,
                process=process,
                hf_config=hf_config,
                tokenizer_size=tokenizer_size,
                max_model_len=max_model_len,
                seed=config.trainer.seed,
                run_id=env.run_id,
                tokenizer=config.data.tokenizer,
            )
            stack.callback(self.engine.shutdown)  # vLLM must end before the process group
            stream = weights_of(policy.model.path, hf_config, self.engine.dtype, policy.model.trust_remote_code)
            self.engine.load_weights(stream, 0)
            self._stack = stack.pop_all()

    def shutdown(self) -> None:
        """End the engine, then leave the process group."""
        self._stack.close()


def weights_of(
    path: str, hf_config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name as in files, tensor) of a model on disk or of the hub. Raises ValueError without any weights."""
    folder = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    if not has_weights(folder):
        raise ValueError(f"{path} holds no weights (*.safetensors)")
    transformers_logging.disable_progress_bar()
    model = model_class(hf_config).from_pretrained(
        folder, config=hf_config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    names = CheckpointNames(model)
    for name, parameter in model.named_parameters():
        yield from names.views(name, parameter.detach())


def settings_for(model: Model, overrides: Sequence[str], yaml_files: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """Choose what `compose` takes as (overrides, files): the run's own configuration, unless the user gives a file."""
    files = list(yaml_files) or ([model.config_file] if model.config_file is not None else [])
    given = {each.lstrip("+").partition("=")[0] for each in overrides}
    kept = [each for each in ONE_PROCESS if each.partition("=")[0] not in given]
    for length in ("prompt_length", "response_length"):  # a saved configuration holds the one that follows the other
        if f"data.max_{length}" in given and f"{_ROLLOUT}.{length}" not in given:
            kept.append(f"{_ROLLOUT}.{length}=${{data.max_{length}}}")
    return [*kept, *overrides, f"actor_rollout_ref.model.path={model.path}"], files
