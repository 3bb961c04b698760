"""Fetches files over HTTP through ``huggingface_hub``, and resumes after a kill.

The received part of a file is kept as ``….part``. That library's own ``hf_hub_download`` deletes
what it has of a file when it ends early, so its transfer alone (``http_get``) is used: it is given
our file to append to. The caller must check the digest, which shows whether the bytes are right.
"""

import os
import threading
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

from catalog.atomic import write_all
from catalog.errors import StagingFailed

PART = ".part"


class Stopped(Exception):
    """The caller stopped the download."""


class _Appended:
    """The file that a transfer writes, with a count of what came."""

    def __init__(
        self, file: FileIO, on_bytes: Callable[[int], None], stop: threading.Event
    ) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._stop = stop
        self.tell, self.seek = file.tell, file.seek

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise Stopped
        self._on_bytes(len(data))
        write_all(self._file.fileno(), data)
        return len(data)

    def truncate(self) -> int:
        """Drop everything after the present position: the server sends it again."""
        self._on_bytes(self._file.tell() - os.fstat(self._file.fileno()).st_size)
        return self._file.truncate()


def fetch(
    url: str,
    path: Path,
    size: int,
    headers: Mapping[str, str],
    on_bytes: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Fetch a file of ``size`` bytes to ``path``, from where an earlier attempt ended.

    ``on_bytes`` gets the bytes of each piece, negative ones after a step back. ``stop`` ends it at
    the next piece, with ``Stopped``. Raises ``StagingFailed``, and ``OSError`` of the disk.
    """
    part = path.with_name(path.name + PART)
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if part.exists() and part.stat().st_size > size:
        part.unlink()  # of another file, or more than was listed
    part.touch(mode=0o600)
    with part.open("ab", buffering=0) as file:
        on_bytes(file.tell())
        if file.tell() < size:
            _transfer(url, _Appended(file, on_bytes, stop), file.tell(), headers)
    have = part.stat().st_size
    if have != size:
        part.unlink()
        raise StagingFailed(
            f"{path.name} should have {size} bytes, and {url} sends {have}: the listing and the"
            " file do not belong together"
        )
    part.replace(path)


def _transfer(url: str, file: _Appended, begin: int, headers: Mapping[str, str]) -> None:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        http_get(url, file, resume_size=begin, headers=dict(headers))  # type: ignore[arg-type]
    except Stopped:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise StagingFailed(f"{url} is not to be had: the server answers {status}") from error
    except Exception as error:  # of its HTTP library, which differs by version
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise StagingFailed(
            f"the download of {url} was interrupted: {error or type(error).__name__}; run the"
            " command again to resume it"
        ) from error
