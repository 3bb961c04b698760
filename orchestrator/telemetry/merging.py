"""Pages of metrics of several processes, as one page.

Works on the text, Prometheus' or OpenMetrics', since other processes' metrics come as that. Each
sample has a label that says whose it is: nothing is added up.
"""

import re
from collections.abc import Sequence

_LABELLED = re.compile(rb"^([A-Za-z_:][\w:]*)\{", re.M)
_PLAIN = re.compile(rb"^([A-Za-z_:][\w:]*) ", re.M)
_FAMILY = re.compile(rb"^(?=# HELP )", re.M)
_EOF = b"# EOF\n"


def labelled(page: bytes, label: str, value: str) -> bytes:
    """A page whose samples have one label more; ``value`` needs no escapes."""
    pair = f'{label}="{value}"'.encode()
    page = _LABELLED.sub(rb"\1{" + pair + b",", page)
    return _PLAIN.sub(rb"\1{" + pair + b"} ", page)


def merged(pages: Sequence[bytes]) -> bytes:
    """One page with the samples of all, whose labels must differ; a metric has one head."""
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        for family in _FAMILY.split(page.removesuffix(_EOF)):
            lines = family.splitlines(keepends=True)
            head = [line for line in lines if line.startswith(b"#")]
            if head:
                name = head[0].split(b" ", 3)[2]
                heads.setdefault(name, b"".join(head))
                samples.setdefault(name, []).extend(lines[len(head) :])
    body = b"".join(heads[name] + b"".join(samples[name]) for name in heads)
    return body + (_EOF if pages[0].endswith(_EOF) else b"")
