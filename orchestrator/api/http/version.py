"""Version of this program."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # run from a tree that is not installed
        return "0"


VERSION = _installed()
