"""The known pods: follows discovery, and polls the pods for metrics."""

import asyncio
from collections.abc import Iterator
from typing import Final

import aiohttp

from orchestrator.clock import Clock
from orchestrator.telemetry.log import fields, lane_log
from picker.choice import Outlook
from picker.pod import Pod
from picker.section import PickerSection
from picker.vllm_page import NotAPage, VllmPage, read_page

PATHS = ("/metrics/vllm", "/metrics")
"""Paths of a pod's metrics, in the order of attempts: Tidegate has vLLM's names on a separate
page."""
MAX_PAGE_BYTES = 8 * 2**20
"""Maximum bytes to read of a page."""
POLL_EVERY_S: Final = 0.5
"""Seconds between polls of a pod's metrics."""
POLL_TIMEOUT_S: Final = 1.0
"""Timeout in seconds for a pod's metrics: a slower pod is too busy for more work."""


class _NoPage(Exception):
    """A pod's metrics could not be read; the message says why."""

    def __init__(self, why: str, *, is_reachable: bool = True) -> None:
        super().__init__(why)
        self.is_reachable = is_reachable


class Pods:
    """All pods, by address. ``DiscoverySync`` adds and retires them, as an ``InstanceSet``."""

    def __init__(self, config: PickerSection, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._pods: dict[str, Pod] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._http: aiohttp.ClientSession | None = None

    def __iter__(self) -> Iterator[Pod]:
        """Pods that may get requests."""
        return (pod for pod in self._pods.values() if pod.retiring_since is None)

    def find(self, address: str) -> Pod | None:
        return self._pods.get(address)

    def prospects(self, now: float) -> list[Outlook]:
        """State of every pod that may get requests, as input of a choice."""
        return [pod.prospect(now) for pod in self]

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered now, depending on ``failure_mode``."""
        now = self._clock.now()
        return any(pod.is_known(now) or self._config.failure_mode == "open" for pod in self)

    # ── for discovery ────────────────────────────────────────────────────────────────────────

    def addresses(self) -> dict[str, float | None]:
        return {pod.address: pod.retiring_since for pod in self._pods.values()}

    def idle(self, address: str) -> bool:
        return not self._pods[address].flights

    def ready(self, address: str) -> bool:
        pod = self._pods.get(address)
        return pod is not None and pod.retiring_since is None

    def add(self, address: str) -> None:
        pod = self._pods.get(address)
        if pod is not None:
            pod.retiring_since = None
            return
        pod = self._pods[address] = Pod(address)
        if self._http is not None:
            self._follow(pod)

    def retire(self, address: str) -> None:
        self._pods[address].retiring_since = self._clock.now()

    async def remove(self, address: str) -> None:
        self._pods.pop(address, None)
        poll = self._polls.pop(address, None)
        if poll is not None:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)

    # ── polls ────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Poll every pod for its metrics repeatedly, until ``close``."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=POLL_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "tidegate-picker"},
        )
        for pod in self._pods.values():
            self._follow(pod)

    async def close(self) -> None:
        polls = list(self._polls.values())
        self._polls.clear()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def _follow(self, pod: Pod) -> None:
        self._polls[pod.address] = asyncio.create_task(self._poll_on(pod), name=pod.address)

    async def _poll_on(self, pod: Pod) -> None:
        while True:
            try:
                await self.poll(pod)
            except Exception:
                lane_log.exception("a poll failed unexpectedly", extra=fields(pod=pod.address))
            await asyncio.sleep(POLL_EVERY_S)

    async def poll(self, pod: Pod) -> None:
        """Poll one pod for its metrics, once."""
        asked_at, before = self._clock.now(), pod.fault
        try:
            page = await self._page_of(pod)
        except _NoPage as error:
            pod.fault, pod.is_reachable = str(error), error.is_reachable
            if pod.fault != before:  # log a repeated fault only once
                lane_log.warning(
                    "a pod's metrics cannot be read, so other pods are preferred: %s",
                    pod.fault,
                    extra=fields(pod=pod.address),
                )
            return
        pod.take_page(page, asked_at, self._clock.now())
        if before:
            lane_log.info("a pod reports its load", extra=fields(pod=pod.address))

    async def _page_of(self, pod: Pod) -> VllmPage:
        assert self._http is not None
        status, path = 0, ""
        try:
            for path in PATHS:
                async with self._http.get(f"http://{pod.address}{path}") as response:
                    status = response.status
                    if status == 200:
                        body = bytearray()
                        async for part in response.content.iter_any():
                            body += part[: MAX_PAGE_BYTES - len(body)]
                            if len(body) == MAX_PAGE_BYTES:
                                break
                        return read_page(body.decode(errors="replace"))
        except NotAPage as error:
            raise _NoPage(f"{path} is not a page of vLLM's metrics: {error}") from None
        except TimeoutError:
            raise _NoPage(f"no answer in {POLL_TIMEOUT_S:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise _NoPage(f"cannot connect: {error.strerror}", is_reachable=False) from None
        except aiohttp.ClientError as error:
            raise _NoPage(f"the connection broke: {type(error).__name__}") from None
        raise _NoPage(f"{path} answers {status}")
