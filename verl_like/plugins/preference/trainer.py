"""Trainer on preferences: two passes a step, and the reference's log-probs once."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl_like.batch import Experience
from verl_like.plugins.preference.dataset import Items
from verl_like.plugins.preference.losses import Measured, carried, loss_of, referenced
from verl_like.plugins.preference.pairs import Pairs
from verl_like.plugins.sft.dataset import batches_of
from verl_like.plugins.sft.trainer import SFTTrainer
from verl_like.trainer.start_messages import start_phase

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PreferenceTrainer(SFTTrainer):
    """Trainer on pairs, or on answers that are good or not."""

    def start(self) -> None:
        """Have the reference's log-probs, which are those of the weights that the run began with; then as any run."""
        if referenced(self.config.preference):
            for dataset in (self.source.dataset, self.val):
                if dataset is not None:
                    dataset.references_IS = self.references(dataset)
        super().start()

    def references(self, dataset: Items) -> Tensor:
        """Log-probs of all answers [I, S] by the weights as they were loaded, without adapters; from the cache, or new.

        The file's name is a hash of the answers' tokens, of every weight and of the precision.
        """
        config, policy = self.config, self.config.actor_rollout_ref
        method = "base_log_probs" if policy.model.lora_rank > 0 else "log_probs"
        told = [dataset.digest, self.actor.checksums(), policy.actor.fsdp_config.dtype, method, policy.model.path]
        name = hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        folder = config.preference.reference_cache or f"{config.trainer.default_local_dir}/reference"
        file = Path(folder).expanduser() / f"{name}.safetensors"
        if file.exists():
            try:
                return load_file(file)["log_probs"]
            except (SafetensorError, OSError, KeyError) as error:
                logger.warning("%s is damaged, and made again: %s", file, error)
        with start_phase(f"log-probs of the reference, {len(dataset)} rows"):
            batches = batches_of(dataset, config.data.train_batch_size)
            parts = [Measured.of(rows, self.values(rows, method)).policy_IS for rows, _ in batches]
        found = torch.cat(parts).contiguous()
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"log_probs": found}, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        return found

    def values(self, rows: Pairs, method: str = "log_probs") -> Tensor:
        """Measure the rows' tokens [T] with the model: log-probs, or a reward model's numbers."""
        found = self.actor.evaluate(method, rows)
        values_T = found.values_T if found.old_log_probs_T is None else found.old_log_probs_T
        assert values_T is not None
        return values_T

    def with_targets(self, rows: Experience) -> tuple[Experience, dict[str, float]]:
        """Measure all answers with this step's weights, and put the slopes of the loss on their tokens."""
        assert isinstance(rows, Pairs)
        with self.clock("old_log_prob"):
            values_T = self.values(rows)
        learnt, metrics = carried(self.config.preference, rows, values_T)
        return learnt, _named("train", metrics)

    def validate(self) -> dict[str, float]:
        """Compute the loss and its metrics over all pairs (val/...), and for each set (val-core/<set>/.../mean@1)."""
        if self.val is None:
            return {}
        parts, names = list[Measured](), list[str]()
        with self.clock("testing"):
            for rows, more in batches_of(self.val, self.config.data.val_batch_size):
                parts.append(Measured.of(rows, self.values(rows)))
                names += more.values()
            whole = Measured.joined(parts)
            found = _named("val", loss_of(self.config.preference, whole)[1])
            for name in sorted(set(names)):
                own = whole.of_items(torch.tensor([each == name for each in names]))
                metrics = loss_of(self.config.preference, own)[1]
                found |= {f"val-core/{name}/{key}/mean@1": metrics[key] for key in ("loss", "accuracy")}
        return found


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
