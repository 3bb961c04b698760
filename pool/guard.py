"""Requires that Triton asks its clients for a token, or listens on loopback only (OR-12)."""

from collections.abc import Sequence

from catalog.errors import PortsUnguarded
from catalog.hosts import is_loopback

PLAIN_TOKEN = "TIDEGATE_WORKER__PLAIN__TOKEN"


def require_guard(
    host: str,
    models: Sequence[str],
    *,
    lane_token: str,
    plain_token: str,
    is_open: bool,
    opened_by: str,
) -> None:
    """Raise ``PortsUnguarded`` if others could reach a Triton that asks for no token.

    ``is_open``: the operator has said, with ``opened_by``, that they may.
    """
    if is_loopback(host):
        return
    lacking = []
    if not lane_token:
        lacking.append(
            "set TIDEGATE_LANES__TOKEN, to the same value for the orchestrator: whoever opens a "
            "lane must show it"
        )
    if not is_open and "slot" in models:
        lacking.append(
            f"the slot model asks nobody for a token: say with {opened_by} that whoever "
            "reaches Triton may have clips rendered"
        )
    elif not is_open and not plain_token:
        lacking.append(
            f"set {PLAIN_TOKEN}, which clients of Triton's own protocols then "
            f"state as the request parameter token, or say with {opened_by} that whoever "
            "reaches Triton may generate"
        )
    if lacking:
        raise PortsUnguarded(
            f"Triton would listen on {host or 'every address'}, which is not "
            f"loopback: {'; and '.join(lacking)}"
        )
