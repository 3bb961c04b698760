"""Swaps the model in the same process, without a new Triton, a new torch or a new CUDA context.

::

    check ─▶ drain ─▶ evict, unload ─▶ load ─▶ the new one serves
                                         └─ failed ─▶ restore the old one

A failure before the old model is unloaded costs only a drain. If the old model cannot be restored
either, the process ends: its supervisor restarts it with its original settings.

A swap has its own thread, which ends with the swap, so that its computations leave no OpenMP
threads behind. The emitter's thread installs the new model between two of its cycles.
"""

import gc
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from protocol import Code, Frame, SwapPhase, SwapReport, excerpt
from worker.core import Clock
from worker.errors import RequestError, WorkerDraining
from worker.loaded import EngineLoader, LoadedEngine
from worker.log import service_log
from worker.service.call import Responder
from worker.service.drain import Drainer
from worker.service.emitter import Emitter
from worker.service.lane import try_to_send
from worker.service.serving import EngineAbsent, Serving
from worker.service.swap_checks import check, loadable, meter_of, name_of, target_settings
from worker.settings import WorkerSettings

DRAIN_SLACK_S = 10.0
"""Maximum seconds after the grace period until all ended jobs are gone."""
PLACE_S = 10.0
"""Maximum seconds for the emitter to install a model."""
LAST_WORDS_S = 1.0
_MIB = 2**20


class SwapBusy(RequestError):
    """Another swap is running."""

    code = Code.NOT_READY


class NoSwap(Exception):
    """A swap failed; the message says why."""


class Swapper:
    """Owns the model that the worker serves, and replaces it."""

    def __init__(
        self,
        loaded: LoadedEngine,
        settings: WorkerSettings,
        emitter: Emitter,
        drainer: Drainer,
        clock: Clock,
        load: EngineLoader,
        die: Callable[[], None],
    ) -> None:
        """``die`` ends the process if neither model can be served."""
        self._started = settings
        self._emitter = emitter
        self._drainer = drainer
        self._clock = clock
        self._load_engine = load
        self._die = die
        self._load_ms = {name_of(settings): loaded.load_ms.get("total", 0.0)}
        self._number = 0
        self._process_id = uuid.uuid4().hex
        self.serving = self._serving_of(loaded, settings)
        self._old: Serving | None = None
        """A model that is no longer served but not yet unloaded. Nothing else may refer to it;
        otherwise its memory is not freed."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._target = settings
        self._askers: list[tuple[Responder, int]] = []
        """Responders that get reports, with the number of their next frame."""
        self._report = SwapReport(SwapPhase.DONE, name_of(settings), name_of(settings))
        self._drained = threading.Event()
        self._is_closing = False

    def swap(
        self,
        asked: Mapping[str, str],
        grace_s: float,
        responder: Responder,
        *,
        anew: bool = False,
    ) -> None:
        """Begin a swap; ``responder`` gets a report for each phase. ``anew`` reloads the served
        model. Raises ``RequestError``. A request for the running swap also gets its reports."""
        target = self.serving.settings if anew else target_settings(self._started, asked)
        with self._lock:
            if self._thread is not None:
                if target != self._target:
                    raise SwapBusy(
                        f"this worker is swapping to {name_of(self._target)}; ask again afterwards"
                    )
                self._askers.append((responder, 0))
                return
            if self._drainer.is_for_good:
                raise WorkerDraining("the worker is about to stop; swap another one")
            name, was = name_of(target), self.serving.card.model
            if target == self.serving.settings and not anew:
                same = Frame(0, swap=SwapReport(SwapPhase.DONE, name, was))
                self._emitter.post(lambda: try_to_send(responder, same, final=True))
                return
            self._target = target
            self._askers = [(responder, 0)]
            self._report = SwapReport(SwapPhase.CHECK, name, was)
            self._thread = threading.Thread(
                target=self._run, args=(target, grace_s), name="tidegate-swap", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop a drain for a swap; a running load is discarded. Idempotent."""
        self._is_closing = True
        self._drained.set()

    # ── the swap's thread ────────────────────────────────────────────────────────────────────

    def _run(self, target: WorkerSettings, grace_s: float) -> None:
        began_at = time.monotonic()
        error = ""
        try:
            self._swap(target, grace_s)
        except Exception as failed:  # any load error: only this model is unavailable
            error = excerpt(str(failed) or type(failed).__name__, 1000)
            if not isinstance(failed, NoSwap | RequestError | OSError | ValueError):
                service_log.exception("the swap to %s failed", name_of(target))
        report = self._report
        service_log.log(
            40 if error else 20,
            "swap from %s to %s %s after %.2f s; ms by phase: %s",
            report.was,
            report.model,
            f"failed ({error})" if error else "done",
            time.monotonic() - began_at,
            ", ".join(f"{phase} {ms:.0f}" for phase, ms in report.ms.items()),
        )
        self._tell_end(error)

    def _swap(self, target: WorkerSettings, grace_s: float) -> None:
        current = self.serving.settings
        with self._phase(SwapPhase.CHECK):
            check(target, current, meter_of(target))
        self._drain(grace_s)
        self._retire()
        try:
            self._unload(current)  # raises if the device is lost
            loaded = self._load(target)
        except Exception as error:
            why = f"{error}" or type(error).__name__
            service_log.warning("%s cannot be loaded: %s", name_of(target), why)
        else:
            self._place(loaded, target)
            return
        self._restore(current, why)

    def _load(self, target: WorkerSettings, phase: SwapPhase = SwapPhase.LOAD) -> LoadedEngine:
        with self._phase(phase):
            return self._load_engine(target, self._clock)

    def _drain(self, grace_s: float) -> None:
        self._drained.clear()
        with self._phase(SwapPhase.DRAIN):
            self._emitter.post(lambda: self._drainer.begin_swap(grace_s, self._drained.set))
            is_drained = self._drained.wait(grace_s + DRAIN_SLACK_S)
        if is_drained and not self._is_closing:
            return
        self._emitter.post(self._drainer.release)
        if self._is_closing:
            raise NoSwap("the worker is being stopped")
        raise NoSwap(
            f"jobs were still there {DRAIN_SLACK_S:.0f} s after their {grace_s:.0f} s of grace;"
            " nothing was changed"
        )

    def _restore(self, settings: WorkerSettings, why: str) -> None:
        gc.collect()  # free the rest of the new model
        try:
            loaded = self._load(settings, SwapPhase.RESTORE)
        except Exception as error:
            service_log.critical(
                "%s cannot be loaded again (%s): ending the process", name_of(settings), error
            )
            why_last = f"{why}; and {name_of(settings)} cannot be loaded again: {error}"
            self._tell_end(why_last, is_last=True)
            told = threading.Event()
            self._emitter.post(told.set)
            told.wait(LAST_WORDS_S)
            self._die()
            raise NoSwap(why) from None
        self._place(loaded, settings)
        raise NoSwap(f"{why}; {name_of(settings)} is served again")

    # ── serving ─────────────────────────────────────────────────────────────────────────────

    def _serving_of(self, loaded: LoadedEngine, settings: WorkerSettings) -> Serving:
        card = msgspec.structs.replace(
            loaded.card,
            serving=self._number,
            loadable=loadable(self._started, self._load_ms),
            process_id=self._process_id,
        )
        return Serving.of(loaded, settings, card)

    def _place(self, loaded: LoadedEngine, settings: WorkerSettings) -> None:
        """Serve ``loaded`` from now on."""
        self._number += 1
        self._load_ms[name_of(settings)] = loaded.load_ms.get("total", 0.0)
        serving = self._serving_of(loaded, settings)

        def place() -> None:
            self._replace(serving)
            serving.engine.start(self._emitter.sink)
            self._drainer.release()
            self._emitter.describe_all(serving.card)

        self._on_emitter(place)

    def _retire(self) -> None:
        """Serve no model for now; lanes and requests still get answers."""
        self._old = self.serving
        empty = replace(
            self.serving,
            engine=EngineAbsent(self._emitter.sink),
            grammars=None,
            closings=None,
            load_ms={},
        )
        self._on_emitter(lambda: self._replace(empty))

    def _replace(self, serving: Serving) -> None:
        """Replace the current model with ``serving``. On the emitter's thread."""
        self.serving = serving
        self._drainer.engine = serving.engine
        self._emitter.serve(serving.engine, serving.load_ms)

    def _on_emitter(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def act() -> None:
            try:
                action()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._emitter.post(act)
        try:
            done.result(PLACE_S)
        except TimeoutError:
            raise NoSwap("the worker is being stopped") from None

    def _unload(self, settings: WorkerSettings) -> None:
        """End the old model's engine and free its memory."""
        old, self._old = self._old, None
        assert old is not None
        meter = meter_of(settings)
        before = meter.used_bytes()
        with self._phase(SwapPhase.EVICT):
            old.engine.stop()
            old.close_grammars()
        with self._phase(SwapPhase.UNLOAD):
            del old
            was_frozen = gc.get_freeze_count() > 0
            gc.unfreeze()  # startup froze its objects, so the collector skips them
            meter.drop_caches()
            if was_frozen:
                gc.freeze()
        freed = max(0, before - meter.used_bytes())
        self._report = msgspec.structs.replace(self._report, freed_mib=round(freed / _MIB, 1))

    # ── how it goes ──────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _phase(self, phase: SwapPhase) -> Iterator[None]:
        began_at = time.monotonic()
        self._report = report = msgspec.structs.replace(self._report, phase=phase)
        with self._lock:
            askers = self._askers
            self._askers = [(responder, seq + 1) for responder, seq in askers]
        self._emitter.post(lambda: self._tell(report, askers))
        try:
            yield
        finally:
            ms = 1000 * (time.monotonic() - began_at)
            self._report = msgspec.structs.replace(
                self._report, ms=self._report.ms | {phase.value: round(ms, 1)}
            )

    def _tell_end(self, error: str, *, is_last: bool = False) -> None:
        """Tell everybody how the swap ended. From now on another one may begin, unless the process
        ends (``is_last``)."""
        phase = SwapPhase.FAILED if error else SwapPhase.DONE
        report = msgspec.structs.replace(self._report, phase=phase, error=excerpt(error, 1000))
        with self._lock:
            if not is_last:
                self._thread = None
            askers, self._askers = self._askers, []
        self._emitter.post(lambda: self._tell(report, askers, final=True))

    def _tell(
        self, report: SwapReport, askers: list[tuple[Responder, int]], *, final: bool = False
    ) -> None:
        """Send ``report`` to ``askers`` and to every lane. On the emitter's thread."""
        for responder, seq in askers:
            try_to_send(responder, Frame(seq, swap=report), final=final)
        self._emitter.announce(report)
