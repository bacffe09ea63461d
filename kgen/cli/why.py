"""`kgen status --why FILE`: all that the ledger says of one emitted file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kgen.cli import terminal
from kgen.cli.terminal import Format


def why(file: Path, generated: Path, form: Format) -> int:
    """Print it. Raises `KgenError` where there is no such file."""
    from kgen.verify.ledger import records_of

    records = records_of(file, generated)
    if form is Format.JSON:
        terminal.data({"file": str(file), "records": records})
        return 0
    for place in sorted(records):
        for line in _said(place, records[place]):
            terminal.line(line)
    terminal.summary(f"{len(records)} records of {file}", form)
    return 0


def _said(place: str, record: Mapping[str, Any]) -> Iterator[str]:
    """A record in words: what was looked at, what was found, with which versions."""
    if "worst" in record:
        cases = f"{record['cases']} {'quick ' * bool(record['quick'])}cases of {', '.join(record['passes'])}"
        yield f"{place}: {cases}, all right"
        for name, worst in record["worst"].items():
            yield f"  {name}: error at most {worst['error']:.3g}, {worst['ratio']:.2f} of what is allowed"
    elif "proved" in record:
        yield f"proof: {record['proved']} obligations proved, {record['unknown']} unknown"
        yield from (f"  beyond the proof: {why}" for why in record["beyond"])
    elif "counts" in record:
        yield "mutants: " + ", ".join(f"{count} {what}" for what, count in record["counts"].items())
    elif "kernels" in record:
        yield f"{place}:"
        for kernel, use in record["kernels"].items():
            yield f"  {kernel}: " + ", ".join(f"{count} {what}" for what, count in use.items())
    else:
        yield f"{place}: found nothing"
    yield "  with " + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
