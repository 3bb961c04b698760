"""Takes models from a folder or file on this machine."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Final

from catalog.checks import check_gguf
from catalog.errors import StagingFailed
from pool.artifacts.source import Listing, SourceFile
from protocol.gguf import as_text, gguf_name, parts_of

_FICLONE: Final = 0x40049409
"""Linux ioctl that makes a file share another file's blocks until either is written."""
_CANNOT_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)
_SMALL_BYTES: Final = 2**20
_CACHE_PREFIX: Final = "models--"
_LICENSE: Final = re.compile(r"^licen[sc]e(_name)?: *[\"']?([^\"'\n]+)", re.MULTILINE)


def list_local(path: Path) -> Listing:
    """List the files at ``path``, with all parts of a split file. Raises ``StagingFailed``."""
    path = path.expanduser().absolute()
    if path.is_file():
        try:
            files = parts_of(path)
        except ValueError as error:
            raise StagingFailed(str(error)) from None
    elif path.is_dir():
        files = [each for each in path.rglob("*") if each.is_file() and ".git" not in each.parts]
    else:
        raise StagingFailed(f"there is no folder or file {path}")
    root = path if path.is_dir() else path.parent
    return Listing(
        source=str(path),
        name=_name(path),
        files=tuple(
            SourceFile(str(file.relative_to(root)), file.stat().st_size) for file in sorted(files)
        ),
        license=_license(path),
    )


def _name(path: Path) -> str:
    """The folder's or file's name; ``org/name`` for a snapshot in a Hugging Face cache."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith(_CACHE_PREFIX):
        return repository.removeprefix(_CACHE_PREFIX).replace("--", "/")
    return gguf_name(path) if path.is_file() else path.name


def _license(path: Path) -> str:
    """The license in the model card's front matter, the GGUF's header, or a license's title."""
    if path.is_file():
        with contextlib.suppress(StagingFailed, OSError):
            return as_text(str(check_gguf(path).get("general.license", "")))
        return ""
    with contextlib.suppress(OSError):
        front = (path / "README.md").read_text(errors="replace").split("---", 2)
        found = {match[1]: match[2].strip() for match in _LICENSE.finditer("---".join(front[1:2]))}
        if found:
            return found.get("_name") or found[None]
    for file in sorted((*path.glob("LICENSE*"), *path.glob("LICENCE*"))):
        with contextlib.suppress(OSError):
            lines = file.read_text(errors="replace").splitlines()
            return next((line.strip() for line in lines if line.strip()), "")
    return ""


def take(source: Path, target: Path, *, copy: bool = False) -> None:
    """Copy or link ``source`` to ``target``, without using more disk space if possible. Small files
    are never hard-linked, because people edit them. Raises ``OSError``."""
    source = source.resolve()  # a Hugging Face cache has links to its files
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    partial.unlink(missing_ok=True)
    if copy or not _link(source, partial):
        with source.open("rb") as old, partial.open("xb") as new:
            shutil.copyfileobj(old, new, 2**20)
            new.flush()
            os.fsync(new.fileno())
    os.replace(partial, target)
    # Renaming one hard link of a file over another does nothing, and leaves both names.
    partial.unlink(missing_ok=True)


def can_link(source: Path, folder: Path) -> bool:
    """Whether ``take`` can link ``source``: it is on the file system of ``folder``, and the kernel
    lets us link it (fs.protected_hardlinks)."""
    status = source.stat()
    is_ours = status.st_uid == os.geteuid() or os.access(source, os.R_OK | os.W_OK)
    return status.st_dev == folder.stat().st_dev and is_ours


def _link(source: Path, target: Path) -> bool:
    """Make ``target`` share the blocks of ``source``, or hard-link it; return whether it worked."""
    with source.open("rb") as old, target.open("xb") as new, contextlib.suppress(OSError):
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return True
    target.unlink()
    if source.stat().st_size <= _SMALL_BYTES:
        return False
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True
