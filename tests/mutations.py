"""Planted faults, one at a time, each with the tests that must notice it: shows that the suite can fail.

    python tests/mutations.py            # all of them, in a copy of the repository: about five minutes
    python tests/mutations.py grpo       # those whose name holds "grpo"

A fault replaces a piece of text that stands in its file exactly once (tests/architecture proves that). The tests named
beside it run on the faulty copy and must fail; a fault that they let pass is printed, and the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """`old` in verl_like/<file> becomes `new`; tests/unit/<tests> must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


OPERATIONS = [
    Mutation(
        "a stopped rank is no cause",
        "cluster/watchdog.py",
        'stopped = [rank for rank in ranks if rank.state == "T" and rank.late]',
        "stopped = []",
        "cluster/test_watchdog.py",
    ),
    Mutation(
        "a limit that does not know the pace",
        "heartbeat.py",
        "self._stall_s + MARGIN * pace * max(amount, 1.0)",
        "self._stall_s",
        "test_heartbeat.py",
    ),
    Mutation(
        "late while others work",
        "cluster/watchdog.py",
        "if rank.late and rank.pool not in working]",
        "if rank.late]",
        "cluster/test_watchdog.py",
    ),
]
DRAFTS = [
    Mutation(
        "a guess counts though another token was drawn",
        "rollout/hf_batch.py",
        "row.take(token, log_prob, version)\n                if token != guess",
        "row.take(token if guess is None else guess, log_prob, version)\n                if False",
        "drafts/test_engine.py",
    ),
    Mutation(
        "all guesses are drawn with one random number",
        "rollout/rows.py",
        "row.uniform[len(row.token_ids) + i]",
        "row.uniform[len(row.token_ids)]",
        "drafts/test_engine.py",
    ),
    Mutation(
        "what wrong guesses left in the cache is seen",
        "rollout/hf_batch.py",
        "(torch.arange(most, device=taken_b.device) < taken_b[:, None])",
        "(torch.arange(most, device=taken_b.device) < most + 0 * taken_b[:, None])",
        "drafts/test_engine.py",
    ),
    Mutation(
        "tokens that are guessed together see each other out of order",
        "rollout/hf_cache.py",
        "attention_mask = attention_mask.repeat(1, 1, shared, 1)",
        "attention_mask = attention_mask.repeat_interleave(shared, 2)",
        "drafts/test_engine.py",
    ),
    Mutation(
        "guesses are made whatever they cost",
        "plugins/drafts/lookup.py",
        "if work < best:",
        "if columns:",
        "drafts/test_lookup.py",
    ),
]
SERVED_AND_QUANTISED = [
    Mutation(
        "samples come from the adapters of before the step",
        "plugins/tinker_server/adapters.py",
        "self._active, self._joined = (), {}",
        "self._active = ()",
        "tinker_server/test_adapters.py",
    ),
    Mutation(
        "rows of three tenants come back in the order of their owners",
        "plugins/tinker_server/adapters.py",
        "torch.empty_like(order_R).index_copy(0, order_R, slot_R)",
        "torch.empty_like(order_R).index_copy(0, number_R, slot_R)",
        "tinker_server/test_adapters.py",
    ),
    Mutation(
        "a client's weight decay is not taken",
        "plugins/tinker_server/adapters.py",
        '"weight_decay": params["weight_decay"]',
        '"weight_decay": 0.0',
        "tinker_server/test_adapters.py",
    ),
    Mutation(
        "a reward model's server may be gone",
        "rewards/grading.py",
        "            if self._check is not None and not self._quiet:\n                self._check()\n",
        "",
        "rewards/test_served.py",
    ),
    Mutation(
        "a scale for all may be wrong",
        "weight_sync/ledger.py",
        " and abs(size - 1) <= _MOST * about + _SIZE",
        "",
        "weight_sync/test_quantised.py",
    ),
    Mutation(
        "out of memory in the last backward pass stays unknown",
        "engine/rescue.py",
        "not self._alone and all_reduce_max(int(failed)):",
        "not self._alone and all_reduce_max(0):",
        "engine/test_rescue.py",
    ),
    Mutation(
        "gradients stay scaled",
        "engine/fsdp.py",
        "            self._loss_scale.undo(self.sharding.parameters())\n",
        "",
        "engine/test_loss_scale.py",
    ),
    Mutation(
        "the loss is not scaled",
        "engine/optim.py",
        "return loss * 2.0**self.exponent if self._scales else loss",
        "return loss",
        "engine/test_loss_scale.py",
    ),
]
KERNELS = [
    Mutation(
        "an argument of a kernel is renamed",
        "models/fused_triton.py",
        "def _forward_kernel(z_ptr, target_ptr, out_ptr, out_stride, z_stride, vocab,",
        "def _forward_kernel(z_ptr, target_ptr, out_ptr, out_stride, z_stride, width,",
        "models/test_fused_triton.py",
    ),
    Mutation(
        "a logit of -inf makes NaN",
        "models/fused_triton.py",
        'tl.where(z == -float("inf"), 0.0, z) * e',
        "z * e",
        "models/test_fused_triton.py",
    ),
]
ALGORITHMS = [
    Mutation(
        "gae without lambda",
        "algorithms/advantages.py",
        "delta + algorithm.gamma * algorithm.lam * next_advantage",
        "delta + algorithm.gamma * next_advantage",
        "algorithms/test_advantages.py",
    ),
    Mutation(
        "grpo by the batch's mean",
        "algorithms/stepwise.py",
        "centred_B = values_B.double() - groups.of_rows(groups.mean_G)",
        "centred_B = values_B.double() - values_B.double().mean()",
        "algorithms/test_advantages.py",
    ),
    Mutation(
        "rloo with the row itself",
        "algorithms/advantages.py",
        "difference_B * size_B / (size_B - 1).clamp(min=1)",
        "difference_B",
        "algorithms/test_estimators.py algorithms/test_baselines.py",
    ),
    Mutation(
        "token-mean of a micro-batch",
        "algorithms/aggregate.py",
        "masked_sum(loss_BR, mask_BR) / max(denominators.num_tokens, 1)",
        "masked_sum(loss_BR, mask_BR) / max(int(mask_BR.sum()), 1)",
        "algorithms/test_invariance.py",
    ),
    Mutation(
        "sum-norm by the batch's width",
        "algorithms/aggregate.py",
        "seq_mean_token_sum(loss_BR, mask_BR, denominators, scale, None) / scale",
        "seq_mean_token_sum(loss_BR, mask_BR, denominators, scale, None) / loss_BR.shape[1]",
        "algorithms/test_invariance.py algorithms/test_aggregate.py",
    ),
    Mutation(
        "k3 with a wrong sign",
        "algorithms/kl.py",
        "(torch.expm1(reverse) - reverse)",
        "(torch.expm1(reverse) + reverse)",
        "algorithms/test_kl.py",
    ),
    Mutation(
        "KL controller without its clip",
        "algorithms/kl.py",
        "min(max(current_kl / self.config.target_kl - 1, -0.2), 0.2)",
        "current_kl / self.config.target_kl - 1",
        "algorithms/test_kl.py",
    ),
    Mutation(
        "whitening with the biased variance",
        "algorithms/masked.py",
        "(mask.sum() - 1).clamp(min=1)",
        "mask.sum().clamp(min=1)",
        "algorithms/test_masked.py",
    ),
    Mutation(
        "clip bounds exchanged",
        "algorithms/losses/ratio.py",
        "ratio_BR.clamp(1 - low, 1 + high)",
        "ratio_BR.clamp(1 - high, 1 + low)",
        "algorithms/test_policy_losses.py",
    ),
    Mutation(
        "dual clip for good tokens too",
        "algorithms/losses/ratio.py",
        "negative_BR = advantages_BR < 0",
        "negative_BR = advantages_BR < torch.inf",
        "algorithms/test_policy_losses.py",
    ),
    Mutation(
        "groups of equal rewards pass the filter",
        "algorithms/reward_shaping.py",
        "groups.std_G > threshold",
        "groups.std_G >= threshold",
        "algorithms/test_group_filter.py",
    ),
]
MODELS = [
    Mutation(
        "entropy's gradient without its mean",
        "models/fused_chunks.py",
        "constant = constant - upstream[ENTROPY] * values[ENTROPY]",
        "constant = constant - upstream[ENTROPY]",
        "models/test_fused_linear.py",
    ),
    Mutation(
        "temperature left out of the log-probs",
        "models/fused_chunks.py",
        "return logits_cV if self.temperature == 1.0 else logits_cV.div_(self.temperature)",
        "return logits_cV",
        "models/test_fused_linear.py",
    ),
    Mutation(
        "positions that do not restart",
        "models/packing.py",
        "position_ids, images = position[kept][None], None",
        "position_ids, images = torch.arange(int(kept.sum()))[None], None",
        "models/test_packed_forward.py models/test_packing.py",
    ),
    Mutation(
        "prompts that differ in their images alone are shared",
        "models/prefix_tree.py",
        "row[handle.starts[0]] = -1 - images.setdefault(handle.image, len(images))",
        "pass",
        "models/test_vision.py",
    ),
    Mutation(
        "text after an image goes on from its last token",
        "models/vision.py",
        "now += text + int(axes.max()) + 1",
        "now += text + axes.shape[1]",
        "models/test_vision.py",
    ),
    Mutation(
        "the answer of the next token",
        "models/packing.py",
        "+ prompt_S[row_N] - 1 + column_N]",
        "+ (prompt_S[row_N] + column_N).clamp(max=length_S[row_N] - 1)]",
        "models/test_packed_forward.py models/test_packing.py",
    ),
    Mutation(
        "a shared prompt gets one row's gradient",
        "models/token_layout.py",
        "if layout.copied_C is not None:\n            total",
        "if False:\n            total",
        "models/test_packed_forward.py models/test_attention.py",
    ),
    Mutation(
        "trees: a row goes on from its holder, not from the ancestor that holds the token",
        "models/prefix_tree.py",
        "while count and count <= shared[holder]:",
        "while False:",
        "models/test_prefix_tree.py",
    ),
    Mutation(
        "trees: an ancestor is missing on the path",
        "models/prefix_tree.py",
        "found.append(torch.cat([found[holder][:shared], own]) if shared else own)",
        "found.append(torch.cat([found[s][:shared] for s in [holder_S[holder]]] + [own]) if shared else own)",
        "models/test_prefix_tree.py models/test_attention_groups.py",
    ),
    Mutation(
        "trees: positions restart where a row goes on",
        "models/packing.py",
        "position_ids, images = position[kept][None], None",
        "position_ids, images = (position - left_out_S[row])[kept][None], None",
        "models/test_prefix_tree.py",
    ),
    Mutation(
        "trees: a block of queries sees as if it began its row",
        "models/attention_groups.py",
        "for start, end in itertools.pairwise(before + (length - before) * i // count for i in range(count + 1)):",
        "for start, end in itertools.pairwise((length - before) * i // count for i in range(count + 1)):",
        "models/test_attention_groups.py",
    ),
    Mutation(
        "trees: rows share where other experts were chosen",
        "models/prefix_tree.py",
        "if rows.routes_T is not None:",
        "if False:",
        "models/test_prefix_tree.py",
    ),
    Mutation(
        "sliding window ignored",
        "models/attention_groups.py",
        "banded = window if window is not None and window < k.shape[1] else None",
        "banded = None",
        "models/test_attention_groups.py",
    ),
    Mutation(
        "budget of a micro-batch exceeded",
        "parallel/balance.py",
        "fits = all(sum(num_tokens[fitting[j]] for j in rows) <= budget for rows in even)",
        "fits = True",
        "parallel/test_balance.py",
    ),
]
ENGINE_AND_ROLLOUT = [
    Mutation(
        "a step with a gradient that is not finite",
        "engine/fsdp.py",
        "finite = math.isfinite(size)",
        "finite = True",
        "engine/test_fsdp_engine.py",
    ),
    Mutation(
        "rows set apart are trained, the others not",
        "engine/microbatch.py",
        "return batch.select(~chosen_B), batch.select(chosen_B)",
        "return batch.select(chosen_B), batch.select(~chosen_B)",
        "engine/test_fsdp_engine.py",
    ),
    Mutation(
        "warm-up one step early",
        "engine/optim.py",
        "self.steps_done / max(1, self.warmup)",
        "(self.steps_done + 1) / max(1, self.warmup)",
        "engine/test_optim.py",
    ),
    Mutation(
        "Adam without bias correction",
        "engine/optim.py",
        'value=-group["lr"] / (1 - beta1**step)',
        'value=-group["lr"]',
        "engine/test_lean_optim.py",
    ),
    Mutation(
        "Muon hands a matrix's rows back to the wrong ranks",
        "engine/muon.py",
        "back = _exchanged(whole, received, sent, group)",
        "back = _exchanged(whole.roll(1), received, sent, group)",
        "engine/test_muon.py",
    ),
    Mutation(
        "top-p drops the token that crosses p",
        "rollout/sampling.py",
        "dropped_BV = cumulative_BV <= 1 - top_p_B[:, None]",
        "dropped_BV = cumulative_BV < 1 - top_p_B[:, None] + 0.2",
        "rollout/test_sampling.py",
    ),
    Mutation(
        "all samples of a prompt alike",
        "rollout/rollout_engine.py",
        '"/".join(map(str, (seed, *draw)))',
        '"/".join(map(str, (seed, *draw[:2])))',
        "rollout/test_requests.py",
    ),
    Mutation(
        "a response's last token left out of the mask where rollouts are put together",
        "episodes/rows.py",
        "mask_T = torch.ones(int(response_length_B.sum()), dtype=torch.bool)",
        "mask_T = torch.ones(int(response_length_B.sum()), dtype=torch.bool)\n"
        "        mask_T[response_length_B.cumsum(0) - 1] = False",
        "episodes/test_rows.py",
    ),
    Mutation(
        "what a tool said counted as sampled",
        "episodes/rows.py",
        "lambda turn: np.ones(len(turn.sampled)), _nothing, torch.bool",
        "lambda turn: np.ones(len(turn.sampled)), _observed, torch.bool",
        "episodes/test_rows.py",
    ),
    Mutation(
        "layers with a window forget what exact parity has to keep",
        "rollout/hf_cache.py",
        "(DynamicLayer, DynamicSlidingWindowLayer) if whole else (DynamicLayer,)",
        "(DynamicLayer,)",
        "rollout/test_hf_cache.py",
    ),
]
DATA_AND_REWARDS = [
    Mutation(
        "tokens: an end that generation_config.json alone names",
        "models/loading.py",
        'load_generation_config(path, key).get("eos_token_id")',
        "None",
        "models/test_end_tokens.py",
    ),
    Mutation(
        "tokens: a begun answer is closed",
        "data/chat.py",
        "add_generation_prompt=False, continue_final_message=True",
        "add_generation_prompt=True",
        "data/test_begun_answers.py",
    ),
    Mutation(
        "tokens: a full response is cut off",
        "observe/metrics.py",
        "rollouts.response_length_B, rollouts.cut_off_B",
        "rollouts.response_length_B, rollouts.response_length_B >= rollouts.response_length_B.max()",
        "observe/test_step_metrics.py",
    ),
    Mutation(
        "every epoch in the same order",
        "data/sampler.py",
        "np.random.default_rng([self._seed, self.epoch])",
        "np.random.default_rng([self._seed])",
        "data/test_loader.py",
    ),
    Mutation(
        "a resumed sampler starts the epoch again",
        "data/sampler.py",
        'self.epoch, self.position = state["epoch"], state["position"]',
        'self.epoch, self.position = state["epoch"], 0',
        "data/test_loader.py",
    ),
    Mutation(
        "a curriculum does not learn of groups that dynamic sampling drops",
        "episodes/source.py",
        "if useless.scores is not None:",
        "if useless.scores is None:",
        "episodes/test_curriculum_source.py",
    ),
    Mutation(
        "a curriculum forgets which prompts were scored",
        "plugins/samplers/difficulty.py",
        "self._evidence[places], self._last[places] = known[:, 2:], known[:, 1].astype(int)",
        "self._last[places] = known[:, 1].astype(int)",
        "data/test_difficulty.py",
    ),
    Mutation(
        "partial credit for the right answer",
        "plugins/math_grading/boxed.py",
        "earned = acc_score if right else",
        "earned = acc_score / 2 if right else",
        "rewards/test_answer_graders.py",
    ),
    Mutation(
        "any worker takes a session's next call",
        "services/waiting.py",
        "return self._queue if session is None or session.place is None else session.place.calls",
        "return self._queue",
        "services/test_waiting.py",
    ),
    Mutation(
        "metrics of ranks: the first instead of the largest",
        "batch.py",
        '"max": max,',
        '"max": lambda found: found[0],',
        "test_batch.py",
    ),
    Mutation(
        "an incomplete batch counts as a step",
        "config/batch_plan.py",
        "per_epoch = num_train_prompts // batch",
        "per_epoch = -(-num_train_prompts // batch)",
        "config/test_batch_plan.py",
    ),
]
EPISODES = [
    Mutation(
        "episodes: tool text costs no budget",
        "plugins/agents/tool_agent.py",
        "progress.used += 0 if new_row else len(observation_ids)",
        "progress.used += 0",
        "episodes/test_tool_agent.py",
    ),
    Mutation(
        "episodes: tool text is trained on",
        "episodes/rows.py",
        "return np.zeros(len(turn.observation_ids), dtype=np.float32)",
        "return np.ones(len(turn.observation_ids), dtype=np.float32)",
        "episodes/test_rows.py",
    ),
    Mutation(
        "episodes: the last reward of a turn alone",
        "episodes/rows.py",
        "rewards[last] += turn.reward",
        "rewards[last] = turn.reward",
        "episodes/test_rows.py",
    ),
    Mutation(
        "episodes: rows of other prefixes share a prompt",
        "models/prefix_tree.py",
        "return int(differs.argmax()) if differs.any() else both",
        "return both",
        "engine/test_episode_rows.py models/test_packing.py",
    ),
    Mutation(
        "episodes: a new row is a part of the old one",
        "episodes/episode.py",
        "starts = [0, *(place for place, turn in enumerate(self.turns) if turn.new_row and place)]",
        "starts = [0]",
        "episodes/test_rows.py",
    ),
    Mutation(
        "episodes: tokens that were not sampled are trained on",
        "plugins/verl_agents/turns.py",
        "if start <= begin < len(ids_T) and np.array_equal(ids_T[:begin], context_ids):",
        "if start <= begin < len(ids_T):",
        "episodes/agent_loops/test_turns.py",
    ),
]
WEIGHTS = [
    Mutation(
        "weights: a bucket is filled again before it was taken",
        "weight_sync/wired.py",
        "self._await_taken(self._num_buckets + 1 - _NUM_SLOTS, deadline)",
        "pass",
        "weight_sync/test_channels.py",
    ),
    Mutation(
        "weights: tensors are views of shared buckets",
        "weight_sync/ipc.py",
        "return tensor.clone()",
        "return tensor",
        "weight_sync/test_channels.py",
    ),
    Mutation(
        "weights: a sender's failure looks like the end",
        "weight_sync/wired.py",
        'peer.say(Deadline(_GRACE_S / 8), "", "failed", reason)',
        'peer.say(Deadline(_GRACE_S / 8), "", "end")',
        "weight_sync/test_channels.py",
    ),
    Mutation(
        "weights: nobody looks whether receivers hold the same",
        "weight_sync/verdict.py",
        "if not problems and len(",
        "if problems and len(",
        "weight_sync/test_verdict.py",
    ),
    Mutation(
        "weights: a step after a checkpoint must differ from before it",
        "engine/train_engine.py",
        "return self.loads == earlier.loads and self.sure > earlier.sure",
        "return self.sure > earlier.sure",
        "engine/test_weight_changes.py",
    ),
]
MESH = [
    Mutation(
        "gradients of keys stay with the rank that saw them",
        "parallel/context.py",
        "        reduce_scatter(mine, whole, group=keys.ranks.group)",
        "        mine.copy_(whole.view(-1, *mine.shape)[keys.ranks.rank])",
        "engine/test_context_parallel.py",
    ),
    Mutation(
        "keys are read as if ranks had gathered them in another order",
        "parallel/context.py",
        "torch.argsort(chunk_places(total, ranks.size).flatten())[seen_U])",
        "torch.argsort(chunk_places(total, ranks.size).flip(0).flatten())[seen_U])",
        "engine/test_context_parallel.py",
    ),
    Mutation(
        "a chunk's queries see no key before the chunk",
        "models/packing.py",
        "torch.arange(end_slot - length, end_slot - (end - stop))",
        "torch.arange(end_slot - (end - start), end_slot - (end - stop))",
        "engine/test_context_parallel.py",
    ),
    Mutation(
        "queries of a group with fewer keys are laid out from its first column on",
        "models/attention_groups.py",
        "(first_S - count_S.cumsum(0) + count_S).repeat_interleave(count_S)",
        "(count_S - count_S.cumsum(0)).repeat_interleave(count_S)",
        "engine/test_context_parallel.py",
    ),
    Mutation(
        "the norm of spread experts is not summed over their owners",
        "parallel/fsdp.py",
        "                dist.all_reduce(squares[index], group=axis.group.group)",
        "                pass",
        "engine/test_expert_parallel.py",
    ),
    Mutation(
        "experts are handed out in another order of ranks",
        "parallel/materialize.py",
        "if number == axis.group.rank else mine",
        "if number == axis.group.size - 1 - axis.group.rank else mine",
        "engine/test_expert_parallel.py",
    ),
    Mutation(
        "gradients of experts stay with the ranks that sent the tokens",
        "parallel/experts.py",
        "return _exchanged(grad, received, sent, group), None, None, None",
        "return grad.new_zeros(sum(sent), *grad.shape[1:]), None, None, None",
        "engine/test_expert_parallel.py",
    ),
    Mutation(
        "weights of the router are left out where tokens come back",
        "parallel/experts.py",
        "weighted_SH = back_SH[place_S] * weights_Nk.reshape(-1, 1)",
        "weighted_SH = back_SH[place_S] * weights_Nk.detach().reshape(-1, 1)",
        "engine/test_expert_parallel.py",
    ),
    Mutation(
        "an expert is lost in the export",
        "engine/export.py",
        "self._stored.views(name.removeprefix(HF_PREFIX), tensor, first)",
        "self._stored.views(name.removeprefix(HF_PREFIX), tensor, 0)",
        "engine/test_expert_parallel.py",
    ),
    Mutation(
        "the last stage's loss counts twice",
        "engine/fsdp.py",
        "outputs[piece, i] = [self._loss_scale.of(loss)]",
        "outputs[piece, i] = [self._loss_scale.of(loss) * 2]",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a stage that trains nothing says that every step changes weights",
        "parallel/fsdp.py",
        "own if self._stage is None else self._stage.anywhere(own)",
        "own",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "the gradient norm is a stage's own",
        "parallel/fsdp.py",
        "        dist.all_reduce(square, group=stage.pipe.group)",
        "        pass",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a tied weight learns from the embedding at the first stage, and from the head at the last",
        "parallel/fsdp.py",
        "            sum_in_place(shared, self._stage.pipe.ends, self._device)",
        "            pass",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a gradient goes back into the newest micro-batch",
        "parallel/pipeline.py",
        "self._received[self.piece].popleft()",
        "self._received[self.piece].pop()",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a late gradient of a weight takes the place of the one before",
        "parallel/late_gradients.py",
        "self._sums[number] += found",
        "self._sums[number] = found.to(self._dtype)",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a late gradient is the newest backward pass's",
        "parallel/late_gradients.py",
        "self._kept.popleft()",
        "self._kept[-1]",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "the pieces of a stage are neighbours, and layers come in a wrong order",
        "parallel/pipeline.py",
        "frozenset(place % pipe.size for",
        "frozenset(place // pipe.pieces for",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "a stage runs the layers of all its pieces at once",
        "parallel/pipeline.py",
        "if pieces and self.pipe.piece not in pieces:",
        "if not pieces and self.pipe.piece not in pieces:",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "gradients are added up before all pieces of a stage have theirs",
        "engine/fsdp.py",
        "last = (piece, i) == (0, len(parts) - 1)",
        "last = (piece, i) == (pipe.pieces - 1, len(parts) - 1)",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "rows without a gradient have no loss in stages",
        "engine/fsdp.py",
        "if part is not None and not self.model.hands_on:\n                        metrics.append(self._counted_once",
        "if part is not None and self._pipe is None:\n                        metrics.append(self._counted_once",
        "engine/test_pipeline_parallel.py",
    ),
    Mutation(
        "late gradients stay with the rank that has them",
        "parallel/late_gradients.py",
        "parts = [Partial()] * weight.device_mesh.ndim",
        "parts = [torch.distributed.tensor.Replicate()] * weight.device_mesh.ndim",
        "engine/test_meshes.py",
    ),
    Mutation(
        "experts that another stage sends are all the first ones",
        "parallel/fsdp.py",
        "part, holder, **like)\n                first += rows",
        "part, holder, **like)\n                first += 0",
        "engine/test_meshes.py",
    ),
    Mutation(
        "every rank that shares a row with others tells its loss, in stages",
        "engine/fsdp.py",
        "metrics.append(self._counted_once(found))",
        "metrics.append(found)",
        "engine/test_meshes.py",
    ),
    Mutation(
        "a tied weight counts twice in the gradient norm",
        "parallel/fsdp.py",
        "if stage is None or stage.counts(n)]",
        "]",
        "engine/test_pipeline_parallel.py",
    ),
]
FAMILIES = (
    MESH,
    KERNELS,
    ALGORITHMS,
    MODELS,
    ENGINE_AND_ROLLOUT,
    DATA_AND_REWARDS,
    EPISODES,
    WEIGHTS,
    OPERATIONS,
    DRAFTS,
    SERVED_AND_QUANTISED,
)
MUTATIONS = [mutation for family in FAMILIES for mutation in family]


def survives(mutation: Mutation, copy: Path) -> bool:
    """Whether its tests pass on a repository with the fault in it."""
    path = copy / "verl_like" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    tests = [f"tests/unit/{name}" for name in mutation.tests.split()]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
        result = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest could not run\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 0


def main() -> None:
    """Try the faults whose name holds the first argument (all without one)."""
    chosen = [mutation for mutation in MUTATIONS if len(sys.argv) < 2 or sys.argv[1] in mutation.name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "main"
        leave_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", ".pytest_cache")
        shutil.copytree(ROOT, copy, ignore=leave_out)
        os.environ.setdefault("VERL_LIKE_SHARED_DATA", str(ROOT.parent / "shared" / "data"))
        survivors = []
        for mutation in chosen:
            survived = survives(mutation, copy)
            survivors += [mutation.name] * survived
            print(f"{'SURVIVED' if survived else 'caught':9} {mutation.name} ({mutation.file})", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
