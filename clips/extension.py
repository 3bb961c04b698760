"""Clips: ``/v2/slots`` and the slot model, as an optional room of the orchestrator (SL-1 to SL-8).

The rest of the room is imported only if ``TIDEGATE_SLOTS__SERVE`` is set.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from aiohttp import web

from clips.section import ClipsSection
from orchestrator.errors import NotFound
from orchestrator.extension import Core, Extension, Host
from orchestrator.settings import Settings
from orchestrator.tasks.work import AnyWork

if TYPE_CHECKING:
    from clips.dispatch.task import ClipTask


class NoClips(Extension):
    """The room of an orchestrator that serves no clips."""

    @classmethod
    def is_wanted(cls, settings: Settings) -> bool:
        return not settings.section(ClipsSection).serve

    def capabilities(self) -> Mapping[str, object]:
        return {"slots": False}

    def describe(self, address: str, *, briefly: bool = False) -> Mapping[str, object]:
        return {"slot": None}

    def attach(self, app: web.Application) -> None:
        app.add_routes([web.route("*", "/v2/slots{rest:.*}", _refuse)])


async def _refuse(request: web.Request) -> web.Response:
    raise NotFound(
        "no clips are served here: set TIDEGATE_SLOTS__SERVE=true where instances have the slot "
        "model, or start with tidegate up --slot"
    )


class ClipsRoom(Extension):
    """The clips of an orchestrator that serves them."""

    def __init__(self, core: Core) -> None:
        from clips.dispatch.service import Clips

        super().__init__(core)
        self.clips = Clips(core)

    @classmethod
    def is_wanted(cls, settings: Settings) -> bool:
        return settings.section(ClipsSection).serve

    def bind(self, host: Host) -> None:
        self.clips.on_end = host.task_over.set

    def start(self) -> None:
        self.clips.fleet.start()

    def upkeep(self) -> None:
        self.clips.upkeep()

    def end_hopeless(self, by: float) -> int:
        return self.clips.end_hopeless(by)

    def end_all(self) -> None:
        self.clips.end_all()

    async def close(self) -> None:
        await self.clips.close()

    @property
    def latest_end(self) -> float:
        return self.clips.store.latest_end

    def is_ready(self) -> bool:
        return bool(self.clips.fleet.ready())

    def live(self) -> Iterable[AnyWork]:
        return self.clips.live

    def cancel(self, work: AnyWork) -> None:
        self.clips.cancel(cast("ClipTask", work))

    def capabilities(self) -> Mapping[str, object]:
        return {"slots": self.clips.fleet.is_served}

    def describe(self, address: str, *, briefly: bool = False) -> Mapping[str, object]:
        from clips.api import describe_instance

        return {"slot": describe_instance(self.clips.fleet, address, briefly=briefly)}

    def attach(self, app: web.Application) -> None:
        from clips import api
        from orchestrator.tasks.submissions import Submissions

        app.add_routes(api.routes())
        app[api.CLIPS] = self.clips
        app[api.CLIP_SUBMISSIONS] = Submissions(self.clips.store)
