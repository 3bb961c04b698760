"""What a model is called, and where it is then (PV-4)."""

from pathlib import Path

import pytest

from catalog.errors import CatalogUnusable, NoSuchModel
from catalog.models import ModelCatalog, ModelEntry, ModelFile, ModelFormat, ModelState
from pool.artifacts.resolve import resolve_model


def _register(home: Path, name: str, file: str, form: ModelFormat) -> ModelEntry:
    catalog = ModelCatalog(home)
    entry = ModelEntry(
        id=f"{name}-0001",
        name=name,
        state=ModelState.STAGING,
        format=form,
        source="hub:org/some",
        created_ms=1,
        files=(ModelFile(file, 4, "00"),),
    )
    (catalog.stage(entry) / file).write_bytes(b"abcd")
    return entry


def test_a_registered_model_is_found_by_name_and_by_id_and_counts_as_used(tmp_path: Path) -> None:
    entry = _register(tmp_path, "small", "config.json", ModelFormat.SAFETENSORS)
    ModelCatalog(tmp_path).activate(entry)
    found = resolve_model("small", tmp_path)
    assert (found / "config.json").read_bytes() == b"abcd"
    assert resolve_model(entry.id, tmp_path) == found
    assert ModelCatalog(tmp_path).get("small").used_ms > 0


def test_a_model_on_its_way_is_refused_with_what_completes_it(tmp_path: Path) -> None:
    _register(tmp_path, "small", "config.json", ModelFormat.SAFETENSORS)
    with pytest.raises(NoSuchModel, match="is staging: tidegate models add org/some completes"):
        resolve_model("small", tmp_path)


def test_folders_and_gguf_files_are_taken_as_they_are_and_no_other(tmp_path: Path) -> None:
    folder, file, other = tmp_path / "folder", tmp_path / "m.gguf", tmp_path / "m.bin"
    folder.mkdir()
    file.write_bytes(b"GGUF")
    other.touch()
    assert resolve_model(str(folder), tmp_path) == folder
    assert resolve_model(str(file), tmp_path) == file
    with pytest.raises(NoSuchModel, match=r"not a GGUF model: give a \.gguf file"):
        resolve_model(str(other), tmp_path)


def test_an_unknown_name_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NoSuchModel, match="none has been added: tidegate models add"):
        resolve_model("none", tmp_path)
    ModelCatalog(tmp_path).activate(
        _register(tmp_path, "small", "config.json", ModelFormat.SAFETENSORS)
    )
    with pytest.raises(NoSuchModel, match=r"available: small; .*\(demo is always there\)"):
        resolve_model("none", tmp_path)


def test_a_model_is_started_from_a_catalog_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a volume that is mounted so."""

    def refused(*_: object) -> None:
        raise CatalogUnusable("cannot write it: Read-only file system")

    ModelCatalog(tmp_path).activate(_register(tmp_path, "q4", "q4.gguf", ModelFormat.GGUF))
    monkeypatch.setattr(ModelCatalog, "touch", refused)
    assert resolve_model("q4", tmp_path).name == "q4.gguf"
