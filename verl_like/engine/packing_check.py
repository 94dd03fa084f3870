"""Check at start that packing does not change a model's outputs.

Layers that carry state along the sequence would leak.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl_like.batch import Sequences, pad_rows
from verl_like.models import packing, tensor_plan
from verl_like.models.heads import PolicyModel, TokenModel
from verl_like.models.vision import VisionProcessor
from verl_like.parallel.ulysses import SequenceRanks

CPU = torch.device("cpu")
# maximum difference allowed in log-probs (or values): rounding of other matrix shapes, far below any leak seen
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.3


@torch.no_grad()
def check_packing(
    run: Callable[..., dict[str, Tensor]],
    model: TokenModel,
    hf_config: PretrainedConfig,
    device: torch.device,
    compute_dtype: torch.dtype,
    tensor_group: SequenceRanks | None = None,
    vision: VisionProcessor | None = None,
) -> None:
    """Compare random sequences packed together, two of which share their prompt, with each alone (collective).

    Args:
        run: a pass of the sharded model, without dropout: `model` itself, or what its ranks answer together.
        model: the model that is checked.
        hf_config: its Hugging Face config.
        device: device of the inputs.
        compute_dtype: precision of the passes, which sets the tolerance.
        tensor_group: ranks among which the layers are split. Their slices of the tokens are then cut in other places,
            so that what leaks from token to token outside attention shows too.
        vision: processor of images; None for a text model.

    Raises ValueError on a difference.
    """
    rows = _three_rows(hf_config.get_text_config().vocab_size, model)
    together = _outputs(run, rows, device, tensor_group, vision)
    alone = [_outputs(run, row, device, tensor_group, vision) for row in rows.split([1, 1, 1])]
    lengths = rows.response_length_B.tolist()
    gap = max(float((part - other).abs().max()) for part, other in zip(together.split(lengths), alone, strict=True))
    limit = _TOLERANCE.get(compute_dtype, _HALF_TOLERANCE)
    if not gap <= limit:
        raise ValueError(
            f"model type {hf_config.model_type!r} cannot be run without padding: sequences packed together differ "
            f"from each alone by {gap:.2e} (limit {limit:.0e}), so state leaks from one into the next. "
            "Set actor_rollout_ref.model.use_remove_padding=False (critic.model.* for the critic)"
        )


def _three_rows(vocab_size: int, model: TokenModel) -> Sequences:
    vocab = min(vocab_size, model.vocab_size or vocab_size) if isinstance(model, PolicyModel) else vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in (7, 4)]
    responses = [torch.randint(vocab, (n,), generator=generator).tolist() for n in (9, 14, 5)]
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    return Sequences(
        prompt_ids_BP=pad_rows([*prompts, prompts[0]], side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([7, 4, 7]),
        response_ids_BR=response_ids_BR,
        response_length_B=torch.tensor([9, 14, 5]),
        response_mask_BR=torch.ones_like(response_ids_BR, dtype=torch.bool),
    )


def _outputs(
    run: Callable[..., dict[str, Tensor]],
    rows: Sequences,
    device: torch.device,
    group: SequenceRanks | None,
    vision: VisionProcessor | None,
) -> Tensor:
    wanted_T = packing.response_positions(rows, sampled_only=False)
    inputs = packing.pack(rows, wanted_T, device if group is None else CPU, share_prompts=True, vision=vision)
    if group is not None:
        inputs = tensor_plan.take_slice(inputs, group).to(device)
    outputs = run(inputs, frozenset({"log_probs"}), 1.0)
    answers = inputs.unpack(next(iter(outputs.values()))).float()
    return answers if group is None else group.join(answers)
