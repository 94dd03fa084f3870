"""`preference.*`: training on answers of which one is preferred. Rows are read as section sft says.

The formulas are in docs/preference.md. Which keys act with which loss: rules/training.py.
"""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, key, one_of, such_that

_OF_KTO = "loss is not kto"


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(ConfigNode):
    """`preference.*`: the loss, the columns of pairs and labels, or the runs that pairs come from."""

    loss: str = key("dpo", one_of("dpo", "ipo", "kto", "orpo", "simpo", "reward"))
    """dpo, ipo, orpo, simpo: pairs; kto: answers that are good or not (pairs too: one of each); reward: a reward model
    (Bradley-Terry) for reward_model.*, whose head is new where the model has none."""
    beta: float = key(0.1, above(0), idle="loss is reward")
    """Strength: dpo, ipo, kto, simpo multiply the policy's log-probs (beside the reference's, if there is one) with it,
    orpo the term of the odds. Papers: 0.1; simpo 2."""
    label_smoothing: float = key(
        0.0, such_that(lambda share: 0 <= share < 0.5, "give a share of 0 or more, and under 0.5", "0 to 0.5")
    )
    """dpo, simpo: share of pairs that are taken to be the wrong way round."""
    margin: float = key(0.0, at_least(0))
    """dpo, simpo, reward: by how much the chosen answer's reward has to be the higher one (simpo: gamma)."""
    margin_key: str | None = None
    """dpo, simpo, reward: column with a margin of each pair, added to `margin`. Null: with reward the column margin,
    where files have one."""
    center_coef: float = key(0.0, at_least(0), idle="loss is not reward")
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""
    desirable_weight: float = key(1.0, at_least(0), idle=_OF_KTO)
    """Weight of good answers."""
    undesirable_weight: float = key(1.0, at_least(0), idle=_OF_KTO)
    """Weight of the others. The paper: numbers of good and other answers, times their weights, should be as 1 to 1, up
    to 4 to 3."""
    sft_loss_coef: float | None = key(None, at_least(0))
    """dpo, ipo, orpo, simpo: weight of the mean -log p of the chosen answers' tokens. Null: 1 with orpo, else 0."""
    sft_prompt: bool | None = None
    """Count the prompt's tokens in that mean too. Null: with orpo, as its paper's code does."""
    reference_free: bool = False
    """dpo, ipo, kto: take all log-probs of the reference as 0. Otherwise it is the model that the run begins with,
    without adapters: its log-probs are computed once, and no second model is loaded."""
    reference_cache: str | None = None
    """Folder for the reference's log-probs, which runs on the same model and data may share. Null: the run's own."""
    chosen_key: str = "chosen"
    """Column with the preferred answer, or the whole conversation where there is no column data.prompt_key."""
    rejected_key: str = "rejected"
    """Column with the other one, in the same form."""
    completion_key: str = key("completion", idle=_OF_KTO)
    """Column with an answer that is good or not."""
    label_key: str = key("label", idle=_OF_KTO)
    """Column with true where it is good."""
    rollouts: list[str] = key([])
    """Folders of runs whose recorded steps (trainer.record_freq) give the pairs, in place of data.train_files: of each
    group the answers with the highest and the lowest score. Empty: none."""
    min_gap: float = key(0.0, at_least(0), idle="rollouts is empty")
    """Least difference between these two scores, above which a group gives a pair. With 0 all groups do but those whose
    scores are equal."""
