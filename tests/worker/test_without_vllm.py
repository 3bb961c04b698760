"""OR-28: the worker does without vLLM's engine, and nothing else of it names that room."""

import re
import shutil
from pathlib import Path

from tests.support.fake_vllm import checkpoint, install
from tests.support.processes import python
from tests.test_layers import ROOT

PROBE = """
from pathlib import Path
from worker.engine_choice import choose_engine
from worker.engines import load_engine
from worker.settings import WorkerSettings

settings = WorkerSettings(model_path={demo!r}, device="cpu", engine="synthetic-free")
loaded = load_engine(settings)
print(loaded.card.model)
try:
    load_engine(settings.model_copy(update={{"engine": "vllm"}}))
except ModuleNotFoundError as error:
    print(error.name)
settings = WorkerSettings(model_path={model!r}, device="cuda")
print(choose_engine(settings, Path({packages!r})))
"""


def test_the_worker_starts_without_vllms_engine(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("vllm", "checkpoint")
    for package in ("protocol", "worker"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    model, packages = checkpoint(tmp_path / "m", "LlamaForCausalLM"), install(tmp_path / "p")
    demo = ROOT / "worker/demo_model/checkpoint"
    code = PROBE.format(demo=str(demo), model=str(model), packages=str(packages))
    *_, missing, chosen = python("-c", code, cwd=tmp_path).stdout.splitlines()
    assert missing == "worker.engines.vllm"
    assert "name='torch'" in chosen and "without an engine for vLLM" in chosen


def test_no_module_imports_vllms_engine() -> None:
    named = re.compile(r"^\s*(?:from|import) worker\.engines\.vllm\b", re.M)
    files = [
        file for top in ("worker", "pool", "orchestrator") for file in (ROOT / top).rglob("*.py")
    ]
    room = ROOT / "worker/engines/vllm"
    assert not [
        file for file in files if room not in file.parents and named.search(file.read_text("utf-8"))
    ]
