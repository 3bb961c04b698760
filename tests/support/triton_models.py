"""Tiny models for a real Triton, written into a model repository of the test's own."""

from pathlib import Path

_CONFIG = """\
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
instance_group [ { kind: KIND_MODEL } ]
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""

QUIET = """\
class TritonPythonModel:
    def execute(self, requests):
        pass
"""

REFUSES_TO_LOAD = """\
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the model is missing\\n  give one with --model PATH")

    def execute(self, requests):
        pass
"""

NEVER_FINALIZES = """\
import time

class TritonPythonModel:
    def execute(self, requests):
        pass

    def finalize(self):
        time.sleep(1000)
"""


def write_model(repository: Path, name: str, source: str) -> Path:
    """Add a model; the repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (repository / name / "config.pbtxt").write_text(_CONFIG)
    return repository
