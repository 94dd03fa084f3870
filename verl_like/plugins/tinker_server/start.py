"""Start of the server: `verl-like serve model.path=... serve.port=...`. All is checked before a model is loaded."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from verl_like.checkpoint.lock import held
from verl_like.cluster.worker_group import new_run_id
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError, input_errors, problems_of, raise_if_any
from verl_like.models.families import refuse_vision
from verl_like.models.loading import num_positions, tell_positions
from verl_like.observe.logs import setup_driver_logging
from verl_like.plugins.tinker_server.engine import Engines
from verl_like.plugins.tinker_server.fair import ONE_OF_A_MODEL
from verl_like.plugins.tinker_server.images import Reader
from verl_like.plugins.tinker_server.prompts import Limits
from verl_like.plugins.tinker_server.samplers import SAMPLERS
from verl_like.plugins.tinker_server.server import application
from verl_like.plugins.tinker_server.service import Service
from verl_like.plugins.tinker_server.store import Store
from verl_like.small_files import read_text
from verl_like.trainer import sft_trainer
from verl_like.trainer.command_line import run_parsed
from verl_like.trainer.facts import Fact, Facts
from verl_like.trainer.folders import check_output_folders, log_dir
from verl_like.trainer.main_ppo import quiet_tokenizers
from verl_like.trainer.start_checks import check_models

logger = logging.getLogger(__name__)

OBJECTIVE = "trainer.objective=serve"
_KEY_PREFIX = "tml-"  # the client refuses others
_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"

add_arguments = sft_trainer.add_arguments


def objective() -> NoReturn:
    """Say that nothing is trained by itself under trainer.objective=serve. Raises ConfigError."""
    raise ConfigError([f"{OBJECTIVE}: clients say what is trained; start it with `verl-like serve`"])


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal ends it, from parsed arguments."""
    quiet_tokenizers()
    arguments.overrides = [OBJECTIVE, *arguments.overrides]
    run_parsed(serve, arguments)


class ServeFacts(Facts):
    """Facts of a server: a model, no data."""

    @Fact
    def max_model_len(self) -> int:
        """Tokens of a prompt with its answer, or of a row that is trained."""
        asked = self.config.actor_rollout_ref.rollout.max_model_len
        positions = num_positions(self.hf_config)
        if asked is not None and asked > positions:
            what = f"actor_rollout_ref.rollout.max_model_len={asked}"
            raise ValueError(f"{what}: {tell_positions(self.hf_config)}; lower it")
        return asked or positions

    @Fact
    def api_keys(self) -> dict[str, str] | None:
        """Keys by tenant."""
        path = self.config.serve.api_keys
        return None if path is None else read_keys(Path(path).expanduser())


def read_keys(path: Path) -> dict[str, str]:
    """Read a file with a tenant and its key on each line; # begins a comment. Raises ValueError; it names no key."""
    keys: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        place = f"serve.api_keys={path}, line {number}"
        if not words:
            continue
        if len(words) != 2 or not words[1].startswith(_KEY_PREFIX) or len(words[1]) < 12:
            raise ValueError(f"{place}: write a name and a key of 12 characters or more that begins with {_KEY_PREFIX}")
        if words[0] in keys or words[1] in keys.values():
            raise ValueError(f"{place}: the name or the key is there before; a tenant has one key of its own")
        keys[words[0]] = words[1]
    if not keys:
        raise ValueError(f"serve.api_keys={path} has no keys: write a line with a name and a key")
    return keys


def _problems(facts: ServeFacts) -> Iterator[str]:
    """Yield all that is wrong, as far as it can be told without the model's weights."""
    config = facts.config
    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    if rollout.engine.code not in SAMPLERS or rollout.server:
        place = f"{_ROLLOUT}.name={rollout.name} with server={rollout.server}"
        yield f"{place}: not available under `verl-like serve`; set it to hf or vllm, and server=False"
    if rollout.tensor_model_parallel_size != 1:
        size = rollout.tensor_model_parallel_size
        yield f"{_ROLLOUT}.tensor_model_parallel_size={size}: the server is one process; leave it out"
    most, rank = rollout.engine.adapter_rank, config.serve.max_lora_rank
    if most is not None and rank > most:
        yield f"serve.max_lora_rank={rank}: {rollout.name} keeps adapters up to rank {most}; lower it, or set name=hf"
    if trainer.nnodes != 1 or trainer.n_gpus_per_node != 1:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} with trainer.nnodes={trainer.nnodes}: the server is "
            "one process; leave them out"
        )
    if model.lora_rank or model.lora_adapter_path:
        yield f"{_MODEL}.lora_rank={model.lora_rank}: clients bring the adapters; leave it out"
    yield from problems_of(
        lambda: facts.device,
        lambda: check_models(config, facts),
        lambda: facts.vision,
        lambda: most is None or refuse_vision(facts.hf_config, f"{_ROLLOUT}.name={rollout.name}", "set it to hf"),
        lambda: facts.max_model_len,
        lambda: facts.api_keys,
    )


def serve(config: PPOConfig) -> None:
    """Serve until a signal ends it. Raises ConfigError for what cannot be started."""
    with ExitStack() as stack:
        facts = ServeFacts(config, stack, trains=False)
        raise_if_any([*_problems(facts), *check_output_folders(config)])
        run_id, folder = new_run_id(), Path(config.trainer.default_local_dir).expanduser()
        stack.enter_context(held(folder, run_id))
        setup_driver_logging(log_dir(config), as_json=config.trainer.log_format == "json", run_id=run_id)
        with input_errors():
            listening = stack.enter_context(closing(_listening(config.serve.host, config.serve.port)))
        asyncio.run(_serve(config, facts, folder, run_id, listening))


def _facts_of(config: PPOConfig, facts: ServeFacts) -> dict[str, Any]:
    """Collect what a model that is computed again must find as it was."""
    actor = config.actor_rollout_ref.actor
    return {
        f"{_MODEL}.path": config.actor_rollout_ref.model.path,
        "config.json": hashlib.sha256(facts.hf_config.to_json_string().encode()).hexdigest()[:16],
        "actor_rollout_ref.actor.fsdp_config.dtype": str(actor.fsdp_config.dtype),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "serve.lora_alpha": config.serve.lora_alpha,
        "trainer.seed": config.trainer.seed,
    }


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"serve.host={host}, serve.port={port}: cannot listen there ({error}); choose others"
        ) from error


async def _serve(config: PPOConfig, facts: ServeFacts, folder: Path, run_id: str, listening: socket.socket) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with closing(Store(folder)) as store, ThreadPoolExecutor(1, "engines") as thread:
        if found := store.differing(_facts_of(config, facts)):
            known = ", ".join(found)
            fix = "set these as they were, or take another folder"
            raise ConfigError([f"trainer.default_local_dir={folder}: its models were trained with {known}; {fix}"])
        told = {"device": facts.device, "tokenizer_size": len(facts.tokenizer), "max_model_len": facts.max_model_len}
        engines = await loop.run_in_executor(thread, partial(Engines, config, run_id=run_id, **told))
        service = Service(engines, store, limits_of(config, facts), thread)
        await service.start()
        app = application(service, facts.api_keys, config.serve.max_request_megabytes * 2**20)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            host, port = listening.getsockname()[:2]
            url, who = f"http://{f'[{host}]' if ':' in host else host}:{port}", "any key that begins with tml-"
            who = who if facts.api_keys is None else f"keys of {', '.join(facts.api_keys)}"
            logger.info("serving %s at %s (TINKER_BASE_URL), %s; state in %s", service.limits.model, url, who, folder)
            signalled = asyncio.create_task(ended.wait())
            await asyncio.wait({signalled, *service.tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in service.tasks:
                if task.done():  # it ends by an error alone: a full disk, say
                    task.result()
        finally:
            await runner.cleanup()
            await service.stop()
            await loop.run_in_executor(thread, engines.close)


def _shared(config: PPOConfig, longest: int) -> dict[str, int]:
    """Tokens of a pass that requests share, by kind: a micro-batch to train on, all places of the sampling engine.

    Steps and saves share no numbers, only the wait for the disk.
    """
    if config.serve.isolation == "exact":
        return {}
    policy = config.actor_rollout_ref
    training = dict.fromkeys(("forward", "forward_backward"), policy.actor.ppo_max_token_len_per_gpu)
    return training | dict.fromkeys(ONE_OF_A_MODEL, 2**20) | {"sample": policy.rollout.max_num_seqs * longest}


def limits_of(config: PPOConfig, facts: ServeFacts) -> Limits:
    """Collect what the service is told of model and keys."""
    serving, path = config.serve, config.actor_rollout_ref.model.path
    return Limits(
        model=serving.model_name or path,
        arch=facts.hf_config.model_type,
        tokenizer=config.data.tokenizer,
        vocabulary=len(facts.tokenizer),
        longest=facts.max_model_len,
        eos_ids=facts.eos_ids,
        seed=config.trainer.seed,
        serve=serving,
        shared=_shared(config, facts.max_model_len),
        reader=Reader(vision=facts.vision, max_megapixels=config.data.max_image_megapixels),
    )
