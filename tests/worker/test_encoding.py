"""Paths and texts beyond ASCII, in an interpreter that takes everything for ASCII."""

import os
from pathlib import Path

from tests.support.processes import python
from worker.encoding import openable

SEEN_AS_ASCII = "h\udcc3\udcb6he"


def test_a_path_is_openable_wherever_it_comes_from() -> None:
    for path in (Path("/höhe"), Path(f"/{SEEN_AS_ASCII}")):
        assert str(openable(path, "ascii")) == f"/{SEEN_AS_ASCII}"
        assert str(openable(path, "utf-8")) == "/höhe"


def test_files_and_the_log_are_utf_8_in_a_process_that_began_in_ascii(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("höhe", "utf-8")
    program = f"""
import locale, sys
from pathlib import Path
from worker.encoding import speak_utf8
locale.setlocale(locale.LC_CTYPE, "C")
assert sys.getfilesystemencoding() == "ascii"
speak_utf8()
print(Path({str(file)!r}).read_text())
"""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    assert python("-X", "utf8=0", "-c", program, env=plain).stdout == "höhe\n"
