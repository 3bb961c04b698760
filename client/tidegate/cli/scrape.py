"""Reads Prometheus' text format, as far as ``tidegate top`` needs it: sums over labels."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Samples:
    """All values of one scrape, taken ``at`` seconds of our clock."""

    at: float
    values: dict[str, list[tuple[_Labels, float]]]

    @classmethod
    def parse(cls, text: str, at: float) -> "Samples":
        values: dict[str, list[tuple[_Labels, float]]] = {}
        for found in _LINE.finditer(text):
            labels = dict(_LABEL.findall(found["labels"] or ""))
            try:
                value = float(found["value"])
            except ValueError:
                continue
            if math.isnan(value):  # nothing to tell of yet
                continue
            values.setdefault(found["name"], []).append((labels, value))
        return cls(at, values)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of all series with these labels; None where there is none."""
        found = [value for _, value in self._of(name, labels)]
        return sum(found) if found else None

    def by(self, name: str, label: str, **wanted: str) -> dict[str, float]:
        """Sums by the values of ``label``, over all series with the labels that are ``wanted``."""
        sums: dict[str, float] = {}
        for labels, value in self._of(name, wanted):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def most(self, name: str, label: str) -> dict[str, float]:
        """Largest values by the values of ``label``."""
        most: dict[str, float] = {}
        for labels, value in self._of(name, {}):
            key = labels.get(label, "")
            most[key] = max(value, most.get(key, value))
        return most

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of all series with these labels; None where there is none. For a share that several
        processes at one port tell, each of its own requests."""
        found = [value for _, value in self._of(name, labels)]
        return sum(found) / len(found) if found else None

    @property
    def processes(self) -> int:
        """How many processes at one port the scrape tells of."""
        return max(1, len(self.values.get("tidegate_attainment", ())))

    def rate(self, name: str, before: "Samples | None", **labels: str) -> float | None:
        """Growth per second since ``before``; None for the first look."""
        now, then = self.total(name, **labels), before and before.total(name, **labels)
        if now is None or before is None or self.at <= before.at:
            return None
        return max(0.0, now - (then or 0.0)) / (self.at - before.at)

    def quantile(self, name: str, part: float, before: "Samples | None" = None) -> float | None:
        """Quantile ``part`` (0 to 1) of a histogram since ``before``, as the upper end of its
        bucket; None without observations."""
        new = self._buckets(name)
        old = {} if before is None else before._buckets(name)
        counts = sorted((end, count - old.get(end, 0.0)) for end, count in new.items())
        if not counts or counts[-1][1] <= 0:
            return None
        return next(end for end, count in counts if count >= part * counts[-1][1])

    def _buckets(self, name: str) -> dict[float, float]:
        return {float(end): n for end, n in self.by(f"{name}_bucket", "le").items() if end}

    def _of(self, name: str, wanted: _Labels) -> Iterator[tuple[_Labels, float]]:
        for labels, value in self.values.get(name, ()):
            if all(labels.get(key) == text for key, text in wanted.items()):
                yield labels, value
