from pathlib import Path

import worker
from worker.engine.card import RESULT_CODE, engine_digest
from worker.runner.base import BuiltRunner
from worker.settings import WorkerSettings

NO_SAY = {
    "__init__.py",
    "choices.py",  # what it chose is in the engine's facts
    "demo_model",
    "encoding.py",
    "engine_choice.py",
    "engines",  # those of others have digests of their own
    "environment.py",
    "errors.py",
    "extras.py",
    "free_memory.py",
    "kv_disk",
    "loaded.py",
    "log.py",
    "memory.py",
    "pinned.py",
    "priority.py",
    "service",
    "settings.py",
    "text",
}
"""What has no say in which tokens come out of the same token ids."""


def test_the_engine_digest_covers_every_part_of_the_worker_that_makes_tokens() -> None:
    """PF-6: whoever adds a folder decides whether results depend on it."""
    root = Path(worker.__file__).parent
    parts = {
        path.name
        for path in root.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
    }
    assert parts - set(RESULT_CODE) == NO_SAY
    assert set(RESULT_CODE) <= parts


def test_the_deterministic_mode_and_the_attention_are_part_of_it() -> None:
    """WK-3."""
    digests = {
        engine_digest(
            WorkerSettings(model_path=Path("/m"), deterministic=mode),
            BuiltRunner(None, 1, "cpu", "float32", attention),  # type: ignore[arg-type]
        )
        for mode in (True, False)
        for attention in ("fixed", "reference")
    }
    assert len(digests) == 4
