"""What ``tidegate up`` is asked for, and what it reports while it goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from catalog.paths import MODEL_REPOSITORY, state_dir
from orchestrator.lanes.tls import Tls
from pool.engines.triton import TritonPorts
from pool.supervise import RestartPolicy

PORT_STRIDE = 10
"""Between the configured ports of one Triton and the next."""
SLOT_MODEL = "slot"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One run of the launcher."""

    worker_env: Mapping[str, str] = field(default_factory=dict)
    """``TIDEGATE_WORKER_…`` and ``TIDEGATE_SLOT_…`` for every instance."""
    host: str = "127.0.0.1"
    port: int = 8080
    """Of the orchestrator; 0 chooses a free one."""
    serve: bool = True
    """False: Triton only, no orchestrator."""
    instances: int = 1
    gpus: tuple[str, ...] = ()
    """CUDA devices, dealt out to the instances in turn; empty leaves the choice to the worker."""
    triton: Path | None = None
    """A server to use rather than the first that is found."""
    triton_host: str = "127.0.0.1"
    triton_open: bool = False
    """Off loopback, too, whoever reaches Triton may generate without a token."""
    lane_token: str = field(default="", repr=False)
    """Shared by orchestrator and workers; made up at each start when empty and both are started."""
    tls: Tls | None = None
    """Between orchestrator and Tritons; the certificate is shown by both."""
    triton_ports: TritonPorts = field(default_factory=lambda: TritonPorts(0, 0, 0))
    """Of the first Triton, the next ones' ``PORT_STRIDE`` higher each; 0 chooses a free one. Those
    for clips come after those for text."""
    model_repository: Path = MODEL_REPOSITORY
    models: tuple[str, ...] = ("llm",)
    load_timeout_s: float = 300.0
    drain_s: float = 1.0
    """What running work is given at the end, which takes at most 3.5 s more."""
    home: Path = field(default_factory=state_dir)
    log_to_stderr: bool = False
    """Instead of files in ``home``/logs/<host>-<port>."""
    state_file: Path | None = None
    """Where address, ports and process ids are kept as JSON while the service is up."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)


class EventKind(StrEnum):
    """What happens to a unit, or (the last four) to the service as a whole."""

    FETCHING = "fetching"
    FOUND = "found"
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    WARNED = "warned"
    SERVING = "serving"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """One step. ``text``: what is fetched or was found, where it is reached, why it was lost,
    what the service goes on without.

    ``seconds`` is how long the step took; for ``LOST`` the pause before the next start.
    """

    kind: EventKind
    unit: str
    text: str = ""
    seconds: float = 0.0
