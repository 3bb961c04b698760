"""``python -m picker``: pick pods for a gateway until told to stop."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from orchestrator.clock import LoopClock
from orchestrator.instances.addresses import is_source
from orchestrator.instances.discovery import DiscoverySync, DnsName
from orchestrator.settings import InvalidSettings, Settings, load_settings
from orchestrator.settings.sections import INTERRUPT_GRACE_S
from orchestrator.telemetry import log
from orchestrator.telemetry.log import fields, service_log
from picker.picker import EndpointPicker
from picker.pods import Pods
from picker.section import PickerSection
from picker.server import PickerServer
from worker.environment import guide_to

CHECK_EVERY_S = 0.5
"""Seconds between updates of the health status and of the pods."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m picker",
        description="Pick pods for a gateway. Options override TIDEGATE_… variables and "
        f"tidegate.toml; {guide_to(Settings)} has all of them.",
    )
    parser.add_argument("--endpoints", dest="picker__endpoints")
    parser.add_argument("--host", dest="picker__host")
    parser.add_argument("--port", dest="picker__port")
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    try:
        settings = load_settings(**given)
        if not settings.section(PickerSection).endpoints:
            raise InvalidSettings(
                "picker.endpoints: list the pods: --endpoints ip:port,… or dns:host:port"
            )
    except InvalidSettings as error:
        print(f"Invalid settings:\n{error}", file=sys.stderr)
        return 2
    log.configure(settings.telemetry.log_format, settings.telemetry.log_level)
    return asyncio.run(serve(settings))


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Queue[float] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGTERM, stop.put_nowait, settings.shutdown.grace_s)
    loop.add_signal_handler(signal.SIGINT, stop.put_nowait, INTERRUPT_GRACE_S)
    # The launcher may have blocked the signal until here (tidegate/cli/runtime.py).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    clock = LoopClock(loop)
    section = settings.section(PickerSection)
    pods = Pods(section, clock)
    sources = [DnsName(entry) for entry in section.endpoints if is_source(entry)]
    discovery = DiscoverySync(pods, (), sources, clock)
    server = PickerServer(EndpointPicker(settings, pods, clock))
    try:
        port = await server.start()
    except OSError as error:
        service_log.error("%s", error)
        return 1
    pods.start()
    discovery.start()
    discovery.list_anew(entry for entry in section.endpoints if not is_source(entry))
    service_log.info("listening", extra=fields(host=section.host, port=port))
    upkeep = asyncio.create_task(_upkeep(server, discovery))
    grace_s = await stop.get()
    service_log.info("stopping", extra=fields(grace_s=grace_s))
    second, stopping = asyncio.create_task(stop.get()), asyncio.create_task(server.stop(grace_s))
    await asyncio.wait([second, stopping], return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    if not stopping.done():
        await server.stop(0.0)
    upkeep.cancel()
    await asyncio.gather(upkeep, stopping, return_exceptions=True)
    await discovery.close()
    await pods.close()
    service_log.info("stopped")
    return 0


async def _upkeep(server: PickerServer, discovery: DiscoverySync) -> None:
    """Update the health status, and remove pods that discovery no longer names."""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        for do in (server.check, discovery.remove_retired):
            with suppress(Exception):
                await do()


if __name__ == "__main__":
    sys.exit(main())
