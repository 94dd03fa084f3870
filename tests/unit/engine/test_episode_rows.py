"""An episode of five turns as one row, or as five that each hold their whole context: one gradient, in any order.

From turns as an agent makes them, through rows, credit and loss, to the gradient of a real model. What the five rows
begin with in common is computed once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.engine import loss_scenarios as losses
from tests.unit.engine import tiny
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.minibatch import count_episode_tokens, denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Evaluated, Experience, Prompt, PromptRow, Rollouts, Scores
from verl_like.config import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import computed_tokens
from verl_like.episodes.episode import Episode, Turn
from verl_like.episodes.rows import assemble_rollouts, episode_of_rows
from verl_like.models import packing
from verl_like.models.prefix_tree import beginnings
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import Sampled

TURNS, GROUPS, N = 5, 2, 3
WHOLE = MicroBatchRule(max_tokens=10_000)


@pytest.fixture(scope="module")
def engine(process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> FSDPEngine:
    return tiny.build_engine(process, tiny.model_folder(tmp_path_factory.mktemp("model")))


def episode(prompt: Prompt, seed: int, *, rewritten: bool) -> Episode:
    """Five turns with rewards and states. rewritten: every turn but the first is a row with the whole context."""
    g = torch.Generator().manual_seed(seed)

    def words(most: int) -> list[int]:
        return torch.randint(1, tiny.VOCAB, (int(torch.randint(1, most, (), generator=g)),), generator=g).tolist()

    turns, context = list[Turn](), list(prompt.ids)
    for k in range(TURNS):
        seen = words(4) if k else prompt.ids
        context += seen if k else []
        wrote = words(5)
        turn = Turn(
            observation_ids=list(context) if rewritten and k else seen,
            sampled=Sampled.of(wrote, torch.randn(len(wrote), generator=g).tolist(), 0),
            finish_reason="stop",
            new_row=rewritten and k > 0,
            reward=float(torch.randint(3, (), generator=g)),
            state_id=int(torch.randint(2, (), generator=g)),
        )
        turns.append(turn)
        context += wrote
    return Episode(turns=tuple(turns))


def batch(*, rewritten: bool) -> tuple[Rollouts, Scores]:
    """Two groups of three episodes, with a score each."""
    row = PromptRow(index=0, data_source="x", messages=[])
    prompts = [Prompt(ids=list(range(7 + 9 * g, 16 + 9 * g)), row=row, group=g, position=g) for g in range(GROUPS)]
    episodes = [[episode(p, N * p.group + i, rewritten=rewritten) for i in range(N)] for p in prompts]
    number_of = torch.tensor(episode_of_rows(episodes))
    score_E = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25, 0.0])
    scores = Scores(
        score_B=score_E[number_of],
        valid_B=torch.ones(len(number_of), dtype=torch.bool),
        extras=[{} for _ in number_of],
        failures=[None] * len(number_of),
    )
    return assemble_rollouts(prompts, episodes), scores


def evaluated(engine: FSDPEngine, rollouts: Rollouts) -> Evaluated:
    """Old log-probs a little off the model's own, by the token: the same whatever row it stands in."""
    known = engine.forward(rollouts, want=frozenset({"log_probs"}), rule=WHOLE)["log_probs"]
    assert rollouts.rollout_log_probs_T is not None
    old = known + 0.2 * rollouts.rollout_log_probs_T * rollouts.response_mask_T
    return Evaluated(response_length_B=rollouts.response_length_B, old_log_probs_T=old, values_T=0.1 * old)


def experience(engine: FSDPEngine, actor: ActorConfig, estimator: str, *, rewritten: bool) -> Experience:
    rollouts, scores = batch(rewritten=rewritten)
    algorithm = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, step_reward_gamma=0.7)
    made, _ = make_experience(algorithm, actor, rollouts, scores, evaluated(engine, rollouts), 0.0)
    return made


def gradient(engine: FSDPEngine, actor: ActorConfig, rows: Experience, rule: MicroBatchRule) -> Tensor:
    kept = count_episode_tokens(prepare_minibatch(prepare_batch(rows, actor), actor, seed=(0,)))
    objective = PolicyObjective(actor, RolloutCorrectionConfig())
    return losses.gradients(engine, kept, objective, denominators_of(kept, 64), rule)[0]


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("estimator", "mode"),
    [("gigpo", mode) for mode in MODES] + [(e, "token-mean") for e in ("grpo", "step_reinforce", "gae")],
)
def test_one_row_or_five_in_any_order(engine: FSDPEngine, estimator: str, mode: str) -> None:
    actor = ActorConfig(loss_agg_mode=mode)
    one = experience(engine, actor, estimator, rewritten=False)
    five = experience(engine, actor, estimator, rewritten=True)
    assert (len(one), len(five)) == (GROUPS * N, GROUPS * N * TURNS)
    expected = gradient(engine, actor, one, WHOLE)
    assert float(expected.abs().max()) > 0
    for seed, rule in ((0, WHOLE), (1, MicroBatchRule(max_tokens=120)), (2, MicroBatchRule(max_sequences=4))):
        order = torch.randperm(len(five), generator=torch.Generator().manual_seed(seed)) if seed else range(len(five))
        found = gradient(engine, actor, five.select(order), rule)
        assert float((found - expected).abs().max()) <= 3e-5 * float(expected.abs().max())


def test_the_rows_of_an_episode_compute_its_tokens_once() -> None:
    """Whether they are one row or five: what five need more are the last tokens of four, which one goes on from."""
    rollouts, _ = batch(rewritten=True)
    rows, (one, _) = len(rollouts), batch(rewritten=False)
    assert computed_tokens(rollouts) - rows == computed_tokens(one) - len(one)
    assert sum(beginnings(rollouts).common) > int(rollouts.num_tokens_B().sum()) // 2
    wanted = packing.response_positions(rollouts, sampled_only=True)
    packed = packing.pack(rollouts, wanted, torch.device("cpu"), share_prompts=True)
    assert packed.input_ids.shape[1] == computed_tokens(rollouts) - rows  # nothing is predicted from a last token
    assert torch.equal(packed.unpack(packed.targets_N), (rollouts.response_ids_T * wanted).long())
    assert packed.segments is not None and packed.segments.layout is not None
    spread = packed.segments.layout.spread(packed.input_ids[0][:, None].double())[:, 0].split(packed.segments.lengths)
    contexts = {
        (*p[-n:].tolist(), *r[: m - 1].tolist())
        for p, n, r, m in zip(
            rollouts.prompt_ids_BP,
            rollouts.prompt_length_B.tolist(),
            rollouts.response_ids_BR,
            rollouts.response_length_B.tolist(),
            strict=True,
        )
    }
    assert {tuple(part.long().tolist()) for part in spread} == contexts
