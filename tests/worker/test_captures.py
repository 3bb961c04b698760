"""CUDA graphs: what is captured next to an engine that serves, as the source has it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_capture_leaves_the_device_to_other_threads() -> None:
    """A swap loads next to the model that serves: in CUDA's own mode ("global") a capture there
    fails with what the engine's thread does meanwhile."""
    modes = {}
    for path in (*(ROOT / "worker").rglob("*.py"), *(ROOT / "perf").rglob("*.py")):
        source = path.read_text()
        if "cuda.graph(" not in source and "capture_begin(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.endswith(("cuda.graph", "capture_begin")):
                    stated = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    modes[f"{path}:{node.lineno}"] = stated.get("capture_error_mode", "global")
    assert len(modes) >= 2 and set(modes.values()) == {"'thread_local'"}, modes
