"""What a card tells of an engine: the digest of what has a say in its results, and its GPUs."""

from pathlib import Path

import pytest

import worker
from tests.support.cases import for_each
from worker.engine.card import RESULT_CODE, device_facts, engine_digest, mask_of
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
    """PF-6: the author of a new folder decides whether results depend on it."""
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


@for_each(
    ("index", "visible", "mask"),
    [(0, None, 1), (2, None, 4), (0, "3", 8), (1, "5, 1", 2), (0, "GPU-12ab", 0), (1, "0", 0)],
)
def test_a_gpu_is_named_by_its_place_in_its_host(
    index: int, visible: str | None, mask: int
) -> None:
    assert mask_of(index, visible) == mask


def test_several_gpus_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        total_memory = 5

    capabilities = [(9, 0), (8, 9), (7, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    for visible, mask in (("3,1,0", 0b1010), ("GPU-12ab,1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device_facts("cuda:0,1", 2) == {
            "vram_bytes": 10,
            "compute_capability": "8.9",
            "device_mask": mask,
        }
