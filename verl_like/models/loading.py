"""Tokenizer, config and weights from a Hugging Face folder or hub name.

A folder with a config but no weights gives a randomly initialised model: the same weights on every rank, from the seed
given, with a warning. That is how small test models and from-scratch experiments are started.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from verl_like.models import attention, families, state_layers
from verl_like.models.checkpoint_names import ROUTER_BIASES, is_router_bias
from verl_like.models.heads import (
    VALUE_HEAD,
    PolicyModel,
    TokenModel,
    ValueModel,
    attach_value_head,
)
from verl_like.models.lean_model import Functions, check_liger, liger_functions, put_in
from verl_like.models.location import TOKENIZER_FILES, check_location
from verl_like.parallel.sharding import saved_buffers, sized_units
from verl_like.parallel.ulysses import repeated_key_heads
from verl_like.remote_storage import local_folder, to_shared_memory
from verl_like.small_files import opened_tensors, read_object
from verl_like.text import one_line
from verl_like.user_code import EXTERNAL_MODULES, external_modules, import_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl_like.config import FSDPConfig, ModelConfig
    from verl_like.config.actor import RouterConfig

log = logging.getLogger(__name__)

Kind = Literal["policy", "value"]


def load_tokenizer(path: str, trust_remote_code: bool = False, key: str = "actor_rollout_ref.model.path") -> Any:
    """Load the tokenizer of a model folder, with a pad token (the end token where none is set).

    Raises ValueError, naming `key`, where there is none.
    """
    fix = "save the model's tokenizer in the folder (tokenizer.save_pretrained)"
    fix += ", or name another: data.tokenizer" if "." in key else ""  # not of a verb that takes a model alone
    check_location(key, path, *TOKENIZER_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(local_folder(path, key), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{key}={path}: its tokenizer cannot be loaded ({one_line(error)}); {fix}") from error
    # What transformers makes of a folder without tokenizer files knows special tokens alone
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError(f"{key}={path} holds no tokenizer: no text becomes a token; {fix}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_hf_config(model: ModelConfig, key: str = "model.path") -> PretrainedConfig:
    """Load the model's Hugging Face config with `override_config` applied. Raises ValueError for unknown names in it.

    key: what messages call the model's path.
    """
    import_modules(external_modules(), EXTERNAL_MODULES)
    import_modules(model.external_lib, "model.external_lib")
    check_location(key, model.path, "config.json")
    folder = local_folder(model.path, key)
    with _usable_config(model, key):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    for name, value in model.override_config.items():
        if name not in config:
            close = difflib.get_close_matches(name, config.to_dict(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise ValueError(f"model.override_config.{name}={value}: no key of a {config.model_type!r} config; {hint}")
        with _usable_config(model, key):
            setattr(config, name, value)
    try:
        families.check(config, packed=uses_packing(model))
    except ValueError as error:
        raise ValueError(f"{key}={model.path}: {error}") from error
    _check_router_loss(model, config)
    if getattr(config, "quantization_config", None):
        method = published_quantisation(model)["quant_method"]
        if method == "fp8" and has_weights(model.path) and importlib.util.find_spec("accelerate") is None:
            raise ValueError(f"{key}={model.path}: to load weights in fp8 transformers wants accelerate: install it")
        log.info("%s=%s: its %s weights are dequantised as they are loaded", key, model.path, method)
        del config.quantization_config  # of what is trained, sent and written nothing is quantised
    return config


def published_quantisation(model: ModelConfig) -> dict[str, Any]:
    """Read how the weights in a model's folder are quantised: quantization_config of config.json; empty where not."""
    stored, _ = PretrainedConfig.get_config_dict(local_folder(model.path))
    return stored.get("quantization_config") or {}


def as_sent(model: ModelConfig) -> dict[str, Any]:
    """Choose what an engine must read otherwise than in config.json: overrides, and that its weights are plain."""
    return dict(model.override_config) | ({"quantization_config": None} if published_quantisation(model) else {})


@contextmanager
def _usable_config(model: ModelConfig, key: str = "model.path") -> Iterator[None]:
    """Turn any error inside into a ValueError that names key and path.

    transformers, or a model's own code, raises errors of many kinds for a config that describes no model.
    """
    try:
        yield
    except Exception as error:
        what = f" with model.override_config={model.override_config}" if model.override_config else ""
        raise ValueError(f"{key}={model.path}: its config.json{what} cannot be used: {one_line(error)}") from error


def load_generation_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """Read the generation_config.json of a model; empty where there is none.

    Raises ValueError, naming `key`, for one that cannot be read: it may be the only file that names the tokens that end
    a response.
    """
    absent = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    try:
        file = cached_file(local_folder(path, key), "generation_config.json", **absent)
        return {} if file is None else read_object(Path(file))
    except (OSError, ValueError) as error:
        what = f"{key}={path}: its generation_config.json cannot be used: {error}"
        raise ValueError(f"{what}. It must be an object, whose eos_token_id are the ids that end a response") from error


def write_generation_config(folder: Path, path: str, end_ids: Sequence[int]) -> None:
    """Write the generation_config.json of a trained model, so that its responses end the same wherever it is used.

    It holds the settings of `path`, and all ids that ended the model's responses.
    """
    said = load_generation_config(str(folder)) | load_generation_config(path) | {"eos_token_id": list(end_ids)}
    said.pop("_from_model_config", None)  # transformers would make it anew from config.json
    (folder / "generation_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def end_token_ids(tokenizer: Any, config: PretrainedConfig, path: str, key: str = "model.path") -> tuple[int, ...]:
    """Collect every id that ends a response, from tokenizer, config.json and generation_config.json together.

    config.json counts with override_config. Chat models often have two ids, and any of the three may be the only one to
    know one. Ids that the tokenizer does not have are never sampled: left out, with a warning.

    Raises ValueError, naming `key`, for an id that is not a whole number, and where none is left.
    """
    read = {"the tokenizer": [tokenizer.eos_token_id]}
    read["config.json"] = [part.eos_token_id for part in (config, config.get_text_config()) if "eos_token_id" in part]
    read["generation_config.json"] = [load_generation_config(path, key).get("eos_token_id")]
    found: list[int] = []
    for source, values in read.items():
        ids = [i for value in values for i in (value if isinstance(value, list | tuple) else [value]) if i is not None]
        if not all(type(i) is int for i in ids):
            raise ValueError(f"{key}={path}: eos_token_id={ids} of {source} must be the ids of tokens, whole numbers")
        known = tokenizer.get_vocab().values() if ids else ()  # which may leave numbers out, and go beyond its length
        if unknown := [i for i in ids if i not in known]:
            log.warning("%s=%s: no token has the eos_token_id %s of %s: left out", key, path, unknown, source)
        found += [i for i in ids if i not in unknown]
    if not found:
        what = (
            f"{key}={path}: neither the tokenizer nor config.json nor generation_config.json names an end-of-sequence"
        )
        raise ValueError(f"{what} token (eos_token_id) that the tokenizer has; name one in generation_config.json")
    return tuple(dict.fromkeys(found))


def build_token_model(
    model: ModelConfig,
    hf_config: PretrainedConfig,
    *,
    kind: Kind,
    dtype: torch.dtype,
    vocab_size: int | None,
    seed: int,
    empty: bool = False,
) -> TokenModel:
    """Build the model on the CPU with its weights, ready to be sharded.

    Args:
        model: model section of the configuration.
        hf_config: its Hugging Face config.
        kind: policy or value model.
        dtype: precision of the weights.
        vocab_size: token ids from here on are masked out of the softmax; None keeps the whole vocabulary.
        seed: of the weights that no file holds.
        empty: build on the meta device without weights, for ranks that get them from rank 0 (parallel/materialize.py).
    """
    if empty:
        hf = _meta_hf(model, hf_config, kind, dtype)
    else:
        hf = _load_weights(model, hf_config, kind, dtype, seed)
    return _wrap(hf, model, kind, vocab_size)


def replace_functions(hf: PreTrainedModel, model: ModelConfig, device: torch.device, *, compiled: bool) -> None:
    """Put faster functions into the model's modules: Liger's where asked for, lean ones on a CPU unless compiled.

    The reference path (padded rows, full logits) stays plain.
    """
    if model.use_liger and (uses_packing(model) or model.use_fused_kernels):
        keeps = model.enable_gradient_checkpointing and model.recompute_granularity == "selective"
        log.info("Liger kernels: %s", put_in(hf, liger_functions(products_are_kept=keeps)))
    elif model.use_lean_ops and uses_packing(model) and device.type == "cpu" and not compiled:
        log.debug("lean functions: %s", put_in(hf, Functions()))


def build_meta_model(model: ModelConfig, hf_config: PretrainedConfig, *, kind: Kind) -> TokenModel:
    """Build the module tree without memory: its names and shapes are those that a full model must have."""
    return _wrap(_meta_hf(model, hf_config, kind, torch.float32), model, kind, None)


def _meta_hf(model: ModelConfig, hf_config: PretrainedConfig, kind: Kind, dtype: torch.dtype) -> PreTrainedModel:
    attention.register()
    with torch.device("meta"), _usable_config(model):
        hf = families.model_class(hf_config).from_config(
            hf_config,
            dtype=dtype,
            **_implementations(model, hf_config),
            trust_remote_code=model.trust_remote_code,
        )
        if kind == "value":
            attach_value_head(hf, None)
    return hf


def _implementations(model: ModelConfig, config: PretrainedConfig) -> dict[str, Any]:
    """Choose the implementations of attention (ours for packed tokens, transformers' for padded rows) and experts."""
    chosen: dict[str, Any] = {"attn_implementation": attention.ATTENTION_NAME}
    if not uses_packing(model):
        chosen = {"attn_implementation": families.padded_attention(config)}
    elif config.get_text_config() is not config:  # a tower's attention is not causal, and goes image by image
        chosen = {"attn_implementation": {"text_config": attention.ATTENTION_NAME, "vision_config": "sdpa"}}
    if model.experts_implementation == "auto":
        return chosen
    if not families.num_experts(config):
        log.warning("model.experts_implementation has no effect: %s has no experts", model.path)
        return chosen
    return chosen | {"experts_implementation": str(model.experts_implementation)}


def has_weights(path: str) -> bool:
    """Check for weights: False only for a local folder without weight files; a hub name is taken to have them."""
    folder = Path(local_folder(path))
    patterns = ("*.safetensors", "pytorch_model*.bin")
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in patterns)


def check_weights(model: ModelConfig, whole: TokenModel) -> None:
    """Check that the weight files of a local folder hold every tensor of `whole`, in its shape.

    Raises ValueError for files that are absent, cut short or stand for others, and for tensors that are missing or of
    another shape: transformers would draw random ones.
    """
    folder, told = Path(local_folder(model.path)), f"model.path={model.path}: its weights"
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    fix = "download the model again, or correct its config.json"
    if not folder.is_dir() or not (any(folder.glob("*.safetensors")) or any(folder.glob("*.index.json"))):
        return
    if not (one.is_file() or index.is_file()):
        if any(folder.glob("pytorch_model*.bin")):
            return
        raise ValueError(f"{told} are in neither {one.name} nor files that {index.name} names; {fix}")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        listed = [one.name] if one.is_file() else json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        for name in sorted(set(listed)):
            with opened_tensors(folder / name) as file:  # compares the header with the file's size
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # of files anything may be wrong
        raise ValueError(f"{told} cannot be read ({type(error).__name__}: {error}); {fix}") from error
    if not families.stores_as_named(whole.hf.config):
        return
    named = {name: tuple(each.shape) for name, each in whole.hf.named_parameters() if name != VALUE_HEAD}
    others = {shapes[name] for name in shapes.keys() - named.keys()}  # which transformers may know by other names
    wrong = [
        name for name, shape in named.items() if shapes.get(name) != shape and (name in shapes or shape not in others)
    ]
    if wrong:
        found = shapes.get(wrong[0], "not there")
        raise ValueError(f"{told} are another model's: {wrong[0]} is {found}, not {named[wrong[0]]}; {fix}")


def check_backend(model: ModelConfig, config: PretrainedConfig, device: torch.device) -> None:
    """Check that the kernels asked for run here.

    Raises ValueError for Triton kernels where there is no GPU, and for Liger's where they cannot be used.
    """
    if model.use_liger:
        check_liger(config, device)
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton" and device.type != "cuda":
        raise ValueError("model.fused_kernel_options.impl_backend=triton needs a CUDA device: use torch")


def check_slices(model: ModelConfig, config: PretrainedConfig, size: int, key: str) -> None:
    """Check that the model can run on parts of its sequences, `size` ranks each.

    Raises ValueError otherwise, naming `key`.
    """
    if size == 1:
        return
    families.refuse_vision(config, f"{key}={size}", "set it to 1")
    families.refuse_state(config, f"{key}={size}", "set it to 1")
    if not uses_packing(model):
        raise ValueError(f"{key}={size} needs packed sequences: set model.use_remove_padding=True")


def check_context(model: ModelConfig, config: PretrainedConfig, size: int, key: str) -> None:
    """Check that the model can run on chunks of its sequences, which hold unlike positions; raises ValueError."""
    check_slices(model, config, size, key)
    kinds = {str(each.get("rope_type")) for each in _rotations(config)}
    if size > 1 and (stretched := sorted(kinds & {"dynamic", "longrope"})):
        why = "its frequencies follow the largest position of a pass, and ranks have other positions; set it to 1"
        raise ValueError(f"{key}={size} with RoPE of type {stretched[0]!r}: {why}")


def num_positions(config: PretrainedConfig) -> int:
    """Count the tokens that a row may have without a change to the others.

    Beyond original_max_position_embeddings of RoPE of type longrope (Phi-3) transformers takes other frequencies for
    all rows of a pass that holds such a row, and vLLM for all rows of a run that may have one.
    """
    longest: int = config.get_text_config().max_position_embeddings
    kept = [r["original_max_position_embeddings"] for r in _rotations(config) if r.get("rope_type") == "longrope"]
    return min([longest, *kept])


def tell_positions(config: PretrainedConfig) -> str:
    """Say how many positions a model has, and which field of its config says so."""
    positions, text = num_positions(config), config.get_text_config()
    if positions == text.max_position_embeddings:
        return f"the model has {positions} positions (max_position_embeddings)"
    return (
        f"the model has {positions} positions (original_max_position_embeddings) before its RoPE of type 'longrope' "
        "takes other frequencies, for shorter rows beside a longer one too"
    )


def _rotations(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Collect the parameters of all rotary embeddings of a model, of which kinds of layers may have their own."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [each for each in (given, *given.values()) if isinstance(each, dict)]


def check_ulysses(model: ModelConfig, config: PretrainedConfig, size: int) -> None:
    """Check that the model can run on slices of its sequences and of its heads; raises ValueError otherwise."""
    if size == 1:
        return
    check_slices(model, config, size, "ulysses_sequence_parallel_size")
    text = config.get_text_config()
    heads = text.num_attention_heads
    repeated_key_heads(heads, text.num_key_value_heads if "num_key_value_heads" in text else heads, size)


def uses_packing(model: ModelConfig) -> bool:
    """True for packed input through our own attention, false for padded rows through transformers' (reference path)."""
    return model.use_remove_padding


def shares_prompts(model: ModelConfig, router: RouterConfig | None = None) -> bool:
    """True where what rows of a micro-batch begin with is computed once; only packed rows can.

    router: settings of the actor's routers, which may count tokens.
    """
    return uses_packing(model) and model.share_prompts and not (router is not None and router.counts_tokens)


def sharding_units(model: TokenModel, fsdp: FSDPConfig) -> list[nn.Module]:
    """Choose the modules sharded as one unit each, inner before outer.

    They are wrap_policy's classes, modules of at least min_num_params, or the blocks that transformers itself would not
    split. Embedding and head stay with the root, which uses them.
    """
    policy = fsdp.wrap_policy
    if policy.min_num_params and not policy.transformer_layer_cls_to_wrap:
        return sized_units(model, policy.min_num_params, _root_modules(model.hf))
    names = set(policy.transformer_layer_cls_to_wrap or model.hf._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    absent = names - {type(layer).__name__ for layer in layers}
    if not layers or (absent and policy.transformer_layer_cls_to_wrap):
        raise ValueError(
            f"wrap_policy.transformer_layer_cls_to_wrap={policy.transformer_layer_cls_to_wrap}: a model of type "
            f"{model.hf.config.model_type!r} has no module of class {sorted(absent)}; it has "
            f"{sorted({type(module).__name__ for module in model.hf.modules()})}"
        )
    return layers


def _root_modules(hf: PreTrainedModel) -> list[nn.Module]:
    heads = (hf.get_input_embeddings(), hf.get_output_embeddings(), dict(hf.named_children()).get("score"))
    return [module for module in heads if module is not None]


def _check_router_loss(model: ModelConfig, config: PretrainedConfig) -> None:
    """Warn, or refuse, where the config asks for the load-balancing loss of transformers, which is never applied.

    It is a product of two means over whatever tokens one forward pass holds, so it would depend on how a mini-batch is
    cut; engine/router_losses.py has those that do not.
    """
    text = config.get_text_config()
    if "output_router_logits" not in text or not text.output_router_logits:
        return
    if "output_router_logits" in model.override_config:
        raise ValueError(
            "model.override_config.output_router_logits=True asks for the router's load-balancing loss "
            "(router_aux_loss_coef), which depends on how a mini-batch is cut: leave it out, and set "
            "actor_rollout_ref.actor.router.balance_loss_coef"
        )
    log.warning(
        "the config of %s sets output_router_logits, but the router's load-balancing loss is not applied by that "
        "(actor_rollout_ref.actor.router.balance_loss_coef has one)",
        model.path,
    )


def _wrap(hf: PreTrainedModel, model: ModelConfig, kind: Kind, vocab_size: int | None) -> TokenModel:
    _refuse_saved_buffers(hf)
    if uses_packing(model) and families.state_of(hf.config) and not state_layers.put_in(hf):
        raise ValueError(
            f"model type {hf.config.model_type!r}: this version of transformers computes its "
            f"{families.state_of(hf.config)} layers by functions that are not known here, so rows cannot be packed: "
            "set use_remove_padding=False, or install transformers 5.19"
        )
    if uses_packing(model) and families.keeps_segments(hf.config):
        attention.hand_on_segments(hf)
    if kind == "value":
        return ValueModel(hf)
    backend = "triton" if model.fused_kernel_options.impl_backend == "triton" else "torch"
    return PolicyModel(hf, vocab_size=vocab_size, fused=model.use_fused_kernels, backend=backend)


def _refuse_saved_buffers(hf: PreTrainedModel) -> None:
    """Raise ValueError for saved buffers other than routers' biases: whether they are state nobody here knows."""
    buffers = [name for name, _ in saved_buffers(hf) if not is_router_bias(name)]
    if buffers:
        raise ValueError(
            f"model type {hf.config.model_type!r} keeps {min(buffers)} (and {len(buffers) - 1} more) in saved buffers, "
            "of which it is not known what changes them: not available"
        )


def _load_weights(
    model: ModelConfig, hf_config: PretrainedConfig, kind: Kind, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    attention.register()
    transformers_logging.disable_progress_bar()  # one bar per rank and model would drown the run's own display
    path = local_folder(model.path)
    if model.use_shm and Path(path).is_dir():
        path = str(to_shared_memory(Path(path), "model.use_shm"))
    implementations = _implementations(model, hf_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_weights(path):
            _keep_biases_exact(hf_config)
            config = copy.deepcopy(hf_config)
            if published := published_quantisation(model):
                config.quantization_config = published | {"dequantize": True}
            with _report_without_head(kind):
                hf, told = families.model_class(hf_config).from_pretrained(
                    path,
                    config=config,
                    dtype=dtype,
                    **implementations,
                    trust_remote_code=model.trust_remote_code,
                    output_loading_info=True,
                )
            heads = tuple(f"{name}." for name, child in hf.named_children() if child is hf.get_output_embeddings())
            if kind == "value" and (
                lost := sorted(name for name in told["missing_keys"] if not name.startswith(heads))
            ):
                log.warning("%s lacks %s: new weights stand in", path, ", ".join(lost))
            for weight in hf.parameters() if published else ():  # some of its rules end in bfloat16, whatever is asked
                weight.data = weight.to(dtype) if weight.dtype == torch.bfloat16 else weight
        else:
            log.warning("%s holds no weights: the model starts from random weights (seed %d)", path, seed)
            hf = families.model_class(hf_config).from_config(
                hf_config,
                dtype=dtype,
                **implementations,
                trust_remote_code=model.trust_remote_code,
            )
        if kind == "value":
            attach_value_head(hf, _stored_tensor(Path(path), VALUE_HEAD))
    return with_exact_biases(hf)


@contextmanager
def _report_without_head(kind: Kind) -> Iterator[None]:
    """Keep transformers from calling a value model's head unexpected, and that of a language model newly made."""
    verbosity = transformers_logging.get_verbosity()
    if kind == "value":
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def with_exact_biases(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its routers' biases in float32, whatever its weights are in."""
    for name, bias in saved_buffers(hf):
        bias.data = bias.float() if is_router_bias(name) else bias
    return hf


def _keep_biases_exact(config: PretrainedConfig) -> None:
    """Have transformers load routers' biases in float32 for all types, as it does for most that have one."""
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is not None and families.num_experts(config):
        found._keep_in_fp32_modules_strict = {*(found._keep_in_fp32_modules_strict or ()), *ROUTER_BIASES}


def _stored_tensor(folder: Path, name: str) -> Tensor | None:
    """Read one tensor out of the safetensors files of a folder; None where it is not there."""
    for file in sorted(folder.glob("*.safetensors")):
        with opened_tensors(file) as stored:
            if name in stored.keys():  # noqa: SIM118 (not a dict)
                return stored.get_tensor(name)
    return None


def check_score_head(model: ModelConfig, hf_config: PretrainedConfig, key: str) -> None:
    """Check that the folder holds a trained head with one output (score.weight).

    Raises ValueError, naming `key`, otherwise. Without it the value model would start from a random head, and a reward
    model would score noise.
    """
    path = Path(local_folder(model.path, key))
    if not path.is_dir():
        raise ValueError(f"{key}={model.path}: a reward model must be a local folder; download it first")
    head = _stored_tensor(path, VALUE_HEAD)
    hidden = hf_config.get_text_config().hidden_size
    if head is None or tuple(head.shape) != (1, hidden):
        found = "there is none" if head is None else f"it has shape {tuple(head.shape)}"
        raise ValueError(
            f"{key}={model.path}: a reward model needs {VALUE_HEAD} of shape (1, {hidden}) in its safetensors files, "
            f"as AutoModelForSequenceClassification with num_labels=1 saves it; {found}"
        )
