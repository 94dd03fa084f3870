"""Mismatch of the trainer's and the rollout engine's probabilities of sampled tokens: metrics under verl's names.

Everything is kept as sums and maxima until the end (`Tally`), so that micro-batches and ranks add up and no cut changes
a number: the driver counts the whole batch at once, the engines count micro-batches, and `finish` turns either into
metrics. Notation: p, q = probability of a sampled token for trainer, rollout engine; lr = log p - log q; rho = p / q.
What is counted in rows counts an episode of several rows once, each row by its share of the episode's sampled tokens.
Definitions: verl's rollout_corr metrics; Liu et al. 2025, "When Speed Kills Stability" (richardli.xyz/rl-collapse).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero, share_of_episode

LOG_LIMIT = 20.0  # log ratios are clamped to +-20 before exp
PREFIX = "mismatch_tally/"  # names of sums on their way from the engines; `finish` replaces them
GAP = "gap/"  # of those, the ones that compare the two engines
NONFINITE = "training/rollout_log_probs_nonfinite"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums and maxima over parts of a batch, scalars in float64: sums add up, of maxima the largest counts.

    A maximum over nothing is -inf; a minimum is kept as the maximum of the negative values.
    """

    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def joined(self, other: Tally) -> Tally:
        """Join two tallies that count different things."""
        return Tally(sums=self.sums | other.sums, maxima=self.maxima | other.maxima)

    def added(self, other: Tally) -> Tally:
        """Add two tallies that count the same things in different rows."""
        if not self.sums and not self.maxima:
            return other
        return Tally(
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            maxima={name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def numbers(self) -> dict[str, float]:
        """Return plain numbers under the names that `finish` expects; maxima over nothing are left out."""
        scalars = [*self.sums.values(), *self.maxima.values()]
        values = torch.stack(scalars).tolist() if scalars else []
        named = zip([*self.sums, *self.maxima], values, strict=True)
        return {PREFIX + name: value for name, value in named if value != -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Log-probs of the same tokens by the two engines; float64, without gradients, 0 outside the mask."""

    policy_BR: Tensor  # log p
    rollout_BR: Tensor  # log q
    log_ratio_BR: Tensor  # lr
    mask_BR: Tensor  # bool: sampled tokens whose log q is known
    unknown_BR: Tensor  # bool: sampled tokens whose log q is NaN or infinite
    share_B: Tensor  # the row's share of its episode's sampled tokens: what it adds to a count of rows

    def counted(self, rows_B: Tensor) -> Tensor:
        """Amount that each of these rows (bool) adds to a count in which an episode's rows are one: float64 [B]."""
        return rows_B * self.share_B


def gap_between(policy_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor, share_B: Tensor | None = None) -> Gap:
    """Compare on the sampled tokens; those without a finite rollout log-prob are set aside.

    share_B: see masked.share_of_episode; None: every row is an episode.
    """
    finite_BR = rollout_BR.isfinite()
    known_BR = mask_BR & finite_BR
    log_p_BR = masked_fill_zero(policy_BR.detach(), known_BR).double()
    log_q_BR = masked_fill_zero(rollout_BR, known_BR).double()
    return Gap(
        policy_BR=log_p_BR,
        rollout_BR=log_q_BR,
        log_ratio_BR=log_p_BR - log_q_BR,
        mask_BR=known_BR,
        unknown_BR=mask_BR & ~finite_BR,
        share_B=share_of_episode(mask_BR, None) if share_B is None else share_B,
    )


def largest(values: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the true entries; -inf where there is none."""
    nothing = values.new_full((), -math.inf)
    return torch.where(mask, values, nothing).max() if values.numel() else nothing


def count_gap(gap: Gap) -> Tally:
    """The sums behind the metrics of `finish`, over these rows."""
    tally = _token_sums(gap).joined(_row_sums(gap))
    return Tally(
        sums={GAP + name: value for name, value in tally.sums.items()},
        maxima={GAP + name: value for name, value in tally.maxima.items()},
    )


def count_rows(name: str, value_B: Tensor, rows_B: Tensor, gap: Gap) -> Tally:
    """The sums behind `_row_spread` of one value per row (those of `rows_B`, a bool)."""
    counted_B, value_B = gap.counted(rows_B), masked_fill_zero(value_B, rows_B)
    return Tally(
        sums={
            f"rows/{name}": (value_B * counted_B).sum(),
            f"rows_squared/{name}": (value_B**2 * counted_B).sum(),
            f"num_rows/{name}": counted_B.sum(),
        },
        maxima={f"rows_max/{name}": largest(value_B, rows_B), f"rows_min/{name}": largest(-value_B, rows_B)},
    )


def without_gap(metrics: Mapping[str, T]) -> dict[str, T]:
    """Drop the mismatch from the metrics of an update after a step's first.

    The policy has moved by then, so its distance from the rollout engine is no longer that of the two engines.
    """
    return {name: value for name, value in metrics.items() if not name.startswith(PREFIX + GAP)}


def _token_sums(gap: Gap) -> Tally:
    """Sum the token statistics of a gap.

    Outside the mask log-probs are 0, and so are differences. Ratios are 1 there, as they about are inside, and are
    taken off again; that would lose digits of probabilities, which may be tiny.
    """
    mask, lr_abs = gap.mask_BR, gap.log_ratio_BR.abs()
    p, q = masked_fill_zero(gap.policy_BR.exp(), mask), masked_fill_zero(gap.rollout_BR.exp(), mask)
    ratio_log = gap.log_ratio_BR.clamp(-LOG_LIMIT, LOG_LIMIT)
    rho, difference, num_tokens = ratio_log.exp(), (p - q).abs(), mask.sum().double()
    outside = mask.numel() - num_tokens
    of_zeros = {"difference": difference, "difference_squared": difference * difference, "lr_abs": lr_abs}
    of_zeros |= {"p": p, "q": q, "pp": p * p, "qq": q * q, "pq": p * q}
    sums = {name: value.sum() for name, value in of_zeros.items()}
    sums |= {"rho": rho.sum() - outside, "rho_squared": (rho * rho).sum() - outside}
    sums |= {"lr": gap.log_ratio_BR.sum(), "k3": (rho - 1 - ratio_log).sum(), "tokens": num_tokens}
    maxima = {"max_difference": largest(difference, mask), "max_lr_abs": largest(lr_abs, mask)}
    return Tally(sums=sums, maxima=maxima)


def _row_sums(gap: Gap) -> Tally:
    count_B = gap.mask_BR.sum(dim=1)
    rows_B, count_B = count_B > 0, count_B.clamp(min=1)
    log_ppl_p, log_ppl_q = -gap.policy_BR.sum(dim=1) / count_B, -gap.rollout_BR.sum(dim=1) / count_B
    difference = log_ppl_p - log_ppl_q
    row_ratio = gap.log_ratio_BR.sum(dim=1).clamp(-LOG_LIMIT, LOG_LIMIT)
    per_row = {
        "log_ppl_p": log_ppl_p,
        "log_ppl_q": log_ppl_q,
        "ppl_p": _exp(log_ppl_p),
        "ppl_q": _exp(log_ppl_q),
        "log_ppl_difference": difference,
        "log_ppl_difference_abs": difference.abs(),
        "ppl_ratio": _exp(difference),
        "row_rho_squared": (2 * row_ratio).exp(),
    }
    counted_B = gap.counted(rows_B)
    sums = {name: (masked_fill_zero(value, rows_B) * counted_B).sum() for name, value in per_row.items()}
    return Tally(
        sums=sums | {"rows": counted_B.sum()},
        maxima={"max_log_ppl": largest(difference, rows_B), "min_log_ppl": largest(-difference, rows_B)},
    )


def _exp(log_value: Tensor) -> Tensor:
    return log_value.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an update (or `Tally.numbers`) with the tally's sums replaced by what they mean.

    Sums may be averages over several optimizer steps: only their proportions count. Sums over nothing are dropped.
    """
    found = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    tally = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    gap = {name.removeprefix(GAP): value for name, value in tally.items() if name.startswith(GAP)}
    if gap.get("tokens", 0) > 0:
        found |= _gap_metrics(gap)
    if tally.get("weight_tokens", 0) > 0:
        found |= _weight_metrics(tally)
    if tally.get("all_tokens", 0) > 0:
        found |= _rejection_metrics(tally)
    return found


def _gap_metrics(tally: Mapping[str, float]) -> dict[str, float]:
    n, rows = tally["tokens"], tally["rows"]
    return {
        **_correlation(tally, n),
        "training/rollout_probs_diff_mean": tally["difference"] / n,
        "training/rollout_probs_diff_max": tally["max_difference"],
        "training/rollout_probs_diff_std": _std(tally["difference"], tally["difference_squared"], n),
        "rollout_corr/log_prob_gap_mean": tally["lr_abs"] / n,
        "rollout_corr/log_prob_gap_max": tally["max_lr_abs"],
        "rollout_corr/kl": -tally["lr"] / n,
        "rollout_corr/k3_kl": tally["k3"] / n,
        "rollout_corr/training_ppl": tally["ppl_p"] / rows,
        "rollout_corr/rollout_ppl": tally["ppl_q"] / rows,
        "rollout_corr/training_log_ppl": tally["log_ppl_p"] / rows,
        "rollout_corr/rollout_log_ppl": tally["log_ppl_q"] / rows,
        "rollout_corr/ppl_ratio": tally["ppl_ratio"] / rows,
        "rollout_corr/log_ppl_diff": tally["log_ppl_difference"] / rows,
        "rollout_corr/log_ppl_abs_diff": tally["log_ppl_difference_abs"] / rows,
        "rollout_corr/log_ppl_diff_max": tally["max_log_ppl"],
        "rollout_corr/log_ppl_diff_min": -tally["min_log_ppl"],
        "rollout_corr/chi2_token": tally["rho_squared"] / n - 1,
        "rollout_corr/chi2_seq": tally["row_rho_squared"] / rows - 1,
        "rollout_corr/eff_sample_size": tally["rho"] ** 2 / (n * tally["rho_squared"]),
    }


def _std(total: float, squares: float, n: float) -> float:
    """Standard deviation of the n values (not of a sample: only proportions of sums are known here)."""
    return math.sqrt(max(squares / n - (total / n) ** 2, 0.0))


def _correlation(tally: Mapping[str, float], n: float) -> dict[str, float]:
    """Pearson's r of p and q; nothing where one of them does not vary (one token, say)."""
    covariance = tally["pq"] - tally["p"] * tally["q"] / n
    variance_p, variance_q = (tally[s * 2] - tally[s] ** 2 / n for s in ("p", "q"))
    if min(variance_p, variance_q) <= 1e-12 * n:
        return {}
    return {"training/rollout_actor_probs_pearson_corr": covariance / math.sqrt(variance_p * variance_q)}


def _weight_metrics(tally: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the importance weights that were applied; `count_weights` says which ones it judges by raw weights."""
    n, applied, squares = tally["weight_tokens"], tally["weight"], tally["weight_squared"]
    units, rows = tally["weight_units"], tally["num_rows/weight"]
    values = {
        "mean": applied / n,
        "max": tally["max_weight"],
        "min": -tally["min_weight"],
        "std": _std(applied, squares, n),
        "eff_sample_size": applied**2 / (n * squares) if squares > 0 else 0.0,
        "ratio_fraction_high": tally["weight_high"] / units,
        "ratio_fraction_low": tally["weight_low"] / units,
        "oob_ratio": tally["weight_zeroed"] / n,
        **_row_spread(tally, "weight", ideal=1.0),
        "seq_fraction_high": tally["weight_rows_high"] / rows,
        "seq_fraction_low": tally["weight_rows_low"] / rows,
    }
    return {f"rollout_corr/rollout_is_{name}": value for name, value in values.items()}


def _row_spread(tally: Mapping[str, float], name: str, ideal: float) -> dict[str, float]:
    """Mean, sample deviation (of several updates: as of one of their mean size), extremes, distance from the ideal."""
    total, n = tally[f"rows/{name}"], tally[f"num_rows/{name}"]
    largest_row, smallest_row = tally[f"rows_max/{name}"], -tally[f"rows_min/{name}"]
    biased = _std(total, tally[f"rows_squared/{name}"], n)
    return {
        "seq_mean": total / n,
        "seq_std": biased * math.sqrt(n / (n - 1)) if n > 1 else 0.0,
        "seq_max": largest_row,
        "seq_min": smallest_row,
        "seq_max_deviation": max(abs(largest_row - ideal), abs(smallest_row - ideal)),
    }


def _rejection_metrics(tally: Mapping[str, float]) -> dict[str, float]:
    """Shares of sampled tokens and of rows that rejections take, in all and per option."""
    n, rows = tally["all_tokens"], tally["all_rows"]
    found = {
        "rollout_corr/rollout_rs_masked_fraction": tally["rejected_tokens"] / n,
        "rollout_corr/rollout_rs_seq_masked_fraction": tally["touched_rows"] / rows,
        "rollout_corr/rollout_rs_seq_dropped_fraction": tally["dropped_rows"] / rows,
    }
    if "vetoed_rows" in tally:
        found["rollout_corr/rollout_is_veto_fraction"] = tally["vetoed_rows"] / rows
        found["rollout_corr/rollout_is_catastrophic_token_fraction"] = tally["veto_tokens"] / n
    for name in (name for name in tally if name.startswith("option/") and name.endswith("/sum")):
        option = name.removeprefix("option/").removesuffix("/sum")
        values = _option_metrics(tally, f"option/{option}")
        found |= {f"rollout_corr/rollout_rs_{option}_{key}": value for key, value in values.items()}
    return found


def _option_metrics(tally: Mapping[str, float], option: str) -> dict[str, float]:
    """Metrics of one rejection: statistic over tokens and rows, and the shares that are rejected.

    The standard deviation is that of values cut to the bounds.
    """
    n, units, rows = tally[f"{option}/tokens"], tally[f"{option}/units"], tally[f"num_rows/{option}"]
    if n == 0:
        return {}
    return {
        "mean": tally[f"{option}/sum"] / n,
        "max": tally[f"max_{option}"],
        "min": -tally[f"min_{option}"],
        "std": _std(tally[f"{option}/bounded"], tally[f"{option}/bounded_squared"], n),
        "fraction_high": tally[f"{option}/high"] / units,
        "fraction_low": tally[f"{option}/low"] / units,
        **_row_spread(tally, option, ideal=0.0),
        "seq_fraction_high": tally[f"{option}/rows_high"] / rows,
        "seq_fraction_low": tally[f"{option}/rows_low"] / rows,
        "masked_fraction": tally[f"{option}/masked"] / tally["all_tokens"],
        "seq_masked_fraction": tally[f"{option}/masked_rows"] / tally["all_rows"],
    }
