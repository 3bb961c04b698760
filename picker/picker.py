"""Picks pods for requests, and learns from their answers."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.placement.choose import Affinity
from orchestrator.prediction.answer_length import LONGEST, STATED, AnswerLengths, LengthKey
from orchestrator.prediction.feasibility import AdmissionMode
from orchestrator.prediction.forecast import at_share
from orchestrator.prediction.forecaster import USUAL
from orchestrator.prediction.urgency import Due
from orchestrator.settings import Settings
from orchestrator.telemetry.log import fields, service_log
from picker.asked import Asking
from picker.choice import Needs, Outlook, nobody, rank, require_feasible
from picker.pod import AnswerEnd, Flight, Pod
from picker.pods import Pods
from picker.section import PickerSection

FIRST_CHARS_PER_TOKEN = 4.0
"""Initial characters per prompt token, until answers show it: typical for English."""
_SMOOTHING = 0.05
_MIN_CHARS = 200
"""Minimum prompt length in characters for that ratio, because a chat template adds tokens."""
_MAX_MODELS = 1024


@dataclass(slots=True, eq=False)
class Picked:
    """The pods picked for one request, the first choice first."""

    endpoints: tuple[str, ...]
    pod: Pod
    """The pod that has the request, as far as is known."""
    flight: Flight | None = None
    """What the request counts for there; None for one that no model answers."""
    key: LengthKey | None = None
    prompt_chars: int = 0


class EndpointPicker:
    """Picks among ``pods`` for requests. All times are on ``clock``."""

    def __init__(self, settings: Settings, pods: Pods, clock: Clock) -> None:
        self.settings = settings
        self.section = settings.section(PickerSection)
        self.pods = pods
        self.clock = clock
        self.held_bytes = 0
        """Total bytes of held bodies of all requests."""
        self._lengths = AnswerLengths()
        self._affinity = Affinity()
        self._chars_per_token: defaultdict[str, float] = defaultdict(lambda: FIRST_CHARS_PER_TOKEN)

    def pick(self, asked: Asking, subset: Collection[str] | None = None) -> Picked:
        """Choose pods, only from ``subset`` if it is not None, and count the request as routed.

        Raises ``DeadlineExceeded``, ``DeadlineInfeasible`` and ``NotReady``.
        """
        now, admission = self.clock.now(), self.settings.admission
        if asked.generates:
            asked.deadline.require(admission.floor_ms, now)
            asked.parts.require(admission.floor_ms, now)
        prospects = self._eligible(asked, subset, now)
        key = self._key(asked)
        needs = self._needs(asked, key, now)
        if asked.generates and admission.mode is AdmissionMode.ENFORCE:
            require_feasible(needs, prospects, self.clock.unix())
        ranked = rank(needs, prospects)
        endpoints = tuple(p.name for p in ranked[: 1 + self.section.fallbacks])
        pod = self.pods.find(endpoints[0])
        assert pod is not None
        picked = Picked(endpoints, pod)
        if asked.generates:
            output = math.ceil(at_share(needs.lengths, USUAL))
            picked.flight = Flight(now, needs.prompt_tokens, output)
            picked.key, picked.prompt_chars = key, 0 if asked.prompt_ids else asked.prompt_chars
            pod.add(picked.flight)
            self._affinity.record("", asked.session, pod.address, now)
        if service_log.isEnabledFor(logging.DEBUG):
            service_log.debug(
                "picked",
                extra=fields(
                    correlation_id=asked.context.correlation_id,
                    pod=pod.address,
                    chance=round(ranked[0].chance(needs), 2),
                    finish_ms=round(ranked[0].finish_ms(needs)),
                    left_ms=round(needs.due.whole_ms),
                ),
            )
        return picked

    def served_by(self, picked: Picked, address: str) -> None:
        """Record which pod answers; it is not the first choice if that one failed."""
        pod = self.pods.find(address)
        if pod is None or pod is picked.pod:
            return
        if picked.flight is not None:
            picked.pod.flights.discard(picked.flight)
            pod.flights.add(picked.flight)
        picked.pod = pod

    def progressed(self, picked: Picked, tokens: int) -> None:
        flight = picked.flight
        if flight is not None and tokens > flight.tokens:
            flight.first_at = flight.first_at or self.clock.now()
            flight.tokens = tokens

    def ended(self, picked: Picked, end: AnswerEnd | None) -> None:
        """Count the request as over; ``end`` is None if its answer was not complete."""
        flight, key = picked.flight, picked.key
        if flight is None or key is None:
            return
        picked.flight = None
        if end is None:
            picked.pod.flights.discard(flight)
            return
        picked.pod.ended(flight, end, self.clock.now())
        if end.tokens and end.is_told:
            self._lengths.answered(key, end.tokens, finished=end.finished)
        if end.prompt_tokens and picked.prompt_chars >= _MIN_CHARS:
            self._learn_ratio(key.model, picked.prompt_chars / end.prompt_tokens)

    def lost_sight(self, picked: Picked) -> None:
        """Note that the gateway no longer reports an unanswered request. The request may still run
        until the pod's next metrics."""
        if picked.flight is not None:
            picked.flight.unseen_since = self.clock.now()
            picked.flight = None

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _eligible(self, asked: Asking, subset: Collection[str] | None, now: float) -> list[Outlook]:
        """The pods that may be chosen, at least one. Raises ``NotReady``."""
        prospects = self.pods.prospects(now)
        if not prospects:
            raise nobody("no pod is known; check the picker's log, and TIDEGATE_PICKER__ENDPOINTS")
        if subset is not None:
            prospects = [p for p in prospects if p.name in subset]
            if not prospects:
                raise nobody("none of those that the gateway allows is among the picker's own")
        if self.section.failure_mode == "closed":
            prospects = [p for p in prospects if p.is_known]
            if not prospects:
                raise nobody("none tells its metrics, and TIDEGATE_PICKER__FAILURE_MODE is closed")
        serving = [p for p in prospects if asked.model in self._models_of(p.name)]
        return serving or prospects

    def _models_of(self, address: str) -> Collection[str]:
        pod = self.pods.find(address)
        return () if pod is None or pod.page is None else pod.page.models

    def _needs(self, asked: Asking, key: LengthKey, now: float) -> Needs:
        cap = asked.cap or LONGEST
        is_stated = asked.cap > 0 and asked.least_tokens == asked.cap
        curve = STATED if is_stated else self._lengths.curve(key)
        lengths = curve.left(0, cap) if asked.generates else (1.0,)
        first_ms = 1000 * (asked.parts.first_token_at - now)
        return Needs(
            prompt_tokens=max(1, key.prompt_tokens or 0),
            lengths=[max(tokens, asked.least_tokens) for tokens in lengths],
            least_tokens=asked.least_tokens,
            due=Due(asked.deadline.left_ms(now), first_ms),
            home=self._affinity.home("", asked.session, now),
        )

    def _key(self, asked: Asking) -> LengthKey:
        ratio = self._chars_per_token.get(asked.model, FIRST_CHARS_PER_TOKEN)
        stated_ms = None
        if not asked.deadline.is_default:
            stated_ms = 1000 * (asked.deadline.at - asked.context.arrival.mono)
        return LengthKey(
            model=asked.model,
            tenant="",
            cap=asked.cap,
            deadline_ms=stated_ms,
            session=asked.session,
            prompt_tokens=asked.prompt_ids or round(asked.prompt_chars / ratio),
            kind=asked.kind,
        )

    def _learn_ratio(self, model: str, ratio: float) -> None:
        if len(self._chars_per_token) >= _MAX_MODELS and model not in self._chars_per_token:
            return
        known = self._chars_per_token[model]
        self._chars_per_token[model] = known + _SMOOTHING * (min(max(ratio, 0.5), 16.0) - known)
