"""Several orchestrators at one port: what they share, and ``tidegate serve --processes N``.

Imported after ``runtime.add_to_path``, and only where there are several: the orchestrator's
settings take a third of a second to import.
"""

import os
import sys
from importlib.util import find_spec
from typing import TypedDict
from urllib.parse import urlsplit

from catalog.errors import MachineUnfit, ProvisionError
from orchestrator.settings import InvalidSettings, Settings, load_settings
from orchestrator.state.section import StateSection
from pool import command
from pool.spec import LaunchSpec
from pool.units.store import find_store

EXIT_USAGE = 2
LOOPBACK = "127.0.0.1"


class Sharing(TypedDict, total=False):
    """How several processes share a state, as fields of ``LaunchSpec``."""

    store: str
    own_host: str
    advertise: str


def serve(
    host: str | None,
    port: int | None,
    instances_at: str | None,
    cors_origins: str | None,
    processes: int,
) -> int:
    """Launch several orchestrators at one port, for Tritons that run elsewhere; returns the exit
    status. What is None is as the settings have it."""
    if cors_origins is not None:
        os.environ["TIDEGATE_HTTP__CORS_ORIGINS"] = cors_origins  # the orchestrators inherit it
    settings = _settings(host=host, port=port, instances=instances_at)
    try:
        sharing = _sharing(settings)
    except ProvisionError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return command.EXIT_FAILED
    spec = LaunchSpec(
        host=settings.host,
        port=settings.port,
        processes=processes,
        instances_at=instances_at or "",
        drain_s=settings.shutdown.grace_s,
        log_to_stderr=True,
        **sharing,
    )
    return command.run(spec)


def shared_state(host: str, port: int) -> Sharing:
    """How several processes that listen at ``host:port`` share a state.

    Raises ``MachineUnfit`` where there can be no store for it, ``SystemExit`` for settings that do
    not fit, which it prints.
    """
    return _sharing(_settings(host=host, port=port))


def _settings(**stated: str | int | None) -> Settings:
    """The orchestrator's settings; what is stated and not None goes before them. Raises
    ``SystemExit`` for settings that do not fit, which it prints."""
    try:
        return load_settings(**{k: v for k, v in stated.items() if v is not None})
    except InvalidSettings as error:
        print(f"Invalid settings:\n{error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def _sharing(settings: Settings) -> Sharing:
    """The store that several processes share: the one of the settings, else one of their own.
    Raises ``MachineUnfit`` where there can be none."""
    state = settings.section(StateSection)
    if state.url is None:
        if find_spec("redis") is None:
            raise MachineUnfit(
                "several processes share a Redis or Valkey, and the package redis is not installed "
                "here: pip install redis"
            )
        return {"store": find_store()}
    stated = urlsplit(state.advertise or "")
    name = stated.netloc.removesuffix(f":{stated.port}")
    return {
        "own_host": settings.host if state.is_remote else LOOPBACK,
        "advertise": f"{stated.scheme}://{name}" if state.advertise else "",
    }
