"""Re-exports the protocol's digest of a model, where engines look for it."""

from worker.protocol.model_digest import files_digest as files_digest
from worker.protocol.model_digest import model_digest as model_digest
