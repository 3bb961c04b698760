"""The demo checkpoint in GGUF, where the packages are installed."""

from pathlib import Path

import pytest

from tests.support.checkpoints import DEMO


@pytest.fixture(scope="session")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As float32."""
    pytest.importorskip("gguf", reason="extra llamacpp: not installed")
    from tools.to_gguf import convert

    file = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    convert(DEMO, file, "f32")
    return file
