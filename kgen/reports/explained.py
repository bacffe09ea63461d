"""The page of `kgen explain`: the family's explanation, the files, and their inner loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kgen.diagnostics import escaped
from kgen.family import family
from kgen.pages.model import (
    FULL,
    MASKED,
    SKIPPED,
    Code,
    Drawing,
    Grid,
    Listing,
    Page,
    Prose,
    Section,
    Table,
    Words,
    quoting,
    words,
)
from kgen.render.rendering import excerpts
from kgen.spec.load import Loaded
from kgen.spec.too_large import too_large
from kgen.targets import Source, asked_targets, sources
from kgen.verify.ledger import status

INNER_LOOP = "inner_loop"
"""Name of the template block that the page shows."""


def said(loaded: Loaded, drawing: Drawing | None) -> Page:
    """Return the family's page for a spec."""
    with too_large(loaded):
        page: Page = family(loaded.spec.kernel).explain(loaded, drawing)
    return page


def explained(loaded: Loaded, drawing: Drawing | None, generated: Path) -> Page:
    """Return the family's page with the files, the inner loops and the spec added."""
    page = said(loaded, drawing)
    loops = tuple(Listing(file, text) for file, text in excerpts(loaded, INNER_LOOP))
    path = escaped(Path(loaded.path).name)
    spec = Listing(path, "\n".join(map(escaped, loaded.text.splitlines())))
    found = (
        Section("Files", (_files(loaded, generated), *_what_states_are()), for_pages=True),
        Section("The inner loop, as emitted", loops, for_pages=True),
        Section("The spec", (spec,), for_pages=True),
    )
    return replace(page, sections=(*page.sections, *(s for s in found if s.blocks)))


def facts(loaded: Loaded, drawing: Drawing | None, generated: Path) -> dict[str, Any]:
    """Return the page as data. docs/commands.md lists the fields."""
    page = said(loaded, drawing)
    return {
        "spec": loaded.spec.name,
        "kernel": loaded.spec.kernel,
        "variant": loaded.variant or None,
        "summary": loaded.spec.summary.on_terminal(),
        "path": loaded.path.as_posix(),
        "passes": list(loaded.spec.passes),
        "targets": asked_targets(loaded),
        **page.facts,
        "files": [
            {name: row[name] for name in ("file", "state", "device", "error", "proof")}
            for row in status([loaded], generated)
        ],
        "grids": [asdict(grid) | {"shares": _shares(grid)} for grid in page.grids()],
    }


def _shares(grid: Grid) -> dict[str, float]:
    """Return the share of skipped, masked and full tiles."""
    shares = grid.shares()
    return {"skipped": shares[SKIPPED], "masked": shares[MASKED], "full": shares[FULL]}


def _files(loaded: Loaded, generated: Path) -> Table:
    known = {Path(row["file"]).name: row for row in status([loaded], generated)}
    asked = asked_targets(loaded)
    rows: list[tuple[Words, ...]] = []
    for name, target in family(loaded.spec.kernel).targets.items():
        if name not in asked:
            why = Code(f"targets: {{{name}: {{}}}}")
            rows.append((words(Code(name)), (), (), words("none: the spec does not have ", why)))
            continue
        anywhere = "GPUs, and Triton's interpreter" if target.runtime.on_cpu else "GPUs"
        part = f", the {target.part} alone" if target.part else ""
        for source in sources(loaded, name):
            where = words(_where(loaded, source) or anywhere + part)
            rows.append(
                (
                    words(Code(name)),
                    words(Code(source.filename)),
                    where,
                    _state(known, source.filename),
                )
            )
    return Table(("target", "file", "runs on", "state"), tuple(rows))


def _where(loaded: Loaded, source: Source) -> str:
    """Return the only architecture of a file and its interpreter, or empty text if it runs on
    several.
    """
    verification = family(loaded.spec.kernel).verification
    chips = verification.chips.get() if verification and verification.chips else ()
    for chip in chips:
        if source.filename == chip.file:
            return f"{source.arch}; small cases in {chip.interpreter}"
    return source.arch or ""


def _state(known: Mapping[str, Mapping[str, Any]], file: str) -> Words:
    if file not in known:
        return words("verified with the file that imports it")
    row = known[file]
    proof = row["proof"]
    proved = (
        f", {proof['proved']} of {proof['proved'] + proof['unknown']} obligations proved"
        if proof
        else ""
    )
    if row["error"] is None:
        return words(f"{row['state']}{proved}")
    return words(
        f"{row['state']} on {row['device']}, worst relative error {row['error']:.2g}{proved}"
    )


def _what_states_are() -> Iterator[Prose]:
    yield Prose(
        quoting(
            "`verified`: this text passed on a GPU, compared with float64. `interpreted`: it "
            "passed only in Triton's "
            "interpreter. `compiled`: it compiled and did not run. `stale`: only an earlier text "
            "has a result. "
            "`unrecorded`: no result. `missing`: not rendered."
        )
    )
