"""Where weights end up, what they cost on the way, and that it makes no difference."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import edit_config, make_checkpoint
from tests.support.lazy import transformers
from tests.support.model import CPU, Rig
from tests.support.processes import python
from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models import loader
from worker.models.checkpoint import Checkpoint
from worker.models.config import read_config
from worker.models.cuda_loader import cut
from worker.models.loader import Layout
from worker.models.model import Decoder, load_model, parameter_count
from worker.models.parameters import stacked_shape


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2", tie_word_embeddings=True)


def logits(path: Path, ids: list[int], **changes: object) -> torch.Tensor:
    rig = Rig(path, **changes)  # type: ignore[arg-type]
    text = rig.text(ids)
    return torch.cat([rig.step((text, n))[0] for n in (len(ids) - 2, 1, 1)])


def test_every_layout_gives_the_same_logits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(3, 40))
    packed = logits(tiny, ids)
    torch.testing.assert_close(logits(tiny, ids, layout=Layout(small=True)), packed)
    monkeypatch.setattr(loader, "blocks_fit", lambda dtype: False)
    torch.testing.assert_close(logits(tiny, ids), packed)
    monkeypatch.setattr(loader, "packs", lambda dtype: False)
    torch.testing.assert_close(logits(tiny, ids), packed)


def test_a_step_reads_every_weight_but_the_table(tiny: Path) -> None:
    config = read_config(tiny)
    model = load_model(tiny, config, torch.float32, CPU)
    biases = 3 * (48 + 2 * 16)
    assert model.step_bytes == 4 * (parameter_count(config) - biases)


@pytest.mark.parametrize("most", [64, 1000, 10**6])
def test_chunks_fill_each_stack(tiny: Path, most: int) -> None:
    """What the CUDA loader reads in pieces is what lies in the files."""
    with Checkpoint(tiny) as checkpoint:
        for parameter in Decoder.parameters(read_config(tiny)).values():
            out = torch.full(stacked_shape(parameter.parts), torch.nan)
            for chunk in cut(checkpoint, parameter.parts, out, most):
                assert chunk.nbytes <= most
                raw = torch.empty(chunk.nbytes, dtype=torch.uint8)
                checkpoint.read_bytes(chunk.file, chunk.offset, raw)
                values = raw.view(chunk.dtype)
                chunk.out[chunk.first : chunk.first + len(values)] = values
            assert torch.equal(out, torch.cat([checkpoint.mapped(p) for p in parameter.parts]))


def test_a_file_that_shrinks_while_it_is_read(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((tiny / "model.safetensors").read_bytes())
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(file, 2000)
        with pytest.raises(BrokenCheckpoint, match="became shorter"):
            checkpoint.read_bytes(file, 1500, torch.empty(1000, dtype=torch.uint8))


def test_a_type_that_we_do_not_read_is_named(tiny: Path, tmp_path: Path) -> None:
    data = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"I32"'))
    with pytest.raises(UnsupportedModel, match=r"is of type I32; .* reads F32, BF16, F16"):
        Checkpoint(tmp_path)


PEAKS = """
import os, sys, torch
from pathlib import Path
from worker.models.config import read_config
from worker.models.loader import Layout
from worker.models.model import load_model

def memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024

path, small = map(Path, sys.argv[1:])
for dtype in (torch.bfloat16, torch.float32):
    # A process of its own for each, which has torch already.
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    # What the first use of oneDNN and of threads costs is no part of the weights.
    load_model(small, read_config(small), dtype, torch.device("cpu"))
    before = memory("VmRSS")
    model = load_model(path, read_config(path), dtype, torch.device("cpu"))
    print(memory("VmHWM") - before, model.step_bytes, dtype.itemsize, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 22 million parameters, whose values do not matter."""
    path = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 4}
    shape = {"vocab_size": 2000, "num_attention_heads": 8, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("llama", **sizes, **shape), dtype=torch.bfloat16
        )
    model.to_empty(device="cpu").save_pretrained(path)
    edit_config(path, eos_token_id=0)
    return path


@pytest.mark.slow
def test_loading_peaks_at_the_weights_and_one_layer(tiny: Path, large: Path) -> None:
    """Issue: measured by the kernel, in processes of its own."""
    told = python("-c", PEAKS, large, tiny).stdout
    peaks = [list(map(int, line.split())) for line in told.splitlines()]
    assert len(peaks) == 2
    for peak, weights, itemsize in peaks:
        layer = (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 6144) * itemsize
        assert weights > 4 * layer
        assert peak < weights + layer, f"{(peak - weights) / layer:.2f} layers above the weights"
