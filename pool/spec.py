"""Defines the request of ``tidegate up``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catalog.paths import MODEL_REPOSITORY, state_dir
from orchestrator.tls import Tls
from pool.engines.triton import TritonPorts
from pool.supervise import RestartPolicy

PORT_STRIDE = 10
"""Difference between the configured ports of one Triton and the next."""
SLOT_MODEL = "slot"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One run of the launcher."""

    worker_env: Mapping[str, str] = field(default_factory=dict)
    """Variables ``TIDEGATE_WORKER__…`` and ``TIDEGATE_SLOT__…`` for every instance."""
    host: str = "127.0.0.1"
    port: int = 8080
    """The orchestrator's port; 0 chooses a free one."""
    serve: bool = True
    """Whether to start an orchestrator; otherwise Triton only."""
    processes: int = 1
    """Orchestrator processes that share ``port`` and, above 1, a state."""
    store: str = ""
    """Program of a store for them, to be started too; empty where the settings name one that
    runs."""
    own_host: str = "127.0.0.1"
    """Address at which each of several processes listens by itself."""
    advertise: str = ""
    """``http://host`` by which orchestrators elsewhere reach ``own_host``; empty: as it is."""
    instances_at: str | None = None
    """Addresses of instances that run already, comma-separated, empty for those that the settings
    name; None: Tritons are started here."""
    instances: int = 1
    gpus: tuple[str, ...] = ()
    """CUDA devices, dealt out to the instances in turn; empty leaves the choice to the worker."""
    gpus_each: int = 1
    """How many of ``gpus`` each instance gets; it divides their number."""
    triton: Path | None = None
    """A server to use rather than the first that is found."""
    triton_host: str = "127.0.0.1"
    triton_open: bool = False
    """Whether clients off loopback, too, may generate without a token."""
    lane_token: str = field(default="", repr=False)
    """Token that orchestrator and workers share; if empty and both are started, made up each
    time."""
    tls: Tls | None = None
    """TLS between orchestrator and Tritons; both show the certificate."""
    triton_ports: TritonPorts = field(default_factory=lambda: TritonPorts(0, 0, 0))
    """Ports of the first Triton; each next one's are higher by ``PORT_STRIDE``; 0 chooses free
    ones. Tritons for clips come after those for text."""
    model_repository: Path = MODEL_REPOSITORY
    models: tuple[str, ...] = ("llm",)
    load_timeout_s: float = 300.0
    drain_s: float = 1.0
    """Seconds that running work is given at the end, which takes at most 3.5 s more, 6 s with a
    store."""
    home: Path = field(default_factory=state_dir)
    log_to_stderr: bool = False
    """Whether to log to stderr instead of files in ``home``/logs/<host>-<port>."""
    state_file: Path | None = None
    """File with address, ports and process ids as JSON while the service is up; None for none."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def runs_gguf(self) -> bool:
        """Whether llama.cpp's server runs the text model, in the place of a Triton."""
        return self.worker_env.get("TIDEGATE_WORKER__ENGINE") == "llamacpp"
