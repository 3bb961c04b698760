"""Where engines look for the digest that the protocol defines."""

from worker.protocol.model_digest import files_digest as files_digest
from worker.protocol.model_digest import model_digest as model_digest
