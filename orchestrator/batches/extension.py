"""Files of requests, and batches, stored next to the journal (OR-20)."""

from aiohttp import web

from orchestrator.batches.api import batches, files
from orchestrator.batches.api.served_lines import BATCHES, BatchLines
from orchestrator.batches.folder import folder_of
from orchestrator.batches.section import BatchConfig, BatchSection
from orchestrator.batches.service import Batches
from orchestrator.dispatch.retry import ATTEMPTS
from orchestrator.extension import Core, Extension
from orchestrator.telemetry.metrics import MetricRow

METRICS: tuple[MetricRow[Batches], ...] = (
    MetricRow(
        "gauge",
        "batches_unfinished",
        "batches",
        "Unfinished batches",
        lambda b: b.unfinished,
    ),
    MetricRow(
        "gauge",
        "batch_lines_under_way",
        "lines",
        "Lines of batches that are being served or wait for a retry",
        lambda batches: batches.under_way,
    ),
    MetricRow(
        "gauge",
        "batch_lines",
        "lines",
        "Lines of kept batches, by result",
        lambda batches: [((kind.name.lower(),), n) for kind, n in batches.outcomes().items()],
        ("outcome",),
    ),
    MetricRow(
        "gauge",
        "batch_folder_bytes",
        "bytes",
        "Disk space of the files of batches",
        lambda batches: batches.shop.folder.used_bytes,
    ),
)


class BatchRoom(Extension):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.batches = _batches(core)
        if self.batches is not None:
            core.metrics.watch(self.batches, METRICS)

    def start(self) -> None:
        if self.batches is not None:
            self.batches.start()

    async def close(self) -> None:
        if self.batches is not None:
            await self.batches.close()

    def attach(self, app: web.Application) -> None:
        app.add_routes([*files.routes(), *batches.routes()])
        app[BATCHES] = self.batches
        if self.batches is not None:
            self.batches.shop.server = BatchLines(app, self.batches)


def _batches(core: Core) -> Batches | None:
    """Batches in a folder next to the journal, under the journal's locks; None if there is none."""
    settings, file = core.settings, core.journal
    store = core.sharing.store(file)
    if file is None or store is None:
        return None
    config = BatchConfig(
        folder_of(file.config.path),
        line_bytes=settings.http.max_body_bytes,
        folder_bytes=settings.section(BatchSection).folder_bytes,
        attempts=ATTEMPTS,
    )
    return Batches(config, core.clock, store.boot)
