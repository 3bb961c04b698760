"""Words that a stranger can read alone."""

import re

import pytest

from tests.test_layers import PACKAGES, ROOT

_LEANING = re.compile(
    r'^[ \t]*"""(?:Also|And|As|But|By|Else|It|Its|Likewise|None|Of|Or|Same|So|Such|That|Their'
    r"|Them|Then|These|They|The same|This|Those|Which|Who|Whose)\b.*",
    re.M,
)


@pytest.mark.parametrize("package", [*PACKAGES, "model_repository"])
def test_no_docstring_leans_on_what_stands_before_it(package: str) -> None:
    """Whoever reads it in an editor's pop-up sees nothing else."""
    found = []
    for file in sorted((ROOT / package).rglob("*.py")):
        text = file.read_text("utf-8")
        for match in _LEANING.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{file.relative_to(ROOT)}:{line}: {match[0].strip()}")
    assert not found, "\n".join(found)
