"""Conversations that the service keeps between turns (``/v2/sessions``, WK-9)."""

from aiohttp import web

from orchestrator.extension import Core, Extension, Host, Submit
from orchestrator.ids import Ids
from orchestrator.sessions import api
from orchestrator.sessions.store import SessionStore, is_session
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import Kept, MetricRow

SESSIONS: tuple[MetricRow[SessionStore], ...] = (
    MetricRow("gauge", "sessions", "sessions", "Sessions (WK-9)", len),
    MetricRow(
        "counter",
        "session_turns",
        "turns",
        "Submitted turns: kept in the history, or dropped because they did not succeed",
        lambda store: (((what,), store.turns[what]) for what in ("kept", "dropped")),
        ("what",),
    ),
    MetricRow(
        "counter",
        "sessions_ended",
        "sessions",
        "Removed sessions, by reason",
        lambda store: (((why,), store.ended[why]) for why in ("deleted", "expired")),
        ("why",),
    ),
)


class SessionRoom(Extension):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        ids = Ids(core.rng, core.sharing.tag)
        self.store = SessionStore(core.clock, ids)
        core.sharing.keep("session", self.store)
        core.metrics.watch(self.store, SESSIONS)
        core.metrics.keeps("sessions", lambda: Kept(len(self.store), self.store.total_bytes))

    def bind(self, host: Host) -> None:
        self._host = host

    def upkeep(self) -> None:
        self.store.prune()

    def submit_of(self, job: Job) -> Submit | None:
        return self._submit_turn if is_session(job.session_id) else None

    async def _submit_turn(self, job: Job, prompt: Prompt) -> Task:
        """Offer the next turn of the job's session. ``prompt`` is the new part. The job is kept."""
        with self.store.turn(job, prompt) as turn:
            task = await self._host.submit(turn.job, turn.prompt)
            turn.follow(task)
        if turn.is_deleted:  # deleted while its prompt was encoded
            self._host.cancel(task)
        return task

    def attach(self, app: web.Application) -> None:
        app[api.SESSIONS] = self.store
        app.add_routes(api.routes())
