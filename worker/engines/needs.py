"""Compares what a job needs with what a third-party engine lacks."""

from collections.abc import Collection

from protocol import Code, Feature, features_of
from worker.core import Job
from worker.scheduler.end_reason import EndReason
from worker.scheduler.refusal import refused


def lacking(job: Job, lacks: Collection[Feature]) -> EndReason | None:
    """Why this engine cannot run a job, or None. Orchestrators avoid such engines beforehand."""
    needed = features_of(job.sampling)
    if job.constraint is not None:
        needed.append(Feature.GRAMMAR)
    if job.pooling is not None:
        needed.append(Feature.EMBEDDINGS)
    missing = [feature.value for feature in needed if feature in lacks]
    if not missing:
        return None
    return refused(
        Code.INVALID_REQUEST,
        f"this worker's engine has no {', '.join(missing)}; leave that out, or ask for a model that"
        " an instance with another engine serves",
    )
