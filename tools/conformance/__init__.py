"""Deadline conformance: what a deadline means at any server with OpenAI's chat API, rule by rule.

Black box: HTTP alone, nothing of the server's own. ``rules.md`` has the rules, and a module each
what a group of them measures. Imports are relative, so that the package can be installed by itself
(``pyproject.toml`` next to this), as ``deadline_conformance``.
"""

VERSION = "0.3.0"
"""Version of rules and tolerances: results compare only within one."""
