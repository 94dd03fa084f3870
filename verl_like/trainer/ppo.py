"""Training step: one class for PPO, GRPO and whatever else differs only in its seams; `fit` around it is loop.py's.

Variants enter at four places: where batches come from (`source`), how credit is given (`make_experience`), what is
minimised (the objectives in the workers), and where weights go (`sync_weights`). Phases are timed under verl's names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.mismatch import finish as finish_mismatch
from verl_like.algorithms.reward_shaping import shape_rewards
from verl_like.batch import Evaluated, Experience, Rollouts, Scores, whole_episodes
from verl_like.config import ActorConfig, CriticConfig
from verl_like.config.actor import ReplayMode
from verl_like.config.trainer import Parity
from verl_like.episodes.collector import Collector
from verl_like.registry import part
from verl_like.rewards.manager import RewardManager
from verl_like.trainer.loop import Loop, prefixed
from verl_like.trainer.recording import Recorder
from verl_like.trainer.roles import ReferenceHandle, Teachers, UpdateRules
from verl_like.trainer.route_check import check_routes
from verl_like.trainer.start_messages import start_phase
from verl_like.trainer.validation import Validator
from verl_like.trainer.weights import Weights

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PPOTrainer(Loop):
    """Trainer: everything `fit` talks to. Built by `trainer.build`; tests may build it from parts of their own."""

    source: Collector
    reference: ReferenceHandle | None
    teachers: Teachers | None = None
    weights: Weights
    rewards: RewardManager
    validator: Validator
    recorder: Recorder | None = None
    parity_cost: float | None = None  # of a pass, beside one by torch's usual kernels; None: trainer.parity=off
    on_scores: Callable[[Rollouts, Scores], None] = lambda rollouts, scores: None  # a curriculum learns from them

    def start(self) -> None:
        """Load the checkpoint, if there is one; sync weights to the rollout engine; validate before training."""
        self.checkpoints.restore(self)
        self.first_step = self.state.step
        with start_phase("first weight sync and its proof"):
            self.sync_weights()
        policy = self.config.actor_rollout_ref
        if policy.actor.router_replay.mode == ReplayMode.R3 and not policy.rollout.engine.recorded:
            with start_phase("check of the rollout engine's routes"):
                check_routes(self.config, self.source, self.actor)
        if self.config.trainer.parity == Parity.exact:
            with start_phase("proof that trainer and rollout engine are the same"):
                self.parity_cost = part("proof", "parity")(self.config, self.source, self.actor)
        self.on_start()
        self.validate_before_training()

    def step(self) -> dict[str, float]:
        """Generate -> score -> evaluate -> credit -> update -> sync. Data only moves downwards.

        Returns the step's metrics.
        """
        with self.checkpoints.saved_on_error(self):
            step, clock = self.begin_step()
            with self.profiled(step), clock("step"):
                with clock("gen"):
                    rollouts, grading = self.source.next_batch(step)
                if not self.config.reward_model.launch_reward_fn_async:
                    with clock("reward"):
                        grading.wait()
                evaluated = self.evaluate(rollouts)
                with clock("reward"):
                    scores = grading.result()
                episodes, graded = whole_episodes(rollouts, scores)
                self.on_scores(episodes, graded)
                with clock("adv"):
                    experience, metrics = self.make_experience(rollouts, scores, evaluated)
                metrics |= self.source.metrics() | self.rewards.metrics(graded, episodes.rows)
                self.keep_samples(step, rollouts, scores, evaluated, experience)
                self.checkpoints.update_begins()
                if self.critic is not None:
                    with clock("update_critic"):
                        metrics |= self.update_critic(experience, step)
                actor_updates = step > self.config.trainer.critic_warmup
                if actor_updates:
                    with clock("update_actor"):
                        metrics |= self.update_actor(experience, step)
                metrics |= self.check_parity(metrics, step)
                self.state = self.state.advance(metrics, num_sequences=len(episodes), actor_updated=actor_updates)
                self.checkpoints.step_ended(self)
                self.unreported = partial(self.report.step, step, rollouts, scores, metrics, clock)
                self.save_if_due()
                with clock("update_weights"):
                    metrics |= self.sync_weights()
                metrics |= self.validate_if_due()
            return self.end_step()

    def evaluate(self, rollouts: Rollouts) -> Evaluated:
        """Run the forward passes that this run's configuration needs, and no others."""
        old = reference = values = None
        if self.plan.old_log_probs == "recompute":
            with self.clock("old_log_prob"):
                old = self.actor.log_probs(rollouts)
        if self.plan.reference_outputs and self.reference is not None:
            with self.clock("ref"):
                reference = self.reference.log_probs(rollouts)
        if self.critic is not None:
            with self.clock("values"):
                values = self.critic.values(rollouts)
        taught = None
        if self.teachers is not None:
            with self.clock("teacher"):
                taught = self.teachers.evaluate(rollouts)
        old_log_probs = old.old_log_probs_T if old else None
        if self.plan.old_log_probs == "rollout":
            old_log_probs = rollouts.rollout_log_probs_T
        return Evaluated(
            response_length_B=rollouts.response_length_B,
            old_log_probs_T=old_log_probs,
            entropy_T=old.entropy_T if old else None,
            sum_pi_squared_T=old.sum_pi_squared_T if old else None,
            routes_T=old.routes_T if old else None,
            routed_length_B=old.routed_length_B if old else None,
            ref_log_probs_T=reference.ref_log_probs_T if reference else None,
            full_kl_T=reference.full_kl_T if reference else None,
            values_T=values.values_T if values else None,
            teacher_B=taught.teacher_B if taught else None,
            teacher_log_probs_T=taught.teacher_log_probs_T if taught else None,
            teacher_ids_T=taught.teacher_ids_T if taught else None,
        )

    def make_experience(
        self, rollouts: Rollouts, scores: Scores, evaluated: Evaluated
    ) -> tuple[Experience, dict[str, float]]:
        """Compute rewards and advantages: pure, on the driver, where the whole batch is."""
        config, moments = self.config, self.state.reward_moments
        longest = config.data.max_response_length
        shaped = shape_rewards(config.algorithm, config.reward_model, rollouts, scores, moments, longest)
        self.state = self.state.with_reward_moments(shaped.moments)
        experience, metrics = make_experience(
            config.algorithm,
            config.actor_rollout_ref.actor,
            rollouts,
            scores,
            evaluated,
            kl_coef=self.state.kl_coef,
            reward_B=shaped.reward_B,
            seed=config.trainer.seed + self.state.step,
        )
        return experience, shaped.metrics | metrics

    def keep_samples(
        self, step: int, rollouts: Rollouts, scores: Scores, evaluated: Evaluated, experience: Experience
    ) -> None:
        """Write a few responses for people (trainer.sample_freq), with what the model says of them before the update.

        The whole step is written for `verl-like replay` (trainer.record_freq).
        """
        if self.recorder is not None:
            stages = {"rollouts": rollouts, "scores": scores, "evaluated": evaluated, "experience": experience}
            facts = {"step": step, "seed": self.config.trainer.seed, "kl_coef": self.state.kl_coef}
            self.recorder.keep(step, stages, facts)
        rows = self.report.rows_to_keep(step, rollouts, scores)
        if not rows:
            return
        with self.clock("samples"):
            kept, known = rollouts.select(list(rows)), evaluated.select(list(rows))
            if self.plan.old_log_probs != "recompute" and self.config.trainer.sample_freq > 0:
                own = self.actor.log_probs(kept)
                known = known.replace(old_log_probs_T=own.old_log_probs_T, entropy_T=own.entropy_T)
            self.report.keep(step, kept, scores.select(list(rows)), known, experience, list(rows.values()))

    def update_actor(self, experience: Experience, step: int) -> dict[str, float]:
        """Take all of this step's optimizer steps of the actor."""
        rules = self.update_rules(self.config.actor_rollout_ref.actor)
        return finish_mismatch(prefixed("actor", self.actor.update(experience, rules, step)))

    def check_parity(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Metrics of trainer.parity=exact, by those of the step. Raises RuntimeError for log-probs that differ."""
        if self.parity_cost is None:
            return {}
        gap = metrics.get("rollout_corr/log_prob_gap_max", 0.0)  # without it the actor was not trained
        if gap != 0.0:
            raise RuntimeError(
                f"trainer.parity=exact: in step {step} the trainer's log-probs differ from the rollout engine's by up "
                f"to {gap:.3g} nats; set trainer.parity=off, and please report model and machine"
            )
        return {"parity/pass_cost": self.parity_cost}

    def update_critic(self, experience: Experience, step: int) -> dict[str, float]:
        """Take all of this step's optimizer steps of the critic."""
        assert self.critic is not None
        rules = self.update_rules(self.config.critic)
        return prefixed("critic", self.critic.update(experience, rules, step))

    def update_rules(self, role: ActorConfig | CriticConfig) -> UpdateRules:
        """Rules by which actor or critic walks over the experience."""
        return UpdateRules(
            prompts_per_mini_batch=role.ppo_mini_batch_size,
            epochs=role.ppo_epochs,
            shuffle=role.shuffle,
            seed=self.config.trainer.seed,
            max_response_length=self.config.data.max_response_length,
            actor=role if isinstance(role, ActorConfig) else None,
            distillation=self.config.distillation,
        )

    def sync_weights(self) -> dict[str, float]:
        """Sync trained weights to the rollout engine, proved; a failed proof raises and stops the run."""
        sync = self.weights.sync(self.state.weight_version)
        self.source.weights_changed(self.state.weight_version)
        if sync is None:
            return {}
        metrics = {"weight_sync/seconds": sync.seconds, "weight_sync/num_tensors": float(sync.num_tensors)}
        if sync.num_changed is not None:
            metrics["weight_sync/num_changed"] = float(sync.num_changed)
        if sync.probe_gap is not None and sync.probe_gap_mean is not None:
            metrics |= {"weight_sync/probe_gap": sync.probe_gap, "weight_sync/probe_gap_mean": sync.probe_gap_mean}
        return metrics

    def validate(self) -> dict[str, float]:
        """Compute metrics of the whole validation set under the weights that the rollout engine holds."""
        with self.clock("testing"):
            return self.validator.run(self.source, self.state.step)
