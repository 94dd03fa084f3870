"""GRPO from top to bottom in one file: one CPU process, torch and transformers, nothing hidden.

    python recipes/minimal_grpo.py --steps 100 --seed 1

A small language model learns to sort digits. It is first taught the format by imitation until it is right now and then
(nobody starts reinforcement learning from noise: without a right answer there is nothing to reinforce). From there on
it only sees its own answers and a reward: 1 for a right answer, 0 for a wrong one.

One step of GRPO (Group Relative Policy Optimization, https://arxiv.org/abs/2402.03300):

    prompts --sample--> n answers each --grade--> rewards --compare within the group--> advantages --> policy update

verl_like does the same with many GPUs. What each part here is called there:
    sample              verl_like/rollout       (vLLM instead of a Python loop)
    reward              verl_like/rewards       (killable processes)
    group_advantages    verl_like/algorithms/advantages.py
    policy_loss         verl_like/algorithms/policy_losses.py and kl.py
    train               verl_like/trainer/ppo.py

Letters in names give the axes: B sequences, P prompt tokens, R response tokens, V vocabulary. So advantages_B is one
number a sequence and mask_BR is a matrix of sequences x response tokens.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

# ------------------------------------------------------------------------------------------------------- the task
NUM_DIGITS = 4
MAX_RESPONSE = NUM_DIGITS + 2  # one more than a right answer with its end token: rambling is possible, and costs
VOCABULARY = "0123456789>."  # ">" ends the question, "." ends the answer (the EOS token)
EOS = VOCABULARY.index(".")


def encode(text: str) -> list[int]:
    """The tokenizer: a character is a token."""
    return [VOCABULARY.index(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


def make_questions(seed: int) -> tuple[list[str], list[str]]:
    """All questions such as "4071>", split at random into training and test (500, never trained on)."""
    questions = ["".join(digits) + ">" for digits in itertools.product("0123456789", repeat=NUM_DIGITS)]
    random.Random(seed).shuffle(questions)
    return questions[500:], questions[:500]


def right_answer(question: str) -> str:
    return "".join(sorted(question[:-1])) + "."


def reward(question: str, answer: str) -> float:
    """A verifiable reward: a program decides, no model does. All or nothing, so there is nothing to game."""
    return 1.0 if answer == right_answer(question) else 0.0


# ------------------------------------------------------------------------------------------------------ the model
def make_model() -> Qwen2ForCausalLM:
    """The Qwen2 architecture, at about 80 thousand parameters."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def response_logits(model: Qwen2ForCausalLM, prompt_BP: Tensor, response_BR: Tensor) -> Tensor:
    """[B, R, V]: the logits that predict each response token. Position t predicts token t + 1, hence the shift by one.

    All prompts have the same length here. With mixed lengths a real trainer packs the sequences one after the other.
    It also never builds this [tokens x V] tensor, which for 150,000 tokens of vocabulary would fill the memory.
    """
    logits = model(torch.cat([prompt_BP, response_BR], dim=1)).logits
    first = prompt_BP.shape[1] - 1
    return logits[:, first : first + response_BR.shape[1]]


def token_log_probs(model: Qwen2ForCausalLM, prompt_BP: Tensor, response_BR: Tensor) -> Tensor:
    """[B, R]: log pi(response token | everything before it)."""
    log_probs_BRV = response_logits(model, prompt_BP, response_BR).log_softmax(dim=-1)
    return log_probs_BRV.gather(-1, response_BR[..., None]).squeeze(-1)


def warm_start(model: Qwen2ForCausalLM, questions: list[str], steps: int, rng: random.Random) -> None:
    """Imitation (supervised fine-tuning): raise the log-probability of right answers. Stopped before it is good."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        batch = rng.sample(questions, 128)
        prompt = torch.tensor([encode(question) for question in batch])
        answer = torch.tensor([encode(right_answer(question)) for question in batch])
        loss = -token_log_probs(model, prompt, answer).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------------- rollouts
@dataclass(frozen=True)
class Rollouts:
    """B = prompts x n answers; the n answers to a prompt are neighbours, and form its group."""

    prompt_BP: Tensor
    response_BR: Tensor  # right padded with EOS
    mask_BR: Tensor  # 1.0 for tokens the model sampled (the end token too), 0.0 for padding
    log_probs_BR: Tensor  # log-probabilities at the moment of sampling: "pi_old" of the loss
    reward_B: Tensor


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompt_BP: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Answer each prompt, token by token: (response_BR, mask_BR, log_probs_BR).

    Temperature is 1, so what we sample from is exactly the policy whose gradient we take later. (Each token runs the
    whole sequence again: simple. An inference engine keeps the attention's keys and values instead.)
    """
    sequence, done_B = prompt_BP, torch.zeros(len(prompt_BP), dtype=torch.bool)
    masks, log_probs = [], []
    for _ in range(MAX_RESPONSE):
        log_probs_BV = model(sequence).logits[:, -1].log_softmax(dim=-1)
        token_B = log_probs_BV.argmax(-1) if greedy else torch.multinomial(log_probs_BV.exp(), 1).squeeze(1)
        token_B = torch.where(done_B, EOS, token_B)
        log_probs.append(log_probs_BV.gather(1, token_B[:, None]).squeeze(1))
        masks.append((~done_B).float())
        sequence = torch.cat([sequence, token_B[:, None]], dim=1)
        done_B = done_B | (token_B == EOS)
    return sequence[:, prompt_BP.shape[1] :], torch.stack(masks, 1), torch.stack(log_probs, 1)


def rollout(model: Qwen2ForCausalLM, questions: list[str], n: int) -> Rollouts:
    """Ask every question n times and grade the answers."""
    asked = [question for question in questions for _ in range(n)]
    prompt_BP = torch.tensor([encode(question) for question in asked])
    response_BR, mask_BR, log_probs_BR = sample(model, prompt_BP)
    lengths = mask_BR.sum(1).long().tolist()
    answers = [decode(ids[:length]) for ids, length in zip(response_BR.tolist(), lengths, strict=True)]
    reward_B = torch.tensor([reward(q, a) for q, a in zip(asked, answers, strict=True)])
    return Rollouts(prompt_BP, response_BR, mask_BR, log_probs_BR, reward_B)


def greedy_accuracy(model: Qwen2ForCausalLM, questions: list[str]) -> float:
    prompt_BP = torch.tensor([encode(question) for question in questions])
    response_BR, mask_BR, _ = sample(model, prompt_BP, greedy=True)
    lengths = mask_BR.sum(1).long().tolist()
    rows = zip(questions, response_BR.tolist(), lengths, strict=True)
    return sum(reward(question, decode(ids[:length])) for question, ids, length in rows) / len(questions)


# ---------------------------------------------------------------------------------------------------- the algorithm
def group_advantages(reward_B: Tensor, n: int) -> Tensor:
    """[B]: A = (r - mean of the group) / (std of the group + eps).

    PPO (https://arxiv.org/abs/1707.06347) trains a second network, the critic, to predict the reward, and calls an
    answer good if it beats the prediction. GRPO asks the same question n times and compares an answer with its
    siblings: no critic. If all n answers are right (or all wrong), A is 0 and the question teaches nothing this time.
    Dividing by the std favours very easy and very hard questions; https://arxiv.org/abs/2503.20783 leaves it out.
    """
    groups = reward_B.view(-1, n)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return advantages.flatten()


def policy_loss(
    log_probs_BR: Tensor, old_log_probs_BR: Tensor, ref_log_probs_BR: Tensor, advantages_B: Tensor, mask_BR: Tensor,
    clip: float, kl_coef: float,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Clipped surrogate plus a KL penalty, averaged over all sampled tokens.

        ratio = pi(token) / pi_old(token)                 1 at the first update after sampling
        pg    = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)
        k3    = exp(d) - d - 1  with  d = log pi_ref - log pi
        loss  = mean over tokens of (pg + kl_coef * k3)

    Why clip: the answers come from pi_old. After a few updates pi has moved, and the estimate is only good near
    pi_old; where the ratio leaves the range in the direction A wants, the gradient is cut off.
    Why k3: it is an unbiased, never negative estimate of KL(pi || pi_ref) from the sampled token alone
    (http://joschu.net/blog/kl-approx.html). It keeps the policy near the model we started from.
    Why the mean over tokens of the whole batch, not of each answer first: every token then counts the same, however
    long its answer is (https://arxiv.org/abs/2503.14476, section 3.3).
    """
    ratio_BR = (log_probs_BR - old_log_probs_BR).exp()
    advantages_B1 = advantages_B[:, None]  # one outcome a sequence: all its tokens share the credit
    unclipped_BR = ratio_BR * advantages_B1
    clipped_BR = ratio_BR.clamp(1 - clip, 1 + clip) * advantages_B1
    pg_BR = -torch.minimum(unclipped_BR, clipped_BR)
    d_BR = ref_log_probs_BR - log_probs_BR
    k3_BR = d_BR.exp() - d_BR - 1

    def token_mean(value_BR: Tensor) -> Tensor:
        return (value_BR * mask_BR).sum() / mask_BR.sum()

    loss = token_mean(pg_BR + kl_coef * k3_BR)
    metrics = {"kl": token_mean(k3_BR).item(), "clipfrac": token_mean((clipped_BR < unclipped_BR).float()).item()}
    return loss, metrics


def update(
    model: Qwen2ForCausalLM, reference: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, rollouts: Rollouts,
    args: argparse.Namespace,
) -> dict[str, float]:  # fmt: skip
    """One pass over the rollouts in mini-batches of whole groups, one optimizer step each."""
    advantages_B = group_advantages(rollouts.reward_B, args.n)
    with torch.no_grad():
        ref_log_probs_BR = token_log_probs(reference, rollouts.prompt_BP, rollouts.response_BR)
    metrics: dict[str, float] = {}
    for rows in torch.arange(len(advantages_B)).chunk(args.mini_batches):
        # What sampling recorded (pi_old) is only a number; the same tokens go through the model again for a gradient.
        log_probs_BR = token_log_probs(model, rollouts.prompt_BP[rows], rollouts.response_BR[rows])
        loss, metrics = policy_loss(
            log_probs_BR, rollouts.log_probs_BR[rows], ref_log_probs_BR[rows], advantages_B[rows],
            rollouts.mask_BR[rows], args.clip, args.kl_coef,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
    return metrics  # of the last mini-batch: the one farthest from pi_old


def train(args: argparse.Namespace) -> list[float]:
    """Warm start, then `args.steps` steps of GRPO. Returns the mean reward of each step."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train_questions, test_questions = make_questions(args.seed)
    model = make_model()
    warm_start(model, train_questions, args.warm_start_steps, rng)
    reference = copy.deepcopy(model).requires_grad_(False)  # pi_ref: frozen at the start
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"after the warm start: greedy accuracy on unseen questions {greedy_accuracy(model, test_questions):.3f}")

    rewards: list[float] = []
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        rollouts = rollout(model, rng.sample(train_questions, args.prompts), args.n)
        metrics = update(model, reference, optimizer, rollouts, args)
        rewards.append(rollouts.reward_B.mean().item())
        numbers = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"step {step:3d}  reward {rewards[-1]:.3f}  {numbers}  {time.perf_counter() - start:.2f} s", flush=True)

    print(f"after GRPO: greedy accuracy on unseen questions {greedy_accuracy(model, test_questions):.3f}")
    for question in test_questions[:3]:
        response_BR, mask_BR, _ = sample(model, torch.tensor([encode(question)]), greedy=True)
        print(f"  {question} {decode(response_BR[0, : int(mask_BR.sum())].tolist())}")
    return rewards


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO in one file: a small model learns to sort digits.")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps (0.25 s each on one core)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-start-steps", type=int, default=40, help="imitation steps before GRPO")
    parser.add_argument("--prompts", type=int, default=64, help="questions per step")
    parser.add_argument("--n", type=int, default=8, help="answers per question (the group)")
    parser.add_argument("--mini-batches", type=int, default=2, help="optimizer steps per GRPO step")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--clip", type=float, default=0.2, help="how far the ratio may move")
    parser.add_argument("--kl-coef", type=float, default=0.001, help="weight of the KL to the starting model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse_args())
