"""Pinned releases that are known to break what we use."""

import re
from pathlib import Path

from tests.support.cases import for_each
from tests.test_layers import ROOT

KNOWN_BAD = {("redis", "8.1.0"): "asynchronous calls fail after an idle close (redis-py#4252)"}
"""What is wrong with a release that was pinned once, or might be."""
PINS = (ROOT / "constraints.txt", *sorted((ROOT / "pool/engines/pins").glob("*.txt")))


@for_each("file", PINS)
def test_no_pin_is_a_release_that_is_known_to_be_broken(file: Path) -> None:
    text = file.read_text("utf-8")
    pins = re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.M)
    assert pins
    assert not [KNOWN_BAD[pin] for pin in pins if pin in KNOWN_BAD]
