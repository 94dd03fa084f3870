"""Rules of reward shaping and dynamic sampling: what cannot work, what can have no effect."""

from __future__ import annotations

import pytest

from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import hosted_roles, roles_of
from verl_like.trainer.compose import compose_with_warnings

R, G = "actor_rollout_ref.rollout", "algorithm=grpo"
ADDITIONAL = "actor_rollout_ref.rollout.scheduler.additional_prompts"
GRPO = [G, f"{R}.n=4"]
FILTER = "algorithm.filter_groups"
JUDGE = "reward_model.judge.url=http://localhost/v1"
MODEL = ["reward_model.enable=true", "reward_model.model.path=m"]
SERVED = [*MODEL, "reward_model.model_type=generative", "reward_model.rollout.name=vllm"]
BUFFER = "reward_model.overlong_buffer"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.reward_norm.kind=batch", "algorithm.reward_norm.std=group"], "kind is short for both"),
        (["algorithm.reward_norm.kind=batch", "algorithm.reward_scaling.enable=true"], "kind=batch with algorithm"),
        (["algorithm.reward_norm.mean=group", "algorithm.agent_reward_norm.method=mean"], "keep one of them"),
        (["algorithm.agent_reward_norm.method=mean"], f"{R}.n=1: every group is one response"),
        ([f"{BUFFER}.enable=true"], "data.max_response_length=512: must be 1 to"),
        ([f"{BUFFER}.enable=true", f"{BUFFER}.len=513"], f"{BUFFER}.len=513"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", f"{R}.n=64"], "horizon above 13108"),
        (["algorithm.reward_norm.mean=all"], "choose one of batch, group, running"),
        (["algorithm.agent_reward_norm.clip=[3,-1]"], "the lower one first"),
        (["algorithm.agent_reward_norm.method=std"], "one of [identity, mean, mean_std, asym_clip]"),
        ([f"{BUFFER}.truncated=drop"], "one of [penalise, zero, keep]"),
        (["algorithm.reward_clip=-1"], "must be at least 0"),
        (["algorithm.filter_groups.enable=true"], f"{R}.n=1: one response cannot differ"),
        ([*GRPO, f"{FILTER}.enable=true", f"{FILTER}.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
         "use metric=seq_reward"),
        ([*GRPO, f"{FILTER}.enable=true", f"{FILTER}.max_num_gen_batches=3", "data.gen_batch_size=100"],
         "can never fill data.train_batch_size=1024"),
        ([*GRPO, "algorithm.min_group_size=9"], "algorithm.min_group_size=9 with actor_rollout_ref.rollout.n=4"),
        ([*GRPO, "data.train_batch_size=8", f"{ADDITIONAL}.enable=true"],
         f"{ADDITIONAL}.max=16 with data.train_batch_size=8: a prompt could be aborted step after step"),
        ([*GRPO, f"{ADDITIONAL}.enable=true", f"{FILTER}.enable=true", f"{FILTER}.resample=false"],
         f"{ADDITIONAL}.enable=True with algorithm.filter_groups.resample=False"),
        ([*GRPO, f"{ADDITIONAL}.enable=true", f"{FILTER}.enable=true", f"{R}.scheduler.mode=batch"],
         f"{R}.scheduler.mode=batch: a group is chosen as soon as it ends"),
        ([f"{R}.scheduler.mode=static"], "choose one of request, batch"),
        (["algorithm.adv_estimator=gdpo", f"{R}.n=4"], "gdpo_reward_keys=[]: name the rewards"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
         "one weight for each key"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.use_kl_in_reward=true"],
         "the penalty is part of score"),
        (["algorithm.adv_estimator=gigpo", f"{R}.n=4"], "gigpo needs the turns of multi-turn rollout"),
        (["algorithm.adv_estimator=step_reinforce"], f"{R}.multi_turn.enable=False: step_reinforce needs the turns"),
        ([f"{FILTER}.range=[0.9,0.1]"], "the lower one first"),
        ([f"{R}.outcomes.grader_error=retry", f"{R}.scheduler.mode=batch"], "too late to sample one again"),
        ([f"{R}.outcomes.tool_error=mask"], "choose one of drop, retry; its reward is not known"),
        (["reward_model.reward_manager=a.py:A", "reward_model.weights={x: {gsm8k: 1}}"], "gives the whole reward"),
        ([*SERVED, "reward_model.rollout.name=null"], "model_type=generative with reward_model.rollout.name=None"),
        ([*SERVED, JUDGE], "the judge would be two"),
        ([*SERVED, "reward_model.judge.max_tokens=4096"], "rollout.response_length=2048: more than"),
        ([*SERVED, "reward_model.reward_manager=a.py:A"], "a class of your own is not told where the server is"),
        ([*SERVED, "reward_model.rollout.free_cache_engine=true"], "free_cache_engine=True: not available yet"),
        ([*SERVED, "reward_model.rollout.gpu_memory_utilization=0.6"], "are more than 1 together, on the same"),
        ([*SERVED, "reward_model.judge.prompt=a", "reward_model.judge.prompt_file=b"], "leave one out"),
        ([*SERVED, "reward_model.rollout.name=trtllm"], "choose one of vllm, sglang"),
        ([JUDGE, "custom_reward_function.path=a.py"], "path=a.py: the judge would never be asked"),
        ([JUDGE, "reward_model.weights={x: {gsm8k: 1}}"], "'gsm8k': 1}}: the judge would never be asked"),
        ([JUDGE, "reward_model.reward_manager=a.py:A"], "reward_manager=a.py:A: the judge would never be asked"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        compose_with_warnings(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.reward_norm.shift=true"], "algorithm.reward_norm.kind is null"),
        ([f"algorithm.reward_norm.{k}" for k in ("kind=batch", "shift=true", "scale=true")], "shift wins over it"),
        (["algorithm.reward_scaling.center=true"], "centring belongs to scaling"),
        (["algorithm.agent_reward_norm.grouping=batch"], "method is identity"),
        (["algorithm.agent_reward_norm.clip=[-2,2]"], "method is not asym_clip"),
        (["algorithm.reward_clip=0"], "algorithm.reward_clip is 0"),
        (["algorithm.whiten_advantages=true"], "whitens its advantages anyway"),
        (["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3"],
         "reweight_method is not pow"),
        (["reward_model.length_reward.coef=1"], "length_reward.enable is false"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.reward_clip=2"],
         "gdpo_reward_keys leaves out score"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]"], f"{R}.n=1 with algorithm.adv_estimator"),
        (["algorithm.gdpo_reward_keys=[acc]"], "algorithm.adv_estimator does not read it (read by gdpo)"),
        (["algorithm.step_reward_gamma=0.5"], "(read by gigpo, step_reinforce)"),
        ([f"{R}.outcomes.max_retries=3"], "no outcome in actor_rollout_ref.rollout.outcomes is sampled again"),
        ([f"{R}.outcomes.timed_out=retry"], "outcomes.episode_timeout is null"),
        ([f"{R}.outcomes.tool_error=retry"], f"{R}.multi_turn.enable is false"),
        (["algorithm.gigpo.step_weight=2"], "algorithm.adv_estimator does not read it (read by gigpo)"),
        ([f"{FILTER}.metric=acc"], "algorithm.filter_groups.enable is false"),
        (["data.gen_batch_size=8"], "only dynamic sampling draws more than once"),
        ([*GRPO, f"{FILTER}.enable=true", f"{FILTER}.resample=false", "data.gen_batch_size=8"],
         "prompts are drawn once a step"),
        ([*GRPO, f"{FILTER}.enable=true", "reward_model.launch_reward_fn_async=true"],
         "chooses groups by their scores"),
        ([f"{BUFFER}.penalty_factor=1"], "overlong_buffer.enable is false"),
        ([f"{BUFFER}.enable=true", f"{BUFFER}.len=8"], "punishes nothing"),
        (["reward_model.length_reward.enable=true"], "adds nothing"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(overrides: list[str], message: str) -> None:
    _, warnings = compose_with_warnings(overrides)
    assert any(message in warning for warning in warnings), warnings


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.reward_norm.mean=group", "algorithm.reward_norm.std=batch"],
        ["algorithm.reward_scaling.enable=true", "algorithm.reward_scaling.center=true"],
        ["algorithm.agent_reward_norm.method=asym_clip", "algorithm.agent_reward_norm.clip=[-1,2]"],
        [f"{FILTER}.enable=true", f"{FILTER}.metric=acc", "data.gen_batch_size=2048", f"{FILTER}.range=[0.1,0.9]"],
        ["algorithm.whiten_advantages=true", "algorithm.advantage_clip=5"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        [f"{BUFFER}.enable=true", f"{BUFFER}.len=128", f"{BUFFER}.truncated=zero"],
        [f"{BUFFER}.enable=true", f"{BUFFER}.len=128", f"{BUFFER}.penalty_factor=1", f"{BUFFER}.log=true"],
        ["reward_model.reward_kwargs.overlong_buffer_cfg.enable=true", f"{BUFFER}.len=8", f"{BUFFER}.penalty_factor=1"],
    ],
)
def test_what_works_passes_in_silence(overrides: list[str]) -> None:
    _, warnings = compose_with_warnings([*GRPO, *overrides])
    assert [w for w in warnings if "nothing" in w or "has no effect" in w] == []


def test_the_plan_knows_the_draws() -> None:
    dynamic = [*GRPO, f"{FILTER}.enable=true", "data.gen_batch_size=96", "data.train_batch_size=32"]
    mini = ["actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    config, _ = compose_with_warnings([*dynamic, *mini])
    plan = BatchPlan.build(config, 1, 100)
    assert plan.prompts_per_draw == 96
    assert "up to 96 prompts at once, until 32 groups fill the batch" in plan.table()
    with pytest.raises(ValueError, match=r"data\.gen_batch_size=96: there are only 90 training prompts"):
        BatchPlan.build(config, 1, 90)
    masked, _ = compose_with_warnings([*dynamic, *mini, f"{FILTER}.resample=false"])
    assert BatchPlan.build(masked, 1, 90).prompts_per_draw == 32
    assert "prompts in flight" not in BatchPlan.build(masked, 1, 90).table()
    more, _ = compose_with_warnings([*GRPO, *mini, "data.train_batch_size=32", f"{ADDITIONAL}.enable=true"])
    plan = BatchPlan.build(more, 1, 90)
    assert plan.prompts_per_draw == 48 and "up to 48 prompts at once" in plan.table()
    with pytest.raises(ValueError, match=r"additional_prompts\.max=16 beside 32 prompts: there are only 40 training"):
        BatchPlan.build(more, 1, 40)
    more.data.gen_batch_size = 300  # of no dynamic sampling
    assert BatchPlan.build(more, 1, 90).prompts_per_draw == 48


def test_a_judge_among_the_parts_goes_with_a_custom_function() -> None:
    weights = "reward_model.weights={x: {custom: 1, judge: 0.5}}"
    compose_with_warnings([JUDGE, "custom_reward_function.path=a.py", weights])


def test_a_reward_model_alone_leaves_graders_without_work() -> None:
    model = ["reward_model.enable=true", "reward_model.model.path=x"]
    keys = ["reward_model.weights={x: {gsm8k: 1}}", "data.self_check_rows=8"]
    warnings = str(compose_with_warnings([*model, *keys])[1])
    assert "data.self_check_rows" in warnings and "reward_model.weights" in warnings
    assert "data.self_check_rows" not in str(compose_with_warnings([*model, *keys, "reward_model.rule_weight=1"])[1])


@pytest.mark.parametrize(
    ("overrides", "hosted"),
    [
        ([*MODEL, "reward_model.rollout.name=vllm"], "plan"),  # verl: without a function it is a classifier
        ([*MODEL, "reward_model.rollout.name=vllm", "custom_reward_function.path=a.py"], "server"),
        (SERVED, "server"),
        ([*SERVED, "reward_model.enable=false"], ""),
    ],
)
def test_which_reward_models_are_served(overrides: list[str], hosted: str) -> None:
    config, warnings = compose_with_warnings(overrides)
    assert ("reward" in hosted_roles(config)) is bool(hosted)
    assert ("reward" in roles_of(config)) is (hosted == "plan")
    idle = [line for line in warnings if "reward_model.rollout.name has no effect" in line]
    assert bool(idle) is (hosted != "server")


def test_a_served_model_leaves_the_classifiers_keys_idle() -> None:
    _, warnings = compose_with_warnings([*SERVED, "reward_model.micro_batch_size_per_gpu=3"])
    assert any("micro_batch_size_per_gpu has no effect" in line and "writes text" in line for line in warnings)
