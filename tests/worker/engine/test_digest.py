from pathlib import Path

import worker
from worker.engine.card import RESULT_CODE

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
