"""Tiny models for a real Triton, written into a model repository of the test's own."""

import shutil
from pathlib import Path

from catalog.paths import MODEL_REPOSITORY
from protocol.tensors import MODEL_NAME

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

CRASHES = """\
import os
import signal

class TritonPythonModel:
    def initialize(self, args):
        with open({starts!r}, "a+") as starts:
            starts.write("start\\n")
            starts.seek(0)
            if len(starts.readlines()) <= {times}:
                os.kill(os.getppid(), signal.SIGABRT)

    def execute(self, requests):
        pass
"""
"""Takes the server with it in its first ``times`` starts, and notes each in a file."""

NEVER_FINALIZES = """\
import time

class TritonPythonModel:
    def execute(self, requests):
        pass

    def finalize(self):
        time.sleep(1000)
"""


_SLOWS = """\
import importlib.util
import os
import time

_spec = importlib.util.spec_from_file_location("real_model", {real!r})
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)


class TritonPythonModel(_real.TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        scheduler = self._service.serving.engine.scheduler
        schedule = scheduler.schedule

        def slowly(now):
            if os.path.exists({flag!r}):
                time.sleep(0.03)
            return schedule(now)

        scheduler.schedule = slowly
"""


def write_slow_model(repository: Path, flag: Path) -> Path:
    """Our text model, whose steps take 30 ms longer while ``flag`` is there."""
    real = MODEL_REPOSITORY / MODEL_NAME
    shutil.copytree(real, repository / MODEL_NAME)
    source = _SLOWS.format(real=str(real / "1" / "model.py"), flag=str(flag))
    (repository / MODEL_NAME / "1" / "model.py").write_text(source)
    return repository


def write_model(repository: Path, name: str, source: str) -> Path:
    """Add a model; the repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (repository / name / "config.pbtxt").write_text(_CONFIG)
    return repository
