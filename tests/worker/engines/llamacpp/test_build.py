"""What a load that fails leaves behind."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf import write_gguf
from worker.engines.llamacpp import build
from worker.engines.llamacpp.gguf_file import GgufFile
from worker.engines.llamacpp.options import read_options
from worker.errors import TokenizerError
from worker.models.load_timing import LoadTiming
from worker.settings import WorkerSettings


class Weights:
    """The context, as far as a failed load needs it."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def done(value: object) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("original", ["", "{}"], ids=["no vocabulary", "no tokenizer"])
def test_weights_are_given_back_where_the_rest_of_a_load_fails(
    tmp_path: Path, original: str
) -> None:
    """A worker that goes on with its old model would hold them for good."""
    metadata = {"general.architecture": "llama", "tokenizer.huggingface.json": original}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    weights = Weights()
    with pytest.raises(TokenizerError):
        build._assemble(
            WorkerSettings(model_path=path, engine="llamacpp", device="cpu"),
            read_options({}),
            GgufFile(path),
            done((None, weights)),
            done("00"),
            LoadTiming(),
            time.monotonic,
        )
    assert weights.closed == 1
