"""Lists a model hub's repository through ``huggingface_hub``.

That library finds the endpoint (``HF_ENDPOINT``), the token and the commit; ``download`` fetches
the files through it.
"""

import asyncio
import os
import re
from typing import Final

from catalog.errors import StagingFailed
from pool.artifacts.source import Listing, SourceFile

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TIMEOUT_S: Final = 30.0
_LICENCE_CHARS: Final = 120


def is_repository(text: str) -> bool:
    """Whether ``text`` could be a hub's name for a model: ``org/name``."""
    return _REPOSITORY.fullmatch(text) is not None


async def list_hub(repository: str, revision: str = "") -> Listing:
    """The files that the hub has of a repository at ``revision``, its main branch by default.

    Raises ``StagingFailed``.
    """
    return await asyncio.to_thread(_list, repository, revision)


def _list(repository: str, revision: str) -> Listing:
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
        raise StagingFailed(_gated(repository, api.endpoint)) from None
    except RepositoryNotFoundError:
        raise StagingFailed(
            f"{api.endpoint} has no model {repository}, or requires a token for it: check the name,"
            " or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise StagingFailed(f"{api.endpoint} did not describe {repository}: {error}") from error
    except Exception as error:  # raised by its HTTP library, which differs by version
        raise StagingFailed(
            f"cannot reach {api.endpoint} for {repository}: {error or type(error).__name__}; look"
            " at the network, or name a mirror with HF_ENDPOINT"
        ) from error
    files = []
    for each in info.siblings or ():
        if each.size is None:
            raise StagingFailed(f"{api.endpoint} does not tell how long {each.rfilename} is")
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
        licence=_licence(info.card_data, info.tags or []),
        urls={
            file.path: hf_hub_url(repository, file.path, revision=commit, endpoint=api.endpoint)
            for file in files
        },
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


def _licence(card: object, tags: list[str]) -> str:
    stated = getattr(card, "license_name", None) or getattr(card, "license", None)
    if isinstance(stated, list):
        stated = ", ".join(map(str, stated))
    tagged = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    text = " ".join(str(stated or ", ".join(tagged)).split())
    # its author's words, which are shown on terminals
    return "".join(each for each in text if each.isprintable())[:_LICENCE_CHARS]


def _gated(repository: str, endpoint: str) -> str:
    return (
        f"{repository} requires that you accept its licence: do that at"
        f" {endpoint}/{repository}, and set HF_TOKEN to a token of that account"
    )
