"""A study: measures cases one after the other, prints them, and saves them in a bundle."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console

from perf.report.bundle import BenchResult, Figure
from perf.report.command import result
from perf.report.table import new_table, number


class Case(NamedTuple):
    """One part of a study: its name and what it is, in words, and how its figures are found."""

    name: str
    what: str
    figures: Callable[[], Iterable[Figure]]


def run_cases(cases: Iterable[Case], console: Console) -> list[BenchResult]:
    """Measure all cases; prints each as it is done. A failure is a result too."""
    results: list[BenchResult] = []
    for case in cases:
        with result(results, case.name, case.what) as figures:
            figures += case.figures()
        table = new_table(case.what, "median", "lowest", "highest", "of")
        for one in figures:
            spread = [f"{number(value)} {one.unit}" for value in (one.median, one.low, one.high)]
            table.add_row(one.label, *spread, str(one.n))
        console.print(table)
        if results[-1].failed:
            console.print(results[-1].failed, style="red")
    return results
