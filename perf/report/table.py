"""Tables for people: of a bundle, or of any other rows."""

from rich.console import Console
from rich.table import Table

from perf.report.bundle import Bundle, Figure


def new_table(*columns: str, texts: int = 1) -> Table:
    """A table whose first ``texts`` columns are text, the others figures."""
    table = Table()
    for number, column in enumerate(columns):
        is_text = number < texts
        table.add_column(column, justify="left" if is_text else "right", no_wrap=0 < number < texts)
    return table


def show(bundle: Bundle, console: Console) -> None:
    """Print where a bundle was measured, what, and every figure with its spread."""
    machine = bundle.machine
    stolen = "" if machine.stolen_percent is None else f", {machine.stolen_percent:g} % stolen"
    gpus = ", ".join(machine.gpus) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in bundle.versions.items())
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {gpus}, "
        f"{machine.kernel}; load average {machine.load_before} before{stolen}\n"
        f"{bundle.command}\ncommit {bundle.commit}, {bundle.created}\n{versions}\n"
        f"engine {bundle.engine} {bundle.engine_digest[:16]}, "
        f"model {bundle.model} {bundle.model_digest[:16]}",
        style="dim",
    )
    table = new_table("", "median", "spread", "n")
    for result in bundle.results:
        table.add_section()
        table.add_row(f"[bold]{result.name}[/bold] {result.what}", "", "", "")
        for reason, colour in ((result.skipped, "yellow"), (result.failed, "red")):
            if reason:
                word = "skipped" if reason is result.skipped else "failed"
                table.add_row(f"  [{colour}]{word}: {_escape(reason)}[/{colour}]", "", "", "")
        for figure in result.figures:
            value = f"{number(figure.median)} {figure.unit}".strip()
            table.add_row(f"  {figure.label}", value, _spread(figure), str(figure.n))
    console.print(table)


def _spread(figure: Figure) -> str:
    if figure.n == 1:
        return "-"
    return f"{number(figure.low)} … {number(figure.high)} ({figure.spread})"


def number(value: float) -> str:
    """``value`` with three significant digits, thousands set apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
