"""Proofs in the output of `render`, `adapt`, `explain` and `status`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.cli import terminal

if TYPE_CHECKING:
    from kgen.render.project import Rendered
    from kgen.spec.load import Loaded


def proven(
    rendered: Sequence[Rendered],
    targets: Collection[str] | None,
    output: Path,
    *,
    prove: bool,
    keep: bool = True,
) -> list[Rendered]:
    """Prove rendered kernels before they are written, and mark the kernels that are written without
    a proof.

    Print a line on stderr for each obligation that stays unknown. Raise `RefutedError` if a proof
    refutes a kernel.
    """
    from kgen.prove.writing import checkable, prove_written, unknowns
    from kgen.render import project

    specs = [one for each in rendered for one in each.specs]
    if prove:
        for line in unknowns(prove_written(specs, targets or None, output, keep=keep)):
            terminal.line(line, sys.stderr)
    kernels = [
        each for each in rendered if any(checkable(one, targets or None) for one in each.specs)
    ]
    folders = {made.name for each in kernels for made in each.outputs}
    return project.marked(rendered, folders, prove)


def proofs(loaded: Loaded, generated: Path) -> list[str]:
    """Return a line on the proof of each file of a spec, from the ledger."""
    from kgen.verify.ledger import proof_of

    lines = []
    for path in sorted((generated / loaded.folder).glob("*.py")):
        if found := proof_of(path, generated):
            tools = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
            counted = f"{found['proved']} obligations proved, {found['unknown']} unknown"
            lines.append(f"proof of {path.name}: {counted} ({tools})")
    return lines


def proof_cell(proof: dict[str, int] | None) -> str | None:
    """Return the cell `proved of all obligations`, or None without a proof."""
    return None if proof is None else f"{proof['proved']} of {proof['proved'] + proof['unknown']}"
