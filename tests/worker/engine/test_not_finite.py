"""WK-12: a row whose numbers are not finite ends with a named error, and nobody else sees them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol import Code, FinishReason, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import end_of, ids_of
from tests.worker.engine.test_torch_engine import FAR, build, greedy, prompt, run
from worker.core import Event, Job
from worker.engine.engine import Engine

TAUGHT = {*np.random.default_rng(0).integers(0, 300, 128).tolist(), *prompt(60), *prompt(60, 1)}
POISON = next(token for token in range(299, 0, -1) if token not in TAUGHT)
"""Its embedding is NaN. In no text of these tests but where it is named, nor in that which
deterministic mode tries itself on."""
WAYS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 5},
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
]
"""Every way to sample is in tests/worker/sampling and in tests/worker/runner/test_cuda_runner."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


BACKENDS: list[dict[str, object]] = [
    {"attention": "reference"},
    {"attention": "numba"},
    {"deterministic": True, "block_tokens": 16},
]


@pytest.fixture(params=BACKENDS, ids=lambda settings: "-".join(map(str, settings.values())))
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    found: dict[str, object] = request.param
    return found


def failed(job: Job, events: list[Event]) -> bool:
    end = end_of(job, events)
    is_named = (end.reason, end.code) == (FinishReason.ERROR, Code.NOT_FINITE)
    assert not is_named or not ids_of(job, events)
    return is_named


def test_who_has_the_blocks_next_is_spared(poisoned: Path, settings: dict[str, object]) -> None:
    """0 times NaN is NaN: what is masked must be finite all the same."""
    expected = ids_of(job := greedy(prompt(21), 12), run(build(poisoned, **settings), [job]))
    # No more blocks than one of them needs: the other one's are all there are.
    blocks = 64 // int(str(settings.get("block_tokens", 4)))
    engine = build(poisoned, kv__blocks=blocks, **settings)
    for at in (0, 59):
        spoilt = greedy([*prompt(at), POISON, *prompt(59 - at)])
        assert failed(spoilt, run(engine, [spoilt]))
        assert not list(engine.scheduler.pool.hashes)
        job = greedy(prompt(21), 12)
        events = run(engine, [job])
        assert ids_of(job, events) == expected
    assert engine.stats().not_finite_total == 2


def test_other_rows_of_the_batch_go_on(poisoned: Path, settings: dict[str, object]) -> None:
    """Also those whose texts begin alike, and those that are shorter, whose rows are padded."""

    def sound() -> list[Job]:
        lengths = [3, 60, 17, 1, 30]
        return [greedy(prompt(n), 6 + n % 5, **way) for n, way in zip(lengths, WAYS, strict=True)]  # type: ignore[arg-type]

    engine = build(poisoned, **settings)
    alone = [ids_of(job, run(engine, [job])) for job in sound()]
    engine = build(poisoned, **settings)
    jobs = sound()
    spoilt = [greedy([*prompt(n), POISON, *prompt(50 - n)], 9) for n in (0, 20, 50)]
    for job in [spoilt[0], *jobs[:2], spoilt[1], *jobs[2:], spoilt[2]]:
        engine.submit(job)
    events = run(engine, [])
    assert all(failed(job, events) for job in spoilt)
    assert [ids_of(job, events) for job in jobs] == alone


def test_a_padded_row_has_nothing_of_anothers(poisoned: Path, settings: dict[str, object]) -> None:
    """Two that decode, of which the shorter is padded, while a third one spoils the first block."""

    def jobs() -> list[Job]:
        return [greedy(prompt(3), 1), greedy(prompt(60), 20), greedy(prompt(5), 20)]

    alone = jobs()
    expected = run(build(poisoned, kv__prefix_cache=False, **settings), alone)
    engine = build(poisoned, kv__prefix_cache=False, **settings)
    together = jobs()
    for job in together:
        engine.submit(job)
    events = engine.step()
    while 0 in [block for one in engine.scheduler.running for block in one.blocks]:
        events += engine.step()
    while any(len(one.tokens) == one.prompt_tokens for one in engine.scheduler.running):
        events += engine.step()
    spoilt = greedy([POISON], 3)  # of one block
    engine.submit(spoilt)
    events += engine.step()
    assert failed(spoilt, events)
    events += run(engine, [])
    assert [ids_of(job, events) for job in together] == [ids_of(job, expected) for job in alone]


def test_who_shares_the_head_of_a_spoilt_text_keeps_it(poisoned: Path) -> None:
    """Their blocks are not cleared while they run; the head is computed again by the next one."""
    engine = build(poisoned)
    expected = ids_of(job := greedy(prompt(40), 30), run(engine, [job]))
    engine = build(poisoned)
    sharing = greedy(prompt(40), 30)
    engine.submit(sharing)
    events = [event for _ in range(8) for event in engine.step()]
    spoilt = greedy([*prompt(40), POISON], 5)
    engine.submit(spoilt)
    events += run(engine, [])
    assert failed(spoilt, events) and end_of(spoilt, events).cached_tokens == 40
    assert ids_of(sharing, events) == expected
    again = greedy(prompt(40), 30)
    assert ids_of(again, run(engine, [again])) == expected


def test_a_conversation_that_was_spoilt_is_not_on_disk(poisoned: Path, tmp_path: Path) -> None:
    """WK-5: nor does a block stay there that was found to be so."""

    def engine_on_disk() -> Engine:
        return build(poisoned, kv__disk_path=tmp_path)

    def talk(engine: Engine, text: list[int]) -> list[Event]:
        job = Job(text, Sampling(4, temperature=0.0), FAR, session="chat")
        engine.submit(job)
        events = engine.step()
        while engine.scheduler.has_work:  # and not until the disk is done
            events += engine.step()
        return events

    engine = engine_on_disk()
    talk(engine, [*prompt(40), POISON])
    engine.stop()
    assert not list(tmp_path.rglob("*.safetensors"))
    engine = engine_on_disk()
    talk(engine, prompt(40))
    engine.stop()
    assert len(list(tmp_path.rglob("*.safetensors"))) >= 10
    engine = engine_on_disk()
    talk(engine, [*prompt(40), POISON])
    engine.stop()
    assert not list(tmp_path.rglob("*.safetensors")), "its head may be what is wrong with it"
