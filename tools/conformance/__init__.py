"""Deadline conformance: what a deadline means at any server with OpenAI's chat API, rule by rule.

It is a black-box test: it uses only HTTP, nothing server-specific. ``rules.md`` has the rules; one
module per group measures them. Imports are relative, so that the package can be installed
separately (``pyproject.toml`` next to this) as ``deadline_conformance``.
"""

VERSION = "0.3.0"
"""Version of rules and tolerances: only results of the same version are comparable."""
