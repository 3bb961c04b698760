"""Sends tasks to instances (first attempts and retries), and resumes paused ones."""

import math

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import Attempt, AttemptOwner, AttemptsInFlight
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.resume import remaining_request
from orchestrator.dispatch.retry import Retrier
from orchestrator.dispatch.time_limits import TimeLimits
from orchestrator.instances.concurrency import InFlightJob
from orchestrator.instances.registry import Registry
from orchestrator.placement.placer import Choice
from orchestrator.prediction.prediction import Prediction
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import Stage
from protocol import OnDeadline


class Launcher:
    """Creates attempts and adds them to those in flight."""

    def __init__(
        self,
        registry: Registry,
        in_flight: AttemptsInFlight,
        pausing: Pausing,
        prediction: Prediction,
        retrier: Retrier,
        limits: TimeLimits,
        clock: Clock,
    ) -> None:
        self.in_flight = in_flight
        self.pausing = pausing
        self.limits = limits
        self._registry = registry
        self._prediction = prediction
        self.retrier = retrier
        self._clock = clock

    def start(self, owner: AttemptOwner, task: Task, choice: Choice) -> None:
        now = self._clock.now()
        if task.paused_on:
            self.pausing.resume(task, now)
            return
        task.stage = Stage.DISPATCHED
        task.instance = choice.name
        task.time_spent.sent(now)
        task.likely_cached = choice.cached_tokens
        if not task.completion_tokens:
            forecaster = self._prediction.forecaster
            instance = self._registry.instances[choice.name]
            forecaster.fit(task, self.limits.budget_ms(task, instance, now))
            self.retrier.keep_transcript(task, choice.name)
            task.marks.dispatched = now
            if task.given_chance is None:
                task.given_chance = forecaster.urgency(task, now).chance
        task.attempt = self._send(owner, task, choice, now)

    def _send(self, owner: AttemptOwner, task: Task, choice: Choice, now: float) -> Attempt:
        parts = task.parts
        first_due_s = parts.due_at(task.completion_tokens + 1, task.marks.first_token) - now
        instance = self._registry.instances[choice.name]
        lane, load = instance.best_lane(), instance.load
        job = self._in_flight_job(task, choice)
        attempt = Attempt(owner, task, lane, instance.concurrency, job, self._clock)
        token_ids, sampling = remaining_request(task)
        if instance.step_learner is not None:
            model = instance.step_learner.model
            attempt.basis = (model, instance.occupancy)
            prompts = job.new_tokens + instance.concurrency.outstanding_work(load).prefill_tokens
            task.prompt_ready_at = now + prompts * model.prompt_token_ms / 1000
        attempt.handle = lane.submit(
            attempt,
            token_ids=token_ids,
            sampling=sampling,
            budget_ms=self.limits.budget_ms(task, instance, now),
            deadline_unix_ms=task.deadline.unix_ms,
            # A ``fit`` answer that reaches its deadline ends cleanly with its text so far.
            on_deadline=OnDeadline.PARTIAL
            if task.job.on_deadline is OnDeadline.FIT
            else task.job.on_deadline,
            correlation_id=task.correlation_id,
            cache_salt=task.cache_salt,
            # With the tenant's name: tenants may use equal session ids.
            session=f"{task.tenant}/{task.job.session_id}" if task.job.session_id else "",
            session_keep_ms=1000 * task.job.idle_keep_s,
            # Later calls of its run share the same time.
            share_ms=task.share_ms(now) if task.calls_left else None,
            # A first token that is already late is no longer urgent.
            first_token_budget_ms=1000 * first_due_s if 0 < first_due_s < math.inf else None,
            token_gap_ms=1000 * parts.token_gap_s if parts.token_gap_s < math.inf else None,
            keeps_on=self._prediction.feasibility.stats.runs_on(task),
            grammar=task.job.grammar,
            begun_tokens=len(token_ids) - task.prompt_tokens,
            stop_after_tokens=task.sampling.min_tokens if task.completion_tokens else 0,
            # Token ids are only valid for this model's tokenizer.
            serving=0 if instance.card is None else instance.card.serving,
            expected_tokens=self._prediction.forecaster.most_tokens_left(task),
            images=[image.data for image in task.images],
            adapter="" if task.adapter is None else task.adapter.name,
        )
        # A job counts as in flight only after it was sent.
        attempt.breaker_token = self._registry.breakers.begin(choice.name)
        instance.concurrency.add(job, load)
        self.in_flight.add(attempt)
        return attempt

    def _in_flight_job(self, task: Task, choice: Choice) -> InFlightJob:
        """A task in the form that the instance's concurrency limit counts."""
        made = task.completion_tokens
        new = task.prompt_tokens - choice.cached_tokens + made
        most = new + task.sampling.max_tokens - made
        return InFlightJob(
            new_tokens=new,
            output_tokens=max(1, self._prediction.forecaster.usual_tokens(task) - made),
            blocks=-(-most // task.block_tokens) if task.block_tokens else 0,
            is_computing_prompt=not task.marks.first_token,
            is_batch=task.priority is Priority.BATCH,
        )
