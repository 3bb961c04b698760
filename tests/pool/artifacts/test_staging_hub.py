"""Models from a hub that cuts, corrupts, stalls and lies: all or nothing is registered (PV-4)."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download

from catalog.errors import StagingFailed
from catalog.models import ModelCatalog, ModelEntry, ModelState
from pool.artifacts.staging import AddRequest, StagingProgress, add_model
from tests.support.hub import COMMIT, Faults, Hub
from tests.support.model_files import checkpoint, gguf, safetensors

StartHub = Callable[[Hub], Awaitable[str]]
PIECE = 500


class Counted(StagingProgress):
    def __init__(self) -> None:
        self.bytes = 0

    def came(self, count: int) -> None:
        self.bytes += count


async def add(catalog: ModelCatalog, what: str = "org/model", **requests: object) -> ModelEntry:
    progress = Counted()
    request = AddRequest(what, keep_free=0.0, **requests)  # type: ignore[arg-type]
    entry = await add_model(catalog, request, progress)
    assert progress.bytes in (0, entry.bytes)
    return entry


def whole(catalog: ModelCatalog, hub: Hub, entry: ModelEntry) -> bool:
    folder = catalog.path_of(entry)
    return all((folder / path).read_bytes() == content for path, content in hub.files.items())


def nothing_is_active(catalog: ModelCatalog) -> bool:
    stored = list((catalog.folder / "store").glob("*"))
    return not stored and all(e.state is ModelState.STAGING for e in catalog.entries())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, short timeouts and no pauses."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", PIECE)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))


async def test_a_model_is_fetched_verified_and_registered_once(
    catalog: ModelCatalog, start_hub: StartHub
) -> None:
    hub = Hub(checkpoint(20_000))
    await start_hub(hub)
    entry = await add(catalog)
    assert entry.state is ModelState.ACTIVE and catalog.entries() == (entry,)
    assert (entry.name, entry.revision, entry.license) == ("model", COMMIT, "apache-2.0")
    assert whole(catalog, hub, entry)
    assert len(entry.digest) == 64
    assert not list((catalog.folder / "staging").iterdir())
    hub.requests.clear()
    assert await add(catalog) == entry
    assert not hub.requests


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(cut_after=700, times=8), id="cut"),
        pytest.param(Faults(stall_after=700, times=1), id="stall"),
        pytest.param(Faults(corrupt=1), id="corrupt once"),
        pytest.param(Faults(no_ranges=True), id="no ranges"),
        pytest.param(Faults(no_ranges=True, cut_after=700, times=2), id="no ranges, cut"),
        pytest.param(Faults(redirect=True), id="redirect"),
    ],
)
async def test_what_goes_wrong_on_the_way_is_mended(
    catalog: ModelCatalog, start_hub: StartHub, faults: Faults
) -> None:
    hub = Hub(checkpoint(6000), faults)
    await start_hub(hub)
    assert whole(catalog, hub, await add(catalog))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        pytest.param(Faults(corrupt=99), "does not match its digest, twice", id="corrupt"),
        pytest.param(Faults(cut_after=0, times=99), " was interrupted: ", id="cut"),
        pytest.param(Faults(stall_after=0, times=99), "timed out; run the command", id="stall"),
        pytest.param(
            Faults(false_length=True), "the listing and the file do not match", id="length"
        ),
        pytest.param(Faults(missing=frozenset({"model.safetensors"})), "answers 404", id="missing"),
        pytest.param(Faults(endless_redirect=True), "maximum allowed redirects", id="redirects"),
        pytest.param(Faults(statuses=[500] * 99), "the server answers 500", id="down"),
    ],
)
async def test_what_cannot_be_mended_registers_nothing(
    catalog: ModelCatalog, start_hub: StartHub, faults: Faults, said: str
) -> None:
    hub = Hub(checkpoint(6000), faults)
    await start_hub(hub)
    with pytest.raises(StagingFailed, match=said):
        await add(catalog)
    assert nothing_is_active(catalog)
    hub.faults = Faults()
    assert whole(catalog, hub, await add(catalog))
    assert [entry.state for entry in catalog.entries()] == [ModelState.ACTIVE]


async def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(
    catalog: ModelCatalog, start_hub: StartHub
) -> None:
    hub = Hub(checkpoint(), Faults(redirect=True))
    await start_hub(hub)
    await add(catalog)
    shown = {path.startswith("/cdn/"): token for path, token in hub.tokens}
    assert shown == {False: "Bearer hf_secret", True: None}


PICKLES = {
    "config.json": b'{"model_type": "x"}',
    "pytorch_model.bin": b"\x80" * 2000,
    "training_args.bin": b"x",
}
GGUFS = {"m-Q4_K_M.gguf": gguf(300), "m-Q8_0.gguf": gguf(400)}


@pytest.mark.parametrize(
    ("files", "request_", "said"),
    [
        ({}, {"what": "org/none"}, "has no model org/none"),
        ({}, {"revision": "v9"}, "has no revision 'v9'"),
        ({}, {"what": "nowhere"}, r"expected a folder, a \.gguf file, or org/name"),
        ({"../../evil.json": b"{}"}, {}, "would leave its folder"),
        ({"a/.tidegate.json": b"{}"}, {}, "which is Tidegate's own"),
        ({"LICENSE/./x": b"x"}, {}, "the source has a file"),
        ({"LICENSE//x": b"x"}, {}, "the source has a file"),
        ({"LICENSE\x1b[2J": b"x"}, {}, r"a file 'LICENSE\\x1b\[2J'"),
        (PICKLES | {"model.safetensors": None}, {}, "pickles: they can run any code"),
        (
            dict.fromkeys(checkpoint()) | {"notes.txt": b"hello"},
            {},
            r"expected config\.json .*there is notes\.txt \(5 bytes\)",
        ),
        (
            GGUFS | {"model.safetensors": None},
            {},
            r"2 GGUF models; .*--file: m-Q4_K_M\.gguf \(1\.\d kB\)",
        ),
        ({"model.safetensors": safetensors(5000)[:-10]}, {}, "bytes, and its tensors make"),
    ],
)
async def test_what_is_no_model_is_refused_with_the_reason(
    catalog: ModelCatalog,
    start_hub: StartHub,
    files: dict[str, bytes | None],
    request_: dict[str, str],
    said: str,
) -> None:
    there = checkpoint() | files
    await start_hub(Hub({path: data for path, data in there.items() if data is not None}))
    with pytest.raises(StagingFailed, match=said):
        await add(catalog, **request_)
    assert nothing_is_active(catalog)


async def test_of_safetensors_and_pickles_only_the_safetensors_come(
    catalog: ModelCatalog, start_hub: StartHub
) -> None:
    extra = ("pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors")
    await start_hub(Hub(checkpoint() | dict.fromkeys(extra, b"x")))
    entry = await add(catalog)
    assert {file.path for file in entry.files} == set(checkpoint())


async def test_of_several_gguf_files_one_is_chosen_by_a_pattern(
    catalog: ModelCatalog, start_hub: StartHub
) -> None:
    await start_hub(Hub(GGUFS))
    entry = await add(catalog, file="*Q4*")
    assert catalog.servable_path(entry).name == "m-Q4_K_M.gguf"
