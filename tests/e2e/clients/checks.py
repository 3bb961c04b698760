"""Runs what a client's script has to show: ``python with_NAME.py URL``.

Every function that is called ``check_…`` is one thing that must work; it gets the service's URL.
"""

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
MODEL = "demo"
HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Of what the demo model has never heard: only a grammar makes it hold."""
FUNCTION = {"name": "forecast", "description": "The weather to come.", "parameters": SCHEMA}


def matches(said: object) -> bool:
    """Whether it is what ``SCHEMA`` says."""
    assert isinstance(said, dict)
    return set(said) == {"city", "days"} and said["city"] in ("Oslo", "Rome") and said["days"] < 8


def run_the_pages(module: str, url: str) -> None:
    """Run the program of docs/clients.md that imports from ``module``."""
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (program,) = (one for one in programs if f"from {module} import" in one)
    exec(compile(program.replace("http://127.0.0.1:8080", url), module, "exec"), {})


def run(namespace: Mapping[str, object]) -> None:
    """Run them all; exits with how many failed."""
    url, failed = sys.argv[1], 0
    for name, check in list(namespace.items()):
        if not name.startswith("check_"):
            continue
        assert isinstance(check, Callable)  # type: ignore[arg-type]
        try:
            check(url)
        except Exception:
            traceback.print_exc()
            failed += 1
            print(f"FAILED {name}", flush=True)
        else:
            print(f"ok {name}", flush=True)
    sys.exit(failed)
