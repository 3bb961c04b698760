"""Replaces paths that Triton cannot take by links.

Its Python backend starts a model by ``bash -c "exec STUB MODEL …"`` and quotes nothing: a path with
a space is two words there, and shell characters in one would be executed. The stub's Python assumes
ASCII names. So other paths get links, which are next to the server's shared memory and named like
it: removing that also removes them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pool.engines.triton import TritonInstall, TritonSpec
from pool.process.guardian import SHARED_MEMORY

_PLAIN = re.compile(r"/[\w@%+=,./-]*", re.ASCII)


def is_plain(path: Path) -> bool:
    """Whether a shell, a list of directories and an ASCII program all take ``path`` as it is."""
    return _PLAIN.fullmatch(str(path)) is not None


class Links:
    """Links of one start of a server, named ``prefix`` and their purpose."""

    def __init__(self, prefix: str, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._prefix = prefix

    def to(self, path: Path, name: str) -> Path:
        """``path`` itself if it is plain, otherwise a new link to it. Raises ``OSError``."""
        if is_plain(path):
            return path
        link = self._folder / f"{self._prefix}{name}"
        link.symlink_to(path)
        return link

    def install(self, install: TritonInstall) -> TritonInstall:
        """``install`` with links for the directories that end up in the shell's command."""
        libraries = (self.to(p, f"libraries-{i}") for i, p in enumerate(install.library_path))
        return replace(
            install,
            backend_dir=self.to(install.backend_dir, "backends"),
            library_path=tuple(libraries),
        )

    def spec(self, spec: TritonSpec) -> TritonSpec:
        """``spec`` with a link for its models."""
        return replace(spec, model_repository=self.to(spec.model_repository, "models"))

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with links for what the stub imports: code, and the first Python's folder."""
        code = [self._entry(e, f"code-{i}") for i, e in enumerate(_entries(env, "PYTHONPATH"))]
        first, *others = _entries(env, "PATH") or [""]
        linked = dict(env)
        if code:
            linked["PYTHONPATH"] = os.pathsep.join(code)
        if first and not is_plain(Path(first)):
            python = self.to(Path(first).parent, "python")
            linked["PATH"] = os.pathsep.join([str(python / Path(first).name), *others])
            if env.get("VIRTUAL_ENV") == str(Path(first).parent):
                linked["VIRTUAL_ENV"] = str(python)
        return linked

    def _entry(self, entry: str, name: str) -> str:
        return str(self.to(Path(entry), name)) if os.path.isabs(entry) else entry


def _entries(env: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in env.get(name, "").split(os.pathsep) if entry]
