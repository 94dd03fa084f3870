"""`verl-like chat MODEL`: talk to a checkpoint or any model in the terminal."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_like.config.engines import OURS
from verl_like.config.errors import ConfigError, input_errors
from verl_like.config.parser import number
from verl_like.models.location import check_model

if TYPE_CHECKING:
    from verl_like.data.chat import PromptEncoder
    from verl_like.rollout.base import RolloutEngine
    from verl_like.rollout.rollout_engine import SamplingParams

_HELP = "/new forgets the conversation, /exit (or Ctrl-D) ends"
_LOOK_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and how it answers."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder or hub name, a checkpoint, or a run's folder"
    )
    parser.add_argument(
        "--prompt", "-p", action="append", metavar="TEXT", help="say this instead of asking; repeatable"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--engine", choices=OURS, default="hf", help="what generates (hf)")
    parser.add_argument("--temperature", type=number(0), default=0.7, help="0: always the most likely token (0.7)")
    parser.add_argument("--top-p", type=number(0, 1), default=1.0, help="share of the probability to sample from (1.0)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer, at most (512)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling (1)")
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="data.chat_template: a name or a Jinja file")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model's own folder")


def run(arguments: argparse.Namespace) -> None:
    """Answer line by line. Raises ConfigError, hence exit status 1, for a model that cannot be used."""
    check_model(arguments.model)  # before torch is imported
    from verl_like.kit.serving import model_of
    from verl_like.rollout.rollout_engine import SamplingParams

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    with model_of(arguments.model) as model, _loaded(arguments, model) as (engine, encoder, end_ids, longest):
        sampling = SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            stop_token_ids=end_ids,
            do_sample=arguments.temperature > 0,
        )
        _talk(engine, encoder, sampling, arguments, longest)


@contextmanager
def _loaded(arguments: argparse.Namespace, model: Any) -> Iterator[tuple[RolloutEngine, PromptEncoder, Any, int]]:
    from verl_like.data.dataset import make_encoder
    from verl_like.kit.serving import served, settings_for
    from verl_like.models.loading import end_token_ids, load_hf_config, load_tokenizer, num_positions
    from verl_like.trainer.compose import compose_with_warnings
    from verl_like.trainer.facts import resolve_world

    keys = [
        f"actor_rollout_ref.rollout.name={arguments.engine}",
        "actor_rollout_ref.rollout.max_model_len=null",
        f"data.max_response_length={arguments.max_tokens}",
        f"trainer.seed={arguments.seed}",
        *([f"data.chat_template={arguments.chat_template}"] if arguments.chat_template else []),
        *(["actor_rollout_ref.model.trust_remote_code=True"] if arguments.trust_remote_code else []),
    ]
    config, _ = compose_with_warnings(*settings_for(model, keys, []))
    with input_errors():
        settings, data = config.actor_rollout_ref.model, config.data
        tokenizer = load_tokenizer(data.tokenizer or settings.path, settings.trust_remote_code, "MODEL")
        hf_config = load_hf_config(settings, "MODEL")
        end_ids = end_token_ids(tokenizer, hf_config, settings.path, "MODEL")
        encoder = make_encoder(data, tokenizer)
        device, _ = resolve_world(config)
        room = max(8192, 2 * (data.max_prompt_length + data.max_response_length))  # for several times a run's turns
        longest = min(num_positions(hf_config), room)
    with served(config, hf_config, tokenizer_size=len(tokenizer), max_model_len=longest, device=device) as replica:
        yield replica.engine, encoder, end_ids, longest


def _talk(
    engine: RolloutEngine, encoder: PromptEncoder, sampling: SamplingParams, arguments: Any, longest: int
) -> None:
    """Talk with the model until the user ends it.

    longest: tokens of a conversation with its answer, which may be shorter than asked for.
    """
    from verl_like.rollout.rollout_engine import GenerationRequest, request_seed

    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages: list[dict[str, str]] = list(start)
    interactive = arguments.prompt is None and sys.stdin.isatty()
    if interactive:
        print(f"{arguments.model}: {_HELP}")
    for turn in itertools.count():
        text = _next_text(arguments.prompt, turn, interactive)
        if text is None or text.strip() == "/exit":
            return
        if text.strip() == "/new" or not encoder.has_template:  # without a template every line is a prompt of its own
            messages = list(start)
        if text.strip() in ("/new", ""):
            continue
        messages.append({"role": "user", "content": text})
        try:
            (ids,) = encoder.encode([(messages, None)])
            if (room := longest - len(ids)) < 1:
                raise ValueError(
                    f"the conversation has {len(ids)} tokens, and the model takes {longest}: /new begins another"
                )
            sampling = replace(sampling, max_tokens=min(arguments.max_tokens, room))
            request = GenerationRequest(
                request_id=str(turn), prompt_ids=ids, sampling=sampling, seed=request_seed(arguments.seed, "chat", turn)
            )
            answer = _stream(engine, encoder.tokenizer, request)
        except ValueError as error:  # the template refuses the messages, or they are too long
            if not interactive:
                raise ConfigError([str(error)]) from error
            print(f"error: {error}\n{_HELP}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _next_text(prompts: list[str] | None, turn: int, interactive: bool) -> str | None:
    if prompts is not None:
        return prompts[turn] if turn < len(prompts) else None
    try:
        return input("> " if interactive else "")
    except EOFError:
        return None


def _stream(engine: RolloutEngine, tokenizer: Any, request: Any) -> str:
    """Print the answer while it is sampled; Ctrl-C ends it. The text."""
    printed = ""

    def show(ids: Any) -> None:
        nonlocal printed
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character
            print(text[len(printed) :], end="", flush=True)
            printed = text

    with engine.opened():
        future = engine.submit(request)
        try:
            while not future.done():
                time.sleep(_LOOK_S)
                found = engine.snapshot().get(request.request_id)
                if found is not None and sys.stdout.isatty():
                    show(found.token_ids)
        except KeyboardInterrupt:
            engine.abort([request.request_id])
        show(future.result().sampled.token_ids)
    print()
    return printed
