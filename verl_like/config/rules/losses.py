"""Rules of the policy's update: keys that the chosen estimator or loss does not read, terms that cannot work together,
what corrects for the sampler (algorithm.rollout_correction), and teachers (distillation)."""

from collections.abc import Callable, Mapping

from verl_like.config import batch_plan
from verl_like.config.actor import ActorConfig
from verl_like.config.batch_plan import takes_own_log_probs
from verl_like.config.correction import corrects
from verl_like.config.distillation import SOLE, TOP_K
from verl_like.config.engines import ENGINES
from verl_like.config.menus import ESTIMATORS, KL_KINDS, LOSSES, Choice, Loss, readers
from verl_like.config.placement import is_apart
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import compares_policies, needs_critic
from verl_like.config.rollout import NEUTRAL, distortions
from verl_like.config.rule import Findings, idle, rule

_ACTOR, _ESTIMATOR, _ROLLOUT = "actor_rollout_ref.actor", "algorithm.adv_estimator", "actor_rollout_ref.rollout"
_LOSS, _SECTION = f"{_ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
_WEIGHTS, _MERGE = f"{_SECTION}.rollout_is", "actor_rollout_ref.model.lora.merge"
_ONE_RATIO = "with one update per rollout batch the old log-probs are the update's own: all ratios are 1"


def two_policies(config: PPOConfig) -> bool:
    """Return True where the loss compares with the sampler's policy (bypass mode)."""
    return batch_plan.two_policies(_actor(config), config.algorithm.rollout_correction)


def is_reinforce(config: PPOConfig) -> bool:
    """Return True where the policy loss is bypass mode's -log-prob x advantage."""
    return two_policies(config) and config.algorithm.rollout_correction.loss_type == "reinforce"


def weights_idle(config: PPOConfig) -> bool:
    """With two policies the ratio of the PPO loss is the correction: further weights would count it twice."""
    return two_policies(config) and not is_reinforce(config)


def _actor(config: PPOConfig) -> ActorConfig:
    return config.actor_rollout_ref.actor


def _loss(config: PPOConfig) -> Loss:
    return LOSSES["policy_gradient"] if is_reinforce(config) else _actor(config).policy_loss.loss


@rule(f"{_ROLLOUT}.quantization", "name", _MERGE, _WEIGHTS, reads=("actor_rollout_ref.model.lora_rank",))
def quantised_sampling(config: PPOConfig) -> Findings:
    """Quantised sampling has an engine that does it, merged adapters, and weights that correct it."""
    rollout, key = config.actor_rollout_ref.rollout, f"{_ROLLOUT}.quantization"
    if rollout.quantization is None:
        return
    engine = next(name for name, row in ENGINES.items() if rollout.quantization in row.quantisations)
    if rollout.name != engine and not rollout.engine.recorded:
        yield (key, f"{_ROLLOUT}.name"), f"{rollout.engine.unquantised}set name={engine}, or quantization=null"
    if config.actor_rollout_ref.model.lora_rank and not config.actor_rollout_ref.model.lora.merge:
        yield (key, _MERGE), "set merge to True"
    if config.algorithm.rollout_correction.rollout_is is None and not two_policies(config):
        why = "responses are sampled from other probabilities than the trainer's"
        yield (key, _WEIGHTS), f"{why}, which truncated importance weights put right; set rollout_is=token"


@rule(f"{_ACTOR}.use_unbiased_kl", "kl_loss_type", reads=("use_kl_loss",))
def unbiased_kl(config: PPOConfig) -> Findings:
    """A ratio corrects an estimate of the KL that is unbiased on the policy's own samples."""
    actor, unbiased = _actor(config), [name for name, kind in KL_KINDS.items() if kind.unbiased]
    if actor.use_kl_loss and actor.use_unbiased_kl and actor.kl_loss_type not in unbiased:
        why = "a ratio corrects an estimate that is unbiased on the policy's own samples"
        return f"{why}; use one of {', '.join(unbiased)}"


@rule(f"{_ACTOR}.rl_loss_coef", "sft_loss_coef", reads=("entropy_coeff",))
def something_is_trained(config: PPOConfig) -> Findings:
    """A term of the loss has a weight."""
    actor = _actor(config)
    if actor.rl_loss_coef == 0 and actor.sft_loss_coef == 0 and actor.entropy_coeff == 0:
        return "nothing would be trained; set one of them above 0"


@rule(*(f"{_ROLLOUT}.{name}" for name in NEUTRAL), kind="risky", reads=(_WEIGHTS, f"{_SECTION}.bypass_mode"))
def sampling_from_the_models_own_distribution(config: PPOConfig) -> Findings:
    """The mismatch of trainer and sampler is told, and corrected, of the model's own distribution."""
    rollout, corrected = config.actor_rollout_ref.rollout, corrects(config.algorithm.rollout_correction)
    changed, two = [f"{_ROLLOUT}.{each.partition('=')[0]}" for each in distortions(rollout)], two_policies(config)
    if not changed:
        return
    fix = "leave them at their defaults (top_p=1, top_k=-1, penalties off)"
    why = "the sampler's log-probs are those of the changed distribution, the trainer's of the model's own, which is"
    yield (
        changed,
        f"{why} the one that is trained: training/rollout_probs_diff_* and rollout_corr/* show the change (a mean of "
        "0.02 is usual) even if the two engines agree to 1e-5, and cannot warn when they do not; "
        f"{fix}, or judge the engines by weight_sync/probe_gap",
    )
    penalties = [key for key in changed if "_penalty" in key]
    if penalties and not two:
        weighs = "the correction's weights put that right" if corrected else f"{_WEIGHTS}=token weighs it"
        why = "the ratio of the loss knows no penalty (old log-probs are the model's own), so tokens that a penalty"
        yield penalties, f"{why} made rarer or likelier are trained as if the model had chosen them; {weighs}"
    if rollout.use_fire_sampling and not corrected and not two:
        why = "the ratio of the loss takes the first token of each response, drawn at a high temperature, for the"
        yield (f"{_ROLLOUT}.use_fire_sampling",), f"{why} model's own choice, as verl does; {_WEIGHTS}=token weighs it"
    if corrected and len(penalties) + rollout.use_fire_sampling < len(changed):
        yield changed, f"of a cut distribution every weight is below 1 ({_SECTION}); {fix}"


@rule(_ESTIMATOR, f"{_ROLLOUT}.do_sample", kind="risky")
def greedy_baseline(config: PPOConfig) -> Findings:
    """A greedy response is a baseline of sampled ones, whose rewards are as they were given."""
    algorithm = config.algorithm
    norm, agent = algorithm.reward_norm, algorithm.agent_reward_norm
    by_statistic = (norm.mean, norm.std, norm.kind) != (None, None, None) or agent.method != "identity"
    if algorithm.estimator.greedy and (algorithm.reward_scaling.enable or by_statistic):
        why = "rewards are normalised and the greedy response's is not, so it is a poor baseline"
        yield (_ESTIMATOR,), f"{why}; leave reward_norm, reward_scaling and agent_reward_norm out"
    if algorithm.estimator.greedy and not config.actor_rollout_ref.rollout.do_sample:
        why = "the response is the greedy one, and every advantage 0"
        yield (_ESTIMATOR, f"{_ROLLOUT}.do_sample"), f"{why}; set do_sample=true"


@rule(
    *(f"{section}.optim.{name}" for section in (_ACTOR, "critic") for name in ("l2_coeff", "weight_decay")),
    kind="risky",
)
def one_decay(config: PPOConfig) -> Findings:
    """Weights are pulled to 0 in one way."""
    roles = {_ACTOR: _actor(config).optim}
    if needs_critic(config.critic, config.algorithm):
        roles["critic"] = config.critic.optim
    for section, optim in roles.items():
        if optim.l2_coeff > 0 and optim.weight_decay > 0:
            why = "weights are pulled to 0 twice, by the gradient and by AdamW"
            yield (f"{section}.optim.l2_coeff", f"{section}.optim.weight_decay"), f"{why}; set one of them to 0"


@rule(f"{_ACTOR}.ppo_mini_batch_size", "ppo_epochs", _LOSS, f"{_SECTION}.loss_type", kind="risky", reads=(_WEIGHTS,))
def updates_without_a_ratio(config: PPOConfig) -> Findings:
    """Only the first update of a loss without a ratio is on the policy that sampled."""
    actor, batch = _actor(config), config.data.train_batch_size
    several = actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < batch
    weighted = is_reinforce(config) and config.algorithm.rollout_correction.rollout_is is not None
    if _loss(config).without_ratio and several and not weighted:
        keys = ("ppo_mini_batch_size", "ppo_epochs", f"{_SECTION}.loss_type" if is_reinforce(config) else _LOSS)
        why = "without a ratio, updates after the first are off-policy, and nothing corrects or bounds them"
        yield keys, f"{why}; set ppo_mini_batch_size={batch} and ppo_epochs=1, or another loss_mode"


@rule(f"{_ACTOR}.kl_loss_type", kind="risky", reads=("use_kl_loss", "use_unbiased_kl"))
def kl_as_a_loss(config: PPOConfig) -> Findings:
    """k1 as a loss: the gradient of d = log_prob - ref is that of log_prob, whose mean over samples is 0."""
    actor, kind = _actor(config), KL_KINDS.get(_actor(config).kl_loss_type)
    if actor.use_kl_loss and not actor.use_unbiased_kl and kind is not None and kind.aimless:
        why = "as a loss it has a gradient of mean 0: it pulls nowhere"
        return f"{why}; set kl_loss_type=kl+, mse or low_var_kl, or use_unbiased_kl=true"


_DISTILL, _MODELS = "distillation.distillation_loss", "distillation.teacher_models"
_MODE, _GRADIENT, _ALONE = (f"{_DISTILL}.{name}" for name in ("loss_mode", "use_policy_gradient", "use_task_rewards"))
_KL = (f"{_ACTOR}.kl_loss_type", "algorithm.kl_penalty")


@rule("distillation.enabled", "teacher_model.model_path", "teacher_models", reads=("distillation.teacher_key",))
def teachers_are_named(config: PPOConfig) -> Findings:
    """Every teacher has a model, and rows of its own."""
    distillation, teachers = config.distillation, config.distillation.teachers()
    if distillation.enabled and not teachers:
        what = "name the teacher (of a server too, whose tokenizer it names)"
        return f"{what}: distillation.teacher_model.model_path=FOLDER, or several in {_MODELS}"
    if teachers and distillation.teacher_model.model_path is not None and distillation.teacher_models:
        return ("distillation.teacher_model.model_path", _MODELS), "the first names the only teacher; leave one out"
    for teacher in (each for each in teachers.values() if not (each.path.strip() or each.config.log_probs_file)):
        return (_MODELS,), f"{teacher.place} has no model_path; set it to the teacher's folder"
    for teacher in (each for each in teachers.values() if each.config.log_probs_file and each.config.inference.url):
        return (), f"{teacher.place} has log_probs_file and inference.url: leave one of them out"
    if len(teachers) > 1 and SOLE in distillation.teacher_models:
        return (_MODELS,), f"verl drops {SOLE} where there are others; give it another name"
    rows = [each.rows for each in teachers.values()]
    if twice := [value for value in dict.fromkeys(rows) if rows.count(value) > 1]:
        return (_MODELS,), f"the rows of {twice[0]} have two teachers; give each a key of its own"


@rule(_MODE, _GRADIENT, reads=("distillation.enabled",))
def teachers_pull_somewhere(config: PPOConfig) -> Findings:
    """k1 as a loss: its gradient is that of log_prob, whatever the teacher says."""
    loss = config.distillation.distillation_loss
    kind = KL_KINDS.get(loss.loss_mode)
    if config.distillation.enabled and not loss.use_policy_gradient and kind is not None and kind.aimless:
        return "its gradient does not depend on the teacher; set use_policy_gradient=true, or loss_mode=k3"


@rule(_MODE, _GRADIENT, kind="risky", reads=("distillation.enabled",))
def distributions_as_a_loss(config: PPOConfig) -> Findings:
    """A distance over many tokens says more as a loss than as the advantage of the sampled one."""
    loss = config.distillation.distillation_loss
    if config.distillation.enabled and loss.use_policy_gradient and loss.loss_mode not in KL_KINDS:
        return "only the sampled token's log-prob is moved; set use_policy_gradient=false, or loss_mode=k1"


@rule(f"{_DISTILL}.distillation_loss_coef", kind="risky", reads=("distillation.enabled",))
def teachers_weigh_something(config: PPOConfig) -> Findings:
    """Teachers that are computed are learnt from."""
    loss = config.distillation.distillation_loss
    if config.distillation.enabled and loss.use_task_rewards and loss.distillation_loss_coef == 0:
        return "the teachers are computed, and nothing is learnt from them"


@rule(_MODE, *_KL, reads=("distillation.enabled",))
def one_comparison(config: PPOConfig) -> Findings:
    """The update compares whole vocabularies with the teachers or with the reference."""
    if config.distillation.compares and compares_policies(config):
        return f"one whole vocabulary is compared at a time; set {_KL[0]}=low_var_kl, or loss_mode=k3"


@rule(_MODE, "distillation.hint_key", reads=("distillation.enabled",))
def hints_before_the_update(config: PPOConfig) -> Findings:
    """A teacher that sees a hint is asked before the update, about other prompts than the policy's."""
    if config.distillation.compares and config.distillation.hint_key is not None:
        return f"in the update both read the same prompts; set loss_mode={TOP_K}, or hint_key=null"


@rule(_MODE, "trainer.placement", "distillation.nnodes", reads=("distillation.enabled",))
def teachers_beside_the_actor(config: PPOConfig) -> Findings:
    """Teachers are in the actor's pool where they read the rows together with it."""
    teachers = config.distillation.teachers() if config.distillation.compares else {}
    if any(is_apart(config, name) or not each.local for name, each in teachers.items()):
        return f"the teacher reads the rows together with the actor; leave it in the main pool, or use {TOP_K}"


@rule(_ALONE, f"{_ACTOR}.use_kl_loss", "trainer.prove_step", reads=("distillation.enabled",))
def teachers_alone(config: PPOConfig) -> Findings:
    """Without task rewards the teachers are all that is learnt from; trainer.prove_step knows no teachers."""
    if config.distillation.alone and config.actor_rollout_ref.actor.use_kl_loss:
        yield (_ALONE, f"{_ACTOR}.use_kl_loss"), "no other term is in the loss; set one of them to its default"
    if config.distillation.enabled and config.trainer.prove_step:
        yield ("trainer.prove_step", "distillation.enabled"), "the plain step has no teachers; set one to False"


@rule("trainer.prove_step", "trainer.objective")
def proof_of_reinforcement_learning(config: PPOConfig) -> Findings:
    """The plain step is one of reinforcement learning."""
    if config.trainer.prove_step and config.trainer.objective != "rl":
        return "the plain step is one of rl; set prove_step to False"


def _unread(menu: Mapping[str, Choice], section: str, key: str, chosen: Callable[[PPOConfig], Choice]) -> None:
    """Register the keys that only some choices of a menu read."""

    def unread(names: tuple[str, ...]) -> Callable[[PPOConfig], bool]:
        return lambda config: (row := chosen(config)).name in menu and row.name not in names

    for knob, names in readers(menu).items():
        idle(f"{section}.{knob}", when=unread(names), why=f"{key} does not read it (read by {', '.join(names)})")


def _acts_on_ratios(key: str) -> Callable[[PPOConfig], bool]:
    return lambda config: takes_own_log_probs(config) and key in _loss(config).of_ratio


def _has_side_terms(actor: ActorConfig) -> bool:
    return actor.entropy_coeff != 0 or actor.use_kl_loss or actor.sft_loss_coef != 0


idle(
    *(_WEIGHTS, f"{_SECTION}.rollout_is_threshold", f"{_SECTION}.rollout_is_batch_normalize"),
    when=lambda c: weights_idle(c) and c.algorithm.rollout_correction.rollout_is is not None,
    why=f"the loss's own ratio is trainer / sampler ({_SECTION}.bypass_mode or actor.old_log_probs=rollout, with "
    "loss_type=ppo_clip)",
)
idle(f"{_SECTION}.loss_type", when=lambda c: not two_policies(c), why=f"{_SECTION}.bypass_mode is false")
idle(_LOSS, when=is_reinforce, why=f"{_SECTION}.loss_type=reinforce sets the loss")
_unread(ESTIMATORS, "algorithm", _ESTIMATOR, lambda c: c.algorithm.estimator)
idle(
    "algorithm.whiten_advantages",
    when=lambda c: c.algorithm.estimator.whitens,
    why="algorithm.adv_estimator whitens its advantages anyway",
)
_unread(LOSSES, _ACTOR, _LOSS, _loss)
for _key in dict.fromkeys(key for loss in LOSSES.values() for key in loss.of_ratio):
    _fix = f" (smaller {_ACTOR}.ppo_mini_batch_size, more ppo_epochs, or old_log_probs=recompute change that)"
    idle(f"{_ACTOR}.{_key}", when=_acts_on_ratios(_key), why=_ONE_RATIO + _fix)
idle(
    f"{_ACTOR}.clip_ratio",
    when=lambda c: "clip_ratio" in _loss(c).reads and None not in (_actor(c).clip_ratio_low, _actor(c).clip_ratio_high),
    why="clip_ratio_low and clip_ratio_high are both set",
)
idle(
    f"{_ACTOR}.loss_agg_mode",
    when=lambda c: _loss(c).aggregation is not None and not _has_side_terms(_actor(c)),
    why=f"{_LOSS} prescribes its aggregation, and there is no entropy, KL or sft term",
)
idle(
    f"{_ACTOR}.ratio_skip_threshold",
    when=lambda c: takes_own_log_probs(c) and _actor(c).ratio_skip_threshold is not None,
    why=_ONE_RATIO,
)
idle(
    f"{_ACTOR}.sample_weight.scope",
    when=lambda c: not (_actor(c).sample_weight.difficulty or _actor(c).sample_weight.length),
    why=f"{_ACTOR}.sample_weight.difficulty and .length are false",
)
idle(
    *(f"{_ACTOR}.{name}" for name in ("entropy_coeff", "sft_loss_coef", "rl_loss_coef")),
    when=lambda c: c.distillation.alone,
    why=f"{_ALONE} is false: the teachers are all that is learnt from",
)
idle("distillation.teacher_key", when=lambda c: len(c.distillation.teachers()) == 1, why="there is one teacher")
idle(
    f"{_DISTILL}.kd_temperature",
    when=lambda c: c.distillation.distillation_loss.loss_mode in KL_KINDS,
    why=f"{_MODE} compares log-probs of sampled tokens, at rollout.temperature",
)
