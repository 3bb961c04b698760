"""Deadline conformance: what a deadline means at any server with OpenAI's chat API, rule by rule.

Black box: HTTP alone, nothing of the server's own. In the order of the data:

- ``rules``         every rule with what is measured, its tolerance and why
- ``target``        the server, and how a deadline is said there
- ``budget``        the bounds of a run
- ``wire``          one request, and all that came back
- ``pace``          how fast the server is, which every time in a run is made of
- ``error_shapes``, ``clocks``, ``expiry``, ``partial``, ``hang_up``, ``overload``, ``retries``,
  ``drain``         the measurements, a group of rules each
- ``stillness``     how long the client itself was late
- ``report``        findings as text and JSON
- ``run``           all of it
- ``command``       ``deadline-conformance``, here ``python -m tools.conformance``
- ``plugin``        the same rules as pytest's tests

Imports are relative, so that the package can be installed by itself (``pyproject.toml`` beside
this), as ``deadline_conformance``.
"""

from typing import Final

VERSION: Final = "0.1.1"
"""Version of rules and tolerances: results compare only within one."""
