"""Named loggers of the worker. Prompts and generated text are never logged (OR-16)."""

import logging

engine_log = logging.getLogger("tidegate.worker.engine")
model_log = logging.getLogger("tidegate.worker.model")
service_log = logging.getLogger("tidegate.worker.service")


def configure_logging() -> None:
    """Log to standard error, which becomes part of Triton's own log."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
