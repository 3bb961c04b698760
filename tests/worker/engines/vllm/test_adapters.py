"""LoRA adapters: which are served next to a model, and on the real vLLM what they make of texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import real_vllm
from tests.support.checkpoints import make_adapter, make_checkpoint, merge_adapter
from tests.support.engine import end_of, ids_of
from tests.support.likeliest import assert_likeliest, oracle
from tests.support.real_vllm import finish, greedy, settings, skip_without_vllm
from tests.worker.engines.vllm.test_families import HEADS, TOKENS, prompt
from worker.core import Job
from worker.engine.loop import EngineLoop
from worker.engines import load_engine
from worker.engines.vllm.adapters import adapter_defaults, adapters_of, load_adapters
from worker.errors import BrokenCheckpoint
from worker.loaded import LoadedEngine

pytestmark = real_vllm.MARKS

ATTENTION, EVERY = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return make_checkpoint(tmp_path / "base")


def test_vllm_gets_room_for_all_of_them_and_the_greatest_rank(base: Path, tmp_path: Path) -> None:
    assert adapter_defaults(settings(base)) == {}
    small = make_adapter(tmp_path / "small", base, ATTENTION)
    large = make_adapter(tmp_path / "large", base, EVERY, rank=9)
    asked = settings(base, adapters={"tone": small, "law": large})
    found = adapter_defaults(asked)
    assert found == {"enable_lora": "true", "max_loras": "3", "max_lora_rank": "16"}
    on_gpu = settings(base, adapters={"tone": small, "law": large}, device="cuda")
    assert adapter_defaults(on_gpu)["max_loras"] == "2"
    tone, law = adapters_of(asked)
    assert (tone.name, law.name) == ("tone", "law")
    assert tone.digest != law.digest and len(bytes.fromhex(tone.digest)) == 32


@pytest.mark.parametrize(
    ("rank", "args", "most"), [(513, {}, 512), (20, {"max_lora_rank": "16"}, 16)]
)
def test_an_adapter_of_too_high_a_rank_is_refused_by_name(
    base: Path, tmp_path: Path, rank: int, args: dict[str, str], most: int
) -> None:
    path = make_adapter(tmp_path / "tone", base, ATTENTION, rank=rank)
    why = f"adapter tone of TIDEGATE_WORKER__ADAPTERS has rank {rank}, more than the {most}"
    with pytest.raises(BrokenCheckpoint, match=why):
        adapter_defaults(settings(base, adapters={"tone": path}, engine_args=args))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("model.layers.3.self_attn.q_proj", (48, 48), r"has no model\.layers\.3$"),
        ("model.layers.2.self_attn.q_proj", (48, 64), "has 64 inputs, and the model's has 48"),
        ("model.layers.2.self_attn.q_proj", (64, 48), "has 64 outputs, and the model's has 48"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    base: Path, tmp_path: Path, name: str, shape: tuple[int, ...], why: str
) -> None:
    (tmp_path / "other").mkdir()
    weights = load_file(base / "model.safetensors") | {f"{name}.weight": torch.zeros(shape)}
    save_file(weights, tmp_path / "other" / "model.safetensors")
    path = make_adapter(tmp_path / "tone", tmp_path / "other", ATTENTION)
    with pytest.raises(BrokenCheckpoint, match=f"it is for another model: .*{why}"):
        adapter_defaults(settings(base, adapters={"tone": path}))


def test_a_folder_that_is_none_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"tone .*as PEFT writes it.*adapter_config\.json"):
        adapter_defaults(settings(base, adapters={"tone": tmp_path}))
    path = make_adapter(tmp_path / "cut", base, ATTENTION)
    (path / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(BrokenCheckpoint, match=r"tone .* cannot be read"):
        adapter_defaults(settings(base, adapters={"tone": path}))


def test_other_engines_say_that_they_have_none(base: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "tone", base, ATTENTION)
    with pytest.raises(ValueError, match="TIDEGATE_WORKER__ADAPTERS: the engine torch serves no"):
        load_engine(settings(base, engine="torch", adapters={"tone": path}))


class Served:
    """A model with adapters on vLLM, and what each adapter makes of the model when merged."""

    def __init__(self, folder: Path) -> None:
        (folder / "base").mkdir()
        base = make_checkpoint(folder / "base", "llama", max_position_embeddings=512, **HEADS)
        self.adapters = adapters = {
            "tone": make_adapter(folder / "tone", base, ATTENTION),
            "law": make_adapter(folder / "law", base, EVERY, rank=9, seed=2),
        }
        self.weights = {"": base} | {
            name: merge_adapter(folder / f"merged-{name}", base, path)
            for name, path in adapters.items()
        }
        args = {"enforce_eager": "true"}
        asked = settings(base, max_running=4, adapters=adapters, engine_args=args)
        self.loaded: LoadedEngine = load_engine(asked)
        assert isinstance(self.loaded.engine, EngineLoop)
        self.engine = self.loaded.engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    skip_without_vllm()
    served = Served(tmp_path_factory.mktemp("adapters"))
    yield served
    served.engine.stop()


def asking(adapter: str, length: int) -> Job:
    job = greedy(prompt(length), TOKENS)
    job.adapter = adapter
    return job


def test_texts_are_those_of_the_merged_weights(served: Served) -> None:
    """All in the same steps, where none may get its neighbour's adapter, nor the model any."""
    jobs = [asking(name, length) for length in (5, 40) for name in served.weights]
    events = finish(served.engine, jobs)
    texts = [ids_of(job, events) for job in jobs]
    assert len({tuple(text) for text in texts}) == len(jobs)
    for job, text in zip(jobs, texts, strict=True):
        assert_likeliest(oracle(served.weights[job.adapter]), list(job.token_ids), text)


def test_an_adapter_does_not_take_its_models_kv_for_its_own(served: Served) -> None:
    card = served.loaded.card
    assert [one.name for one in card.adapters] == ["tone", "law"]
    for name in served.weights:
        for is_known in (False, True):
            job = asking(name, 3 * card.block_tokens // 2)
            end = end_of(job, finish(served.engine, [job]))
            assert end.cached_tokens == is_known * card.block_tokens


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"bias": "all"}, "bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": None}, "lora_alpha|unsupported operand"),
    ],
)
def test_what_vllm_refuses_is_told_with_the_adapters_name(
    served: Served, tmp_path: Path, made: dict[str, Any], why: str
) -> None:
    """Asked of the vLLM that runs: a second one in this process takes half a minute."""
    core = served.engine.backend.core._core  # type: ignore[attr-defined]
    path = make_adapter(tmp_path / "odd", served.weights[""], ATTENTION, **made)
    adapters = served.adapters | {"odd": path}
    with pytest.raises(
        BrokenCheckpoint, match=f"the adapter odd of .*: vLLM does not take it: .*{why}"
    ):
        load_adapters(core, settings(served.weights[""], adapters=adapters))
