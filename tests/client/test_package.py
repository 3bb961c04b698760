"""The package's face: every name is there, and the command does not pay for them."""

from pathlib import Path

from orchestrator.api.native.types import TaskRequest
from protocol import Code
from tests.support.processes import python
from tidegate import TaskOptions, errors


def test_commands_import_little() -> None:
    """What a person waits for is mostly imports: help needs none of the large libraries, and what
    asks once or looks into the catalogs none that serve, but for the client's own ``aiohttp``."""
    probe = """if True:
        import contextlib, io, sys
        from tidegate.cli.main import main

        SERVING = {"grpc", "numpy", "pydantic", "tokenizers", "torch", "tritonclient"}
        HELP = SERVING | {"aiohttp", "asyncio", "msgspec", "rich"}
        NOBODY = ("--url", "http://127.0.0.1:1")
        for unwanted, words in (
            (HELP, ("--help",)),
            (HELP, ("tasks", "list", "--help")),
            (HELP, ("up", "--help")),
            (SERVING, ("tasks", "list", *NOBODY)),
            (SERVING, ("engines", "list")),
            (SERVING, ("models", "list")),
        ):
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                main(words)
            assert not unwanted & sys.modules.keys(), (words, unwanted & sys.modules.keys())
    """
    assert python("-c", probe).stderr.count("Connection refused") == 1


def test_error_codes_are_the_protocols() -> None:
    assert set(errors._BY_CODE) <= set(Code)


def test_needs_nothing_but_its_http_and_json_libraries() -> None:
    """The client works in an environment without what serves."""
    probe = """if True:
        import sys

        OURS = {"catalog", "clips", "orchestrator", "picker", "pool", "protocol", "worker"}
        OURS |= {"perf", "tools"}

        class Refused:
            def find_spec(self, name, *_):
                if name in OURS or name in ("torch", "numpy", "rich", "pydantic"):
                    raise ImportError(f"{name} is imported")

        sys.meta_path.insert(0, Refused())
        from tidegate import *
        from tidegate import Client
    """
    python("-c", probe)


def test_what_serves_is_importable_only_where_it_serves(tmp_path: Path) -> None:
    """Names such as ``worker`` belong to the client's users."""
    probe = "import importlib.util as u, tidegate; print(u.find_spec('orchestrator'))"
    assert python("-c", probe, cwd=tmp_path).stdout == "None\n"


def test_options_are_fields_of_the_service() -> None:
    spelled = {"deadline": "deadline_ms", "first_token": "first_token_ms"}
    spelled |= {"token_gap": "token_gap_ms", "reservation": "deadline_ms"}  # states it by a header
    names = {spelled.get(name, name) for name in TaskOptions.__annotations__}
    assert names <= set(TaskRequest.__struct_fields__)
