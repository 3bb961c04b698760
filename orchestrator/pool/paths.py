"""Where things are: the checkout, what it holds, and where this machine's state goes.

Standard library only.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL_REPOSITORY = CHECKOUT / "model_repository"
DEMO_CHECKPOINT = CHECKOUT / "worker" / "demo_model" / "checkpoint"
NGC_ROOT = Path("/opt/tritonserver")
"""Where NVIDIA's container images have their Triton."""


def state_dir() -> Path:
    """``TIDEGATE_HOME``, or ``.tidegate`` in the checkout: the wheel's server, logs."""
    return Path(os.environ.get("TIDEGATE_HOME") or CHECKOUT / ".tidegate").resolve()
