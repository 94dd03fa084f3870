"""Rules of `actor_rollout_ref.rollout.*` and `env.*`: sampling, engines, conversations, outcomes."""

from verl_like.config.engines import SERVERS
from verl_like.config.outcomes import LOST
from verl_like.config.placement import POOL_KEYS, is_apart, pools_by, samples_alone
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ROLLOUT
from verl_like.config.rollout import runs_programs
from verl_like.config.rule import Findings, idle, rule
from verl_like.config.rules.groups import SCORED_BY, scored_together
from verl_like.config.schema import get_value

_ROLLOUT, _TURNS = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.multi_turn"
_NAME, _TAGS, _DRAFTS = f"{_ROLLOUT}.name", "env.train.tags", f"{_ROLLOUT}.engine_kwargs.vllm"
_GUESSES = f"{_ROLLOUT}.speculative.method"
_PROGRAMS = (f"{_ROLLOUT}.gateway.path", f"{_ROLLOUT}.gateway.command")
LOOP_KEYS = (f"{_ROLLOUT}.agent.agent_loop_config_path", f"{_TURNS}.completion_callback")
TURN_KEYS = (f"{_TURNS}.enable", *LOOP_KEYS, *_PROGRAMS, _TAGS)
_COUNTING = tuple(f"{_ROLLOUT}.{name}" for name in ("presence_penalty", "frequency_penalty", "bad_words", "stop"))
_OF_TOKENS = tuple(
    f"{_ROLLOUT}.{section}{name}"
    for name in ("stop_token_ids", "bad_words", "ignore_eos")
    for section in ("", "val_kwargs.")
)


def turns_by(config: PPOConfig, *names: str) -> list[str]:
    """Keys, among these or (none given) all, by which an episode may have several turns."""
    return [key for key in names or TURN_KEYS if get_value(config, key) not in (None, False, [])]


@rule(f"{_ROLLOUT}.do_sample", "n")
def responses_of_a_group_differ(config: PPOConfig) -> Findings:
    """Several responses to a prompt are sampled, not greedy."""
    if not config.actor_rollout_ref.rollout.do_sample and config.actor_rollout_ref.rollout.n > 1:
        return "all responses would be equal; set do_sample=true or n=1"


@rule(f"{_ROLLOUT}.tensor_model_parallel_size", "name")
def tensor_parallel_engine(config: PPOConfig) -> Findings:
    """Tensor parallelism is the engine's to have."""
    rollout = config.actor_rollout_ref.rollout
    if not rollout.engine.tensor_parallel and rollout.tensor_model_parallel_size > 1:
        return f"the {rollout.name} engine has no tensor parallelism; set it to 1 or use name=vllm"


@rule(_NAME, "trainer.val_before_train", "trainer.val_only", "trainer.test_freq")
def recorded_steps_answer_nothing(config: PPOConfig) -> Findings:
    """Recorded steps answer no validation."""
    trainer, recorded = config.trainer, config.actor_rollout_ref.rollout.engine.recorded
    recorded = recorded and trainer.objective == "rl"
    if recorded and (trainer.val_before_train or trainer.val_only or trainer.test_freq != -1):
        return (_NAME,), "nothing answers a validation; set trainer.val_before_train=False trainer.test_freq=-1"


@rule(_NAME, *POOL_KEYS)
def recorded_steps_have_no_pool(config: PPOConfig) -> Findings:
    """Recorded steps have no engine that could be in a pool of its own."""
    if config.actor_rollout_ref.rollout.engine.recorded and is_apart(config, ROLLOUT):
        return (_NAME, *pools_by(config)), "there is no engine to be in a pool of its own; leave the others out"


@rule(f"{_ROLLOUT}.use_fire_sampling", *_COUNTING, _NAME)
def fire_counts_its_first_token(config: PPOConfig) -> Findings:
    """FIRE's first token is a request of its own on vLLM: penalties, bad words and stops do not see it."""
    rollout, given = config.actor_rollout_ref.rollout, [key for key in _COUNTING if get_value(config, key)]
    if rollout.use_fire_sampling and rollout.engine.first_apart and given:
        why = "there the first token is a request of its own, which the rest would not count"
        return (f"{_ROLLOUT}.use_fire_sampling", *given, _NAME), f"{why}; leave one out, or use name=hf or sglang"


@rule(_GUESSES, _NAME, _DRAFTS, "trainer.parity", "trainer.objective")
def engine_takes_guesses(config: PPOConfig) -> Findings:
    """Guesses ahead need an engine that takes them, and to check several tokens at a time has sums of its own."""
    rollout, method = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.speculative.method
    if method == "none" or rollout.engine.recorded:
        return
    if not rollout.engine.guesses:
        yield (_GUESSES, _NAME), "this engine takes no guesses; use name=hf or vllm"
        return
    if "speculative_config" in rollout.engine_kwargs.vllm:
        yield (_GUESSES, f"{_DRAFTS}.speculative_config"), "both say how tokens are guessed; leave one out"
    if config.trainer.parity == "exact":
        why = "a pass over several tokens adds up in another order than over one"
        yield (_GUESSES, "trainer.parity"), f"{why}; use method=none"
    if config.trainer.objective == "serve":
        why = "what is guessed follows from all requests, and rounds what others compute"
        yield (_GUESSES, "trainer.objective"), f"{why}; use method=none"


@rule(_DRAFTS, f"{_ROLLOUT}.min_p", f"{_ROLLOUT}.val_kwargs.min_p", reads=(_GUESSES,))
def drafts_follow_the_policy(config: PPOConfig) -> Findings:
    """Speculative decoding is by n-grams (weights of a draft model would not follow), exact, and without min_p."""
    rollout, key = config.actor_rollout_ref.rollout, f"{_DRAFTS}.speculative_config"
    drafts, ours = rollout.own_drafts, rollout.speculative.method != "none"
    key = _GUESSES if ours else key
    if drafts is None:
        return
    if not ours and (not isinstance(drafts, dict) or drafts.get("method") != "ngram"):
        fix = "use {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}, or leave it out"
        yield (key,), f"the weights of a draft model would not follow the policy's; {fix}"
        return
    if drafts.get("rejection_sample_method") == "synthetic":
        why = "it accepts at a rate of its own, and so does not sample from the policy"
        yield (f"{key}.rejection_sample_method",), f"{why}; leave it out"
    for name in (f"{_ROLLOUT}.min_p", f"{_ROLLOUT}.val_kwargs.min_p"):
        if get_value(config, name):
            yield (name, key), "vLLM refuses such requests; leave one out"


@rule(f"{_ROLLOUT}.enable_rollout_routing_replay", "name", _DRAFTS, reads=(_GUESSES,))
def engine_records_routes(config: PPOConfig) -> Findings:
    """The engine records the experts of each token, of tokens that it keeps."""
    rollout, key = config.actor_rollout_ref.rollout, f"{_ROLLOUT}.enable_rollout_routing_replay"
    if not rollout.enable_rollout_routing_replay:
        return
    if not rollout.engine.records_routes:
        yield (key, _NAME), "this engine records none; use name=vllm or hf, or router_replay.mode=R2, which needs none"
    ours = rollout.speculative.method != "none"
    if ours or rollout.own_drafts is not None:
        why = "tokens that are guessed wrong have routes as well"
        yield (key, _GUESSES if ours else _DRAFTS), f"{why}; leave one out"


@rule(f"{_ROLLOUT}.prompt_length", "response_length", "data.max_prompt_length", "data.max_response_length")
def one_length(config: PPOConfig) -> Findings:
    """A length in rollout.* is that of data.*"""
    for ours, source in ((f"{_ROLLOUT}.{name}", f"data.max_{name}") for name in ("prompt_length", "response_length")):
        if get_value(config, ours) != get_value(config, source):
            fix = f"set {source} only, and leave {ours} out (a saved config.yaml holds it)"
            yield (ours, source), f"one length has two values; {fix}"


@rule(f"{_ROLLOUT}.max_num_batched_tokens", "enable_chunked_prefill", reads=("name", "prompt_length"))
def whole_prompts_fit(config: PPOConfig) -> Findings:
    """A step of vLLM holds a whole sequence, unless prompts are cut."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest and rollout.engine.whole_prompts:
        return f"must be at least max_model_len ({longest})"


@rule(f"{_TURNS}.enable", "tool_config_path", "function_tool_path", "environment_path", "interaction_config_path")
def conversations_have_a_partner(config: PPOConfig) -> Findings:
    """A conversation needs tools, an environment or a simulated user."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    tools = turns.tool_config_path or turns.function_tool_path or turns.environment_path
    if turns.enable and not (tools or turns.interaction_config_path):
        return "there is nothing that the model could call, and nobody who answers it: set one of them, or enable=false"


@rule(f"{_TURNS}.enable", _TAGS, "data.chat_template")
def conversations_have_a_template(config: PPOConfig) -> Findings:
    """A conversation needs a chat template."""
    for key in turns_by(config, f"{_TURNS}.enable", _TAGS) if config.data.chat_template == "none" else ():
        yield (key, "data.chat_template"), "a conversation needs a chat template; use native, or one of your own"


@rule(f"{_ROLLOUT}.agent.default_agent_loop", "agent_loop_config_path", f"{_TURNS}.enable")
def known_agent_loop(config: PPOConfig) -> Findings:
    """The default agent loop is built in, or listed in a file of agent loops; tool_agent needs conversations."""
    agent, loop = config.actor_rollout_ref.rollout.agent, f"{_ROLLOUT}.agent.default_agent_loop"
    if agent.agent_loop_config_path is not None:
        return
    if agent.default_agent_loop not in ("single_turn_agent", "tool_agent"):
        fix = "choose single_turn_agent or tool_agent, or list it in a file of agent loops"
        yield (loop, "agent_loop_config_path"), fix
    if agent.default_agent_loop == "tool_agent" and not config.actor_rollout_ref.rollout.multi_turn.enable:
        yield (loop, f"{_TURNS}.enable"), "there are no turns in which tools could be called; set enable=True"


@rule(*_PROGRAMS, *TURN_KEYS[:3], _TAGS)
def one_kind_of_episode(config: PPOConfig) -> Findings:
    """An episode is one program, or a conversation of the trainer's, or one with an environment."""
    programs, loops, tags = (turns_by(config, *keys) for keys in (_PROGRAMS, TURN_KEYS[:3], (_TAGS,)))
    if programs and (loops or tags):
        return (*programs, *loops, *tags), "a program is the whole episode; choose one of them"
    if len(programs) > 1:
        return programs, "one program is the episode; remove one"
    if loops and tags:
        return (*tags, *loops), "an environment answers every message itself; choose one of them"


@rule(_TAGS, "trainer.total_training_steps", reads=_PROGRAMS)
def environments_have_an_end(config: PPOConfig) -> Findings:
    """A run with environments is told its length."""
    if config.env.train.tags and config.trainer.total_training_steps is None and not turns_by(config, *_PROGRAMS):
        return "environments have no last row; set trainer.total_training_steps"


_MERGE = "actor_rollout_ref.model.lora.merge"


@rule(f"{_ROLLOUT}.sleep_level", "free_cache_engine", "quantization", _MERGE, "trainer.placement")
def weights_come_back(config: PPOConfig) -> Findings:
    """With sleep_level=2 a sync brings all weights back, to processes that have them, as they were."""
    policy, key, otherwise = config.actor_rollout_ref, f"{_ROLLOUT}.sleep_level", ", or sleep_level=1"
    if policy.rollout.sleep_level == 1:
        return
    if not policy.rollout.free_cache_engine:
        yield (key, "free_cache_engine"), f"the engine does not sleep; set it to True{otherwise}"
    if policy.rollout.quantization is not None:
        why = "what the engine has quantised stays where it is"
        yield (key, "quantization"), f"{why}; set quantization=null{otherwise}"
    if policy.model.lora_rank > 0 and not policy.model.lora.merge:
        yield (key, _MERGE), f"a sync brings adapters alone; set it to True{otherwise}"
    if is_apart(config, ROLLOUT) and not samples_alone(config):
        why = "the rollout engine is beside other models than the actor, and nobody there has the weights"
        yield (key, "trainer.placement"), f"{why}; give the engine a pool of its own{otherwise}"


@rule(_NAME, f"{_ROLLOUT}.openai.url", *TURN_KEYS, "env.val.tags", *_OF_TOKENS)
def endpoint_answers_prompts(config: PPOConfig) -> Findings:
    """The endpoint of rollout.name=openai has an address, answers single prompts, and has tokens of its own."""
    if not config.actor_rollout_ref.rollout.engine.endpoint:
        return
    if config.actor_rollout_ref.rollout.openai.url is None:
        yield (_NAME, f"{_ROLLOUT}.openai.url"), "set it, as in http://host:8000/v1"
    if turns := turns_by(config, *TURN_KEYS, "env.val.tags"):
        yield (_NAME, *turns), "the endpoint answers single prompts; leave the others out"
    if given := [key for key in _OF_TOKENS if get_value(config, key)]:
        yield (_NAME, *given), "the endpoint's tokens are its own; leave the others out (stop takes texts)"


@rule(f"{_ROLLOUT}.outcomes.grader_error", "reward_model.failure_penalty", reads=SCORED_BY)
def failed_grades_in_time(config: PPOConfig) -> Findings:
    """Episodes that cannot be graded are sampled again where each is graded by itself, and no penalty scores them."""
    if config.actor_rollout_ref.rollout.outcomes.grader_error != "retry":
        return
    if config.reward_model.failure_penalty is not None:
        yield "an answer that cannot be graded has the penalty, or another one is sampled; leave one of them out"
    elif together := scored_together(config):
        why = "scores are there when all episodes have ended, too late to sample one again"
        yield (f"{_ROLLOUT}.outcomes.grader_error", together), f"{why}; set grader_error=drop, or change that"


idle(
    f"{_ROLLOUT}.outcomes.max_retries",
    when=lambda c: all(get_value(c, f"{_ROLLOUT}.outcomes.{name}") != "retry" for name in LOST),
    why=f"no outcome in {_ROLLOUT}.outcomes is sampled again (retry)",
)
idle(
    *(f"{_ROLLOUT}.outcomes.tool_error", "environment_error", f"{_TURNS}.", f"{_ROLLOUT}.agent.num_workers"),
    when=lambda c: not turns_by(c),
    why=f"{_TURNS}.enable is false",
)
idle(
    *(f"{_ROLLOUT}.gateway.host", "port"),
    when=lambda c: not runs_programs(c.actor_rollout_ref.rollout),
    why=f"neither {_PROGRAMS[0]} nor {_PROGRAMS[1]} is set",
)
idle(
    *(f"{_ROLLOUT}.gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "enable_chunked_prefill"),
    *("enable_prefix_caching", "disable_log_stats"),
    when=lambda c: not (kind := c.actor_rollout_ref.rollout.engine).keeps_cache or kind.endpoint,
    why=f"{_ROLLOUT}.name is hf or openai",
)
for engine in SERVERS:
    idle(f"{_ROLLOUT}.engine_kwargs.{engine}", when=f"{_ROLLOUT}.name is not {engine}")
idle(
    *(f"{_ROLLOUT}.gpu_memory_utilization", "cudagraph_capture_sizes"),
    when=lambda c: c.trainer.device == "cpu" and c.actor_rollout_ref.rollout.engine.leaves_device,
    why="trainer.device is cpu",
)
idle(
    f"{_ROLLOUT}.skip_dump_dir",
    when=lambda c: not c.actor_rollout_ref.rollout.skip_rollout and not c.actor_rollout_ref.rollout.engine.recorded,
    why=f"{_ROLLOUT}.skip_rollout is false",
)
idle(
    *("data.train_files", "val_files", "shuffle", "seed", "prompt_key", "train_max_samples", "val_max_samples"),
    *("filter_overlong_prompts", "truncation", "domain_weights", "data.custom_cls.", "custom_reward_function.path"),
    *("reward_model.rule", "trainer.total_epochs"),
    when="env.train.tags is not empty: they play environments, which score themselves",
)
idle(
    *("actor_rollout_ref.rollout.", "actor_rollout_ref.ref.", "algorithm.", "critic.", "reward_model."),
    *("custom_reward_function.", "env.", "data.ground_truth_key", "data.max_prompt_length", "data.max_response_length"),
    *("distillation.", "actor_rollout_ref.actor.policy_loss."),
    *(f"actor_rollout_ref.actor.{name}" for name in ("use_kl_loss", "entropy_coeff", "sft_loss_coef", "rl_loss_coef")),
    when=lambda c: c.trainer.objective in ("sft", "preference"),
    why="trainer.objective is not rl: the answers are in the data, nothing is sampled or judged",
)
idle(
    "data.filter_overlong_prompts_workers",
    when=lambda c: c.trainer.objective == "rl" and not c.data.filter_overlong_prompts,
    why="data.filter_overlong_prompts is false",
)
idle(
    "env.val.max_traj_per_env",
    when=lambda c: c.env.train.tags,
    why="each start of a validation is played val_kwargs.n times",
)
