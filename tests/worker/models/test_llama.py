"""Logits against transformers, and against ourselves however a text is cut up or batched."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.worker.models.checkpoints import DEMO, LLAMA3_ROPE, make_checkpoint
from tests.worker.models.rig import Rig

VARIANTS: dict[str, dict[str, object]] = {
    "gqa-untied": {},
    "mha-tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "mqa-wide-heads": {"num_key_value_heads": 1, "head_dim": 16},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
}


def random_ids(count: int, vocabulary: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


def oracle(path: Path, ids: list[int]) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_logits_are_those_of_transformers(checkpoint: Path) -> None:
    ids = random_ids(100, 300)
    rig = Rig(checkpoint)
    (logits,) = rig.step((rig.text(ids), len(ids)))
    torch.testing.assert_close(logits, oracle(checkpoint, ids), atol=1e-4, rtol=0)


def test_logits_of_the_demo_model_are_those_of_transformers() -> None:
    """Issue: float32 logits within 1e-4 of transformers on the demo model."""
    ids = random_ids(300, 2048)
    rig = Rig(DEMO)
    (logits,) = rig.step((rig.text(ids), len(ids)))
    torch.testing.assert_close(logits, oracle(DEMO, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 1, 20, 12], [39, 1], [1, 39]])
def test_a_text_in_chunks_is_the_text_at_once(tiny: Path, chunks: list[int]) -> None:
    ids = random_ids(40, 300)
    rig = Rig(tiny)
    (at_once,) = rig.step((rig.text(ids), 40))
    text = rig.text(ids)
    in_chunks = torch.cat([rig.step((text, count))[0] for count in chunks])
    torch.testing.assert_close(in_chunks, at_once, atol=1e-4, rtol=0)


def test_a_text_in_a_batch_is_the_text_alone(tiny: Path) -> None:
    """Decodes of uneven length beside chunks of prompts, step after step."""
    rig = Rig(tiny)
    lengths = [3, 30, 17, 40, 26]
    texts = [rig.text(random_ids(n, 300, seed=n)) for n in lengths]
    alone = []
    for text in texts:
        twin = rig.text(text.ids)
        alone.append(rig.step((twin, len(twin.ids)))[0])
    plan = [  # one column per text: tokens computed in each step
        [1, 10, 0, 0, 0],
        [1, 1, 9, 0, 0],
        [1, 1, 1, 30, 5],
        [0, 1, 1, 1, 20],
        [0, 1, 1, 1, 1],
    ]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in plan:
        rows = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        for i, logits in zip(rows, rig.step(*((texts[i], counts[i]) for i in rows)), strict=True):
            got[i].append(logits)
    for one, (pieces, expected) in enumerate(zip(got, alone, strict=True)):
        logits = torch.cat(pieces)
        torch.testing.assert_close(
            logits,
            expected[: len(logits)],
            atol=1e-4,
            rtol=0,
            msg=lambda m, i=one: f"text {i}: {m}",
        )


def test_stale_pages_are_not_seen(tiny: Path) -> None:
    """A block that another text used before is masked, whatever it holds."""
    ids = random_ids(21, 300)
    rig = Rig(tiny)
    text = rig.text(ids)
    (fresh,) = rig.step((text, 21))
    rig.pool.data.fill_(1e4)
    text.computed = 0
    (again,) = rig.step((text, 21))
    torch.testing.assert_close(again, fresh, atol=1e-5, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_on_cuda(tiny: Path) -> None:
    ids = random_ids(60, 300)
    rig = Rig(tiny, torch.device("cuda"))
    text = rig.text(ids)
    logits = torch.cat([rig.step((text, n))[0] for n in (40, 1, 19)])
    torch.testing.assert_close(logits, oracle(tiny, ids), atol=1e-3, rtol=0)
