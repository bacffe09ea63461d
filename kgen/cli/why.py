"""`kgen status --why FILE`: print every record of one emitted file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import counted


def why(file: Path, generated: Path, form: Format) -> int:
    """Print the records. Raise `KgenError` if the file does not exist."""
    from kgen.verify.ledger import records_of

    records = records_of(file, generated)
    if form is Format.JSON:
        terminal.data({"file": str(file), "records": records})
        return 0
    for place in sorted(records):
        for line in _said(place, records[place]):
            terminal.line(line)
    terminal.summary(f"{counted(len(records), 'record')} of {file}", form)
    return 0


def _said(place: str, record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one record: the check, its result, and the versions."""
    if "worst" in record:
        cases = (
            f"{record['cases']} {'quick ' * bool(record['quick'])}cases of "
            f"{', '.join(record['passes'])}"
        )
        yield f"{place}: {cases}, all passed"
        for name, worst in record["worst"].items():
            yield (
                f"  {name}: error at most {worst['error']:.3g}, {worst['ratio']:.2f} of the "
                "tolerance"
            )
    elif "proved" in record:
        yield f"proof: {record['proved']} obligations proved, {record['unknown']} unknown"
        yield from (f"  not covered: {why}" for why in record["beyond"])
    elif "counts" in record:
        yield "mutants: " + ", ".join(f"{count} {what}" for what, count in record["counts"].items())
    elif "kernels" in record:
        yield f"{place}:"
        for kernel, use in record["kernels"].items():
            yield f"  {kernel}: " + ", ".join(f"{count} {what}" for what, count in use.items())
    else:
        yield f"{place}: no errors found"
    yield "  with " + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
