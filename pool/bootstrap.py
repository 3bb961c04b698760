"""Sets up a checkout for ``make``: ``.venv`` with pinned packages, and a Triton server.

    python -m pool.bootstrap [--dev] [--slot] [--torch-index URL] [--pip-args "…"]

By default it installs only the run-time packages. ``--dev`` adds the packages for development,
``--slot`` the packages for clips. A part is skipped if its stamp matches this Python,
``pyproject.toml`` and ``constraints.txt``, so a second run needs no network. A stamp is written
last, so an interrupted set-up can simply be repeated. Standard library only.
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from catalog.atomic import write_atomically
from catalog.errors import ProvisionError
from catalog.paths import NGC_ROOT, ROOT, state_dir
from pool.engines import triton_wheel as wheel
from pool.preflight.host import check_platform, check_venv_module, python_version

VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
_STAMP = ".tidegate-stamp"
_SLOT_STAMP = ".tidegate-slot-stamp"
_DEV_STAMP = ".tidegate-dev-stamp"
_COVERS = {
    _STAMP: ("cpu", (_STAMP,)),
    _SLOT_STAMP: ("cpu,slot", (_STAMP, _SLOT_STAMP)),
    _DEV_STAMP: ("cpu,dev", (_STAMP, _SLOT_STAMP, _DEV_STAMP)),
}
"""By requested stamp: the extras to install, and the stamps that they satisfy."""
_PATH_FILE = "tidegate-checkout.pth"
_INPUTS = ("pyproject.toml", "constraints.txt")


class PipFailed(ProvisionError):
    """pip could not install something."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up .venv and the Triton server.")
    parser.add_argument("--dev", action="store_true", help="also install packages for tests")
    parser.add_argument("--slot", action="store_true", help="also install packages for clips")
    parser.add_argument("--torch-index", default="", help="one more package index, for torch")
    parser.add_argument("--pip-args", default="", help="more arguments for pip install")
    args = parser.parse_args()
    pip_args = shlex.split(args.pip_args)
    if args.torch_index:
        pip_args += ["--extra-index-url", args.torch_index]
    wanted = _DEV_STAMP if args.dev else _SLOT_STAMP if args.slot else _STAMP
    is_current = _has_stamp(wanted)
    needs_triton = not (NGC_ROOT / "bin" / "tritonserver").exists()
    try:
        if needs_triton:
            check_platform()  # before a download of minutes
        if not is_current:
            make_venv(pip_args)
        with ThreadPoolExecutor(1) as threads:
            triton = threads.submit(set_up_triton, pip_args) if needs_triton else None
            if not is_current:
                install_packages(pip_args, wanted)
            if triton is not None:
                triton.result()
    except ProvisionError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


def make_venv(pip_args: list[str]) -> None:
    """Create ``.venv`` with the pinned pip. Replaces a broken one, or one of another Python."""
    if not _venv_fits():
        check_venv_module()
        _say(f".venv for Python {python_version()}")
        # Use the base interpreter: .venv cannot rebuild itself while it runs.
        base: str = getattr(sys, "_base_executable", None) or sys.executable
        _run([base, "-m", "venv", "--clear", str(VENV)], "cannot create .venv")
    # Installs the build backend, so that a build needs no network. The pip that comes with Python
    # may be years old, and up to 50 % slower.
    _pip_install(["pip", "setuptools", *pip_args])


def set_up_triton(pip_args: list[str]) -> None:
    """Unpack the wheel's Triton server, unless that was done for this Python."""
    home = state_dir()
    if wheel.is_prepared(home):
        return
    _say(f"Triton server {wheel.SERVER_VERSION} into {os.path.relpath(home)}")
    wheel.prepare(
        home,
        lambda target: _pip_install(["--target", str(target), *wheel.PIP_ARGUMENTS, *pip_args]),
    )


def install_packages(pip_args: list[str], wanted: str) -> None:
    """Install the packages that ``constraints.txt`` pins, and the checkout in editable mode."""
    extras, stamps = _COVERS[wanted]
    _say(f"Python packages ({extras}) into .venv (the first time takes minutes)")
    for stamp in _COVERS:  # an install may also change packages of the other stamps
        (VENV / stamp).unlink(missing_ok=True)
    asked_for = ["--no-build-isolation", "--editable", f".[{extras}]"]
    # The user's pip options decide where packages come from.
    if pip_args or not _uv_install(asked_for):
        _pip_install([*asked_for, *pip_args])
    _have_the_client_seen()
    for stamp in stamps:
        write_atomically(VENV / stamp, _stamp().encode(), 0o644)


def _have_the_client_seen() -> None:
    """Write the client's folder into a path file. mypy and pyright read path files, but not the
    import hook that pip installs for a checkout.

    The path is relative, so that it is ASCII: with any other path, the Python of Triton's stub
    would not start.
    """
    packages = VENV / "lib" / f"python{python_version()}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    folder = os.path.relpath(ROOT / "client", packages)
    write_atomically(packages / _PATH_FILE, f"{folder}\n".encode(), 0o644)


def _has_stamp(name: str) -> bool:
    stamp = VENV / name
    return stamp.is_file() and stamp.read_text() == _stamp()


def _stamp() -> str:
    digest = hashlib.sha256(f"{sys.version}\n{sys.base_prefix}\n{ROOT}\n".encode())
    for name in _INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _venv_fits() -> bool:
    """Whether ``.venv`` exists, works, and has the Python that is running."""
    ask = "import sys, pip; print(sys.version, sys.base_prefix, sep='\\n', end='')"
    try:
        answer = subprocess.run(
            [VENV_PYTHON, "-c", ask], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return answer.stdout == f"{sys.version}\n{sys.base_prefix}"


def _pip_install(arguments: list[str]) -> None:
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--constraint", "constraints.txt"]
    if not sys.dont_write_bytecode:
        # Compiling byte code would take half of the time, mostly for modules that are never
        # imported. The others are compiled on first use, which adds a second to the first start.
        pip.append("--no-compile")
    _run(
        [*pip, *arguments],
        "pip failed (its output is above); without a network, give a mirror or a folder of "
        'wheels: make PIP_ARGS="--index-url URL" or PIP_ARGS="--no-index --find-links DIR"',
    )


def _uv_install(arguments: list[str]) -> bool:
    """Install with uv, which resolves in seconds and chooses torch's build for this machine:
    without a GPU, it is 4 GB smaller than PyPI's. Returns False on any failure; then use pip."""
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(VENV_PYTHON)]
    try:
        _pip_install(["uv"])
        command = [*uv, "--torch-backend", "auto", "--constraint", "constraints.txt", *arguments]
        _run(command, "uv failed")
    except PipFailed:
        _say("uv failed, see above; pip installs the packages and takes longer")
        return False
    return True


def _run(command: list[str], what_failed: str) -> None:
    # Hide warnings of the build backend, which do not concern the user. Skip uv's three retries of
    # an unreachable index: pip is the next attempt.
    env = os.environ | {"PYTHONWARNINGS": "ignore", "UV_HTTP_RETRIES": "0"}
    if subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode != 0:
        raise PipFailed(what_failed)


def _say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
