"""Clips: ``/v2/slots`` and the slot model, as an optional room of the orchestrator (SL-1 to SL-8).

The rest of the room is imported only if ``TIDEGATE_SLOTS__SERVE`` is set.
"""

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, cast

from aiohttp import web

from clips import refusal
from clips.section import ClipsSection
from orchestrator.extension import Core, Extension, Host
from orchestrator.tasks.work import AnyWork

if TYPE_CHECKING:
    from clips.dispatch.service import Clips
    from clips.dispatch.task import ClipTask


class ClipsRoom(Extension):
    """The clips of one orchestrator, if it serves them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.clips: Clips | None = None
        if core.settings.section(ClipsSection).serve:
            from clips.dispatch.build import build_clips

            self.clips = build_clips(core)

    def bind(self, host: Host) -> None:
        if self.clips is not None:
            self.clips.on_end = host.task_over.set

    def start(self) -> None:
        if self.clips is not None:
            self.clips.start()

    def upkeep(self) -> None:
        if self.clips is not None:
            self.clips.upkeep()

    def end_hopeless(self, by: float) -> int:
        return 0 if self.clips is None else self.clips.end_hopeless(by)

    def end_all(self) -> None:
        if self.clips is not None:
            self.clips.end_all()

    async def close(self) -> None:
        if self.clips is not None:
            await self.clips.close()

    @property
    def latest_end(self) -> float:
        return 0.0 if self.clips is None else self.clips.store.latest_end

    def is_ready(self) -> bool:
        return self.clips is not None and bool(self.clips.fleet.ready())

    def live(self) -> Iterable[AnyWork]:
        return () if self.clips is None else self.clips.live

    def cancel(self, work: AnyWork) -> None:
        if self.clips is not None:
            self.clips.cancel(cast("ClipTask", work))

    def capabilities(self) -> Mapping[str, object]:
        return {"slots": self.clips is not None and self.clips.fleet.is_served}

    def describe(self, address: str, *, briefly: bool = False) -> Mapping[str, object]:
        if self.clips is None:
            return {"slot": None}
        from clips.api import describe_instance

        return {"slot": describe_instance(self.clips.fleet, address, briefly=briefly)}

    def edges(self) -> tuple[ModuleType, ...]:
        if self.clips is None:
            return (refusal,)
        from clips import api

        return (api,)

    def attach(self, app: web.Application) -> None:
        if self.clips is not None:
            from clips import api
            from orchestrator.tasks.submissions import Submissions

            app[api.CLIPS] = self.clips
            app[api.CLIP_SUBMISSIONS] = Submissions(self.clips.store)
