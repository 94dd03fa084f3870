"""Rules of groups: how large they are, and which of them a step trains."""

from verl_like.config.ppo import PPOConfig
from verl_like.config.rule import Findings, rule

_FILTER, _N = "algorithm.filter_groups", "actor_rollout_ref.rollout.n"
_ADDITIONAL = "actor_rollout_ref.rollout.scheduler.additional_prompts"
SCORED_BY = ("actor_rollout_ref.rollout.scheduler.mode", "reward_model.enable", "reward_model.reward_manager")


def scored_together(config: PPOConfig) -> str:
    """The key by which responses get their scores as a batch; empty where each gets its own."""
    reward, by_batch = config.reward_model, config.actor_rollout_ref.rollout.scheduler.mode == "batch"
    together = zip(SCORED_BY, (by_batch, reward.enable, reward.reward_manager == "batch"), strict=True)
    return next((key for key, is_so in together if is_so), "")


@rule(_N, "algorithm.adv_estimator", kind="risky")
def groups_of_one(config: PPOConfig) -> Findings:
    """An estimator that compares the responses of a group needs two of them."""
    compares = config.algorithm.estimator.compares and not config.distillation.alone
    if compares and config.actor_rollout_ref.rollout.n == 1:
        return "a group of one has nothing to compare with; set n to 2 or more"


@rule(f"{_FILTER}.enable", _N)
def filtered_groups_of_one(config: PPOConfig) -> Findings:
    """Dynamic sampling compares the responses of a group."""
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        return "one response cannot differ from others; set n to 2 or more, or enable=false"


@rule(f"{_FILTER}.metric", "algorithm.use_kl_in_reward", reads=(f"{_FILTER}.enable",))
def groups_chosen_before_log_probs(config: PPOConfig) -> Findings:
    """Dynamic sampling chooses groups before log-probs are known."""
    rules = config.algorithm.filter_groups
    if rules.enable and rules.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        return "groups are chosen before log-probs are known; use metric=seq_reward"


@rule(f"{_FILTER}.max_num_gen_batches", "data.gen_batch_size", "data.train_batch_size", reads=(f"{_FILTER}.enable",))
def draws_fill_a_batch(config: PPOConfig) -> Findings:
    """The draws of a step can fill its batch."""
    rules, data = config.algorithm.filter_groups, config.data
    most = rules.max_num_gen_batches * (data.gen_batch_size or data.train_batch_size)
    if rules.enable and rules.resample and 0 < most < data.train_batch_size:
        return (
            f"draws of {most} prompts can never fill data.train_batch_size={data.train_batch_size}; raise one of them"
        )


_CURRICULUM, _ROLLOUT = "data.curriculum.enable", "actor_rollout_ref.rollout"
_DRAWN_BY = ("data.sampler.class_path", "data.domain_weights", f"{_ROLLOUT}.skip_rollout", f"{_ROLLOUT}.name")


@rule(_CURRICULUM, _N, *_DRAWN_BY, "trainer.objective", "env.train.tags")
def one_order_of_prompts(config: PPOConfig) -> Findings:
    """A curriculum alone says which prompt comes, and learns it from sampled groups."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if not data.curriculum.enable:
        return
    others = (data.sampler.class_path, data.domain_weights, rollout.skip_rollout, rollout.engine.recorded)
    for key, is_so in zip(_DRAWN_BY, others, strict=True):
        if is_so:
            yield (_CURRICULUM, key), "both say which prompts come; leave one of them out"
    if rollout.n == 1:
        yield (_CURRICULUM, _N), "one response is never mixed; set n to 2 or more"
    if config.trainer.objective != "rl":
        yield (_CURRICULUM, "trainer.objective"), "no responses are sampled that it could learn from; set it to False"
    if config.env.train.tags:
        yield (_CURRICULUM, "env.train.tags"), "each start of an environment is another one; set it to False"


@rule("algorithm.min_group_size", _N)
def groups_of_min_size(config: PPOConfig) -> Findings:
    """A group may have algorithm.min_group_size responses."""
    least = config.algorithm.min_group_size
    if least is not None and least > config.actor_rollout_ref.rollout.n:
        return "no group is so large; lower it, or raise n"


@rule(f"{_ADDITIONAL}.enable", "max", "data.train_batch_size", f"{_FILTER}.enable", f"{_FILTER}.resample", *SCORED_BY)
def additional_prompts(config: PPOConfig) -> Findings:
    """Additional prompts are fewer than a batch, and their groups are chosen as they end."""
    extra, rules = config.actor_rollout_ref.rollout.scheduler.additional_prompts, config.algorithm.filter_groups
    on, filtered, together = f"{_ADDITIONAL}.enable", extra.enable and rules.enable, scored_together(config)
    if extra.enable and extra.max > config.data.train_batch_size:
        fix = "lower it to the batch size or less"
        yield (f"{_ADDITIONAL}.max", "data.train_batch_size"), f"a prompt could be aborted step after step; {fix}"
    if filtered and not rules.resample:
        fix = "set one of the two to its default"
        yield (on, f"{_FILTER}.resample"), f"the batch is to keep groups without a signal; {fix}"
    if filtered and together:
        why = f"a group is chosen as soon as it ends, but {together} gives scores to whole batches"
        yield (on, f"{_FILTER}.enable", together), f"{why}; disable one of them"
