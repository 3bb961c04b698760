"""Lists a model hub's repository and fetches its files through ``huggingface_hub``, which finds the
endpoint (``HF_ENDPOINT``), the token and the commit.

A partial download is kept as ``….part``. The library's ``hf_hub_download`` deletes a partial file
when it ends early. So this module uses only the library's ``http_get``, which appends to our file.
The caller must check the digest to verify the bytes.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Final

from catalog.atomic import write_all
from catalog.errors import StagingFailed
from pool.artifacts.source import Listing, SourceFile

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TIMEOUT_S: Final = 30.0
_LICENSE_CHARS: Final = 120


def is_repository(text: str) -> bool:
    """Whether ``text`` could be a hub's name for a model: ``org/name``."""
    return _REPOSITORY.fullmatch(text) is not None


def list_hub(repository: str, revision: str = "") -> Listing:
    """List the hub's files of a repository at ``revision``, by default its main branch. Raises
    ``StagingFailed``."""
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        info = api.model_info(
            repository, revision=revision or None, files_metadata=True, timeout=_TIMEOUT_S
        )
    except RevisionNotFoundError:
        raise StagingFailed(
            f"{repository} has no revision {revision!r} at {api.endpoint}"
        ) from None
    except GatedRepoError:
        raise StagingFailed(
            f"{repository} requires that you accept its license: do that at"
            f" {api.endpoint}/{repository}, and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise StagingFailed(
            f"{api.endpoint} has no model {repository}, or requires a token for it: check the name,"
            " or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise StagingFailed(f"{api.endpoint} did not describe {repository}: {error}") from error
    except Exception as error:  # raised by its HTTP library, which differs by version
        raise StagingFailed(
            f"cannot reach {api.endpoint} for {repository}: {error or type(error).__name__};"
            " check the network, or set a mirror with HF_ENDPOINT"
        ) from error
    files = []
    for each in info.siblings or ():
        if each.size is None:
            raise StagingFailed(f"{api.endpoint} does not state the size of {each.rfilename}")
        sha256 = each.lfs.sha256 if each.lfs is not None else ""
        git = "" if sha256 else each.blob_id or ""
        files.append(SourceFile(each.rfilename, each.size, sha256, git))
    commit = info.sha or revision
    token = get_token()
    return Listing(
        source=f"hub:{repository}",
        name=repository,
        files=tuple(files),
        revision=commit,
        license=_license(info.card_data, info.tags or []),
        urls={
            file.path: hf_hub_url(repository, file.path, revision=commit, endpoint=api.endpoint)
            for file in files
        },
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


def _license(card: object, tags: list[str]) -> str:
    stated = getattr(card, "license_name", None) or getattr(card, "license", None)
    if isinstance(stated, list):
        stated = ", ".join(map(str, stated))
    tagged = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    text = " ".join(str(stated or ", ".join(tagged)).split())
    # The author's text is shown on terminals.
    return "".join(each for each in text if each.isprintable())[:_LICENSE_CHARS]


class Stopped(Exception):
    """The caller stopped the download."""


class _Appended:
    """The file that a transfer writes; counts the bytes received."""

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
        """Drop everything after the current position: the server sends it again."""
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
    """Fetch a file of ``size`` bytes to ``path``, and resume an earlier attempt. ``on_bytes`` gets
    the byte count of each chunk, negative after a step back. ``stop`` ends it at the next chunk,
    with ``Stopped``. Raises ``StagingFailed``, or ``OSError`` for disk errors."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if part.exists() and part.stat().st_size > size:
        part.unlink()  # from another file, or too long
    part.touch(mode=0o600)
    with part.open("ab", buffering=0) as file:
        on_bytes(file.tell())
        if file.tell() < size:
            _transfer(url, _Appended(file, on_bytes, stop), file.tell(), headers)
    have = part.stat().st_size
    if have != size:
        part.unlink()
        raise StagingFailed(
            f"{path.name} should have {size} bytes, but {url} sends {have}: the listing and the"
            " file do not match; try again"
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
        raise StagingFailed(f"{url} is not available: the server answers {status}") from error
    except Exception as error:  # from its HTTP library, which differs by version
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise StagingFailed(
            f"the download of {url} was interrupted: {error or type(error).__name__}; run the"
            " command again to resume it"
        ) from error
