"""Coding agents and how each is run: without a login, in a home of its own, towards one address.

Updates and telemetry are off by the agents' own settings, and a proxy that nobody serves stands in
the way of whatever would leave this machine all the same.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from catalog.paths import state_dir

NODE = state_dir() / "agents" / "node_modules" / ".bin"
"""Commands of package.json, with a Node that all of them accept."""
AIDER = state_dir() / "aider" / "bin" / "aider"
"""The command of requirements.txt."""
MODEL = "scripted"
_NOWHERE = "http://127.0.0.1:9"


class Run(NamedTuple):
    """How an agent is run: its words, and what it finds in its environment."""

    words: tuple[str, ...]
    env: Mapping[str, str]


class Agent(NamedTuple):
    """A row of docs/clients.md. ``run`` writes the agent's settings into a home and says how it is
    run there, to change a file as a task says."""

    key: str
    name: str
    command: Path
    run: Callable[[Path, str, str, Path], Run]
    shows: str


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of an agent's process: nothing of this one's but the search path and language."""
    proxies = {
        name: _NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    }
    ours = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    folders = {
        f"XDG_{name}_HOME": str(home / f".{name.lower()}")
        for name in ("CONFIG", "DATA", "STATE", "CACHE")
    }
    path = os.pathsep.join([str(NODE), os.environ.get("PATH", os.defpath)])
    own = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "CI": "1"}
    return {**proxies, **ours, **folders, **own, "TMPDIR": str(home / "tmp"), **more}


def _claude(home: Path, url: str, task: str, file: Path) -> Run:
    words = ("-p", task, "--model", "claude-opus-4-8", "--permission-mode", "acceptEdits")
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    env = {name: "1" for name in (*quiet, "DISABLE_ERROR_REPORTING")}
    return Run(words, {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "unused", **env})


def _codex(home: Path, url: str, task: str, file: Path) -> Run:
    settings = f"""
model = "{MODEL}"
model_provider = "tidegate"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.tidegate]
name = "Tidegate"
base_url = "{url}/v1"
wire_api = "responses"
"""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(settings)
    # Its own sandbox needs rights that a container may not give; what it runs is in script.toml.
    unboxed = "--dangerously-bypass-approvals-and-sandbox"
    form = {
        "type": "object",
        "properties": {"said": {"type": "string"}},
        "required": ["said"],
        "additionalProperties": False,
    }
    (home / "form.json").write_text(json.dumps(form))
    asks = ("--output-schema", str(home / "form.json"))
    return Run(("exec", "--skip-git-repo-check", unboxed, *asks, task), {})


def _opencode(home: Path, url: str, task: str, file: Path) -> Run:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tidegate",
        "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131_072, "output": 8192}}},
    }
    settings = {
        "provider": {"tidegate": provider},
        "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "read": "allow"},
    }
    config = home / "opencode.json"
    config.write_text(json.dumps(settings))
    off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    env = {f"OPENCODE_DISABLE_{name}": "1" for name in off}
    return Run(("run", "-m", f"tidegate/{MODEL}", task), {"OPENCODE_CONFIG": str(config), **env})


def _qwen(home: Path, url: str, task: str, file: Path) -> Run:
    settings = {
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": MODEL}
    return Run(("--auth-type", "openai", "--approval-mode", "yolo", "-p", task), env)


def _aider(home: Path, url: str, task: str, file: Path) -> Run:
    off = ("--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    more = ("--no-show-release-notes", "--no-pretty", "--yes-always", "--edit-format", "diff")
    words = ("--model", f"openai/{MODEL}", *off, *more, "--message", task, str(file))
    env = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "unused"}
    return Run(words, {**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})


_LOOP = "a file read, then changed, by its own tools"
AGENTS = (
    Agent("claude-code", "Claude Code", NODE / "claude", _claude, f"{_LOOP}, over `/v1/messages`"),
    Agent(
        "codex",
        "Codex CLI",
        NODE / "codex",
        _codex,
        f"{_LOOP}, over `/v1/responses`; its answer by a JSON schema",
    ),
    Agent("opencode", "opencode", NODE / "opencode", _opencode, f"{_LOOP}, over chats"),
    Agent("qwen", "Qwen Code", NODE / "qwen", _qwen, f"{_LOOP}, over chats"),
    Agent("aider", "aider", AIDER, _aider, "an edit that does not fit, then one that does"),
)
