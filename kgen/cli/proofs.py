"""What other verbs say of proofs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


def proofs(loaded: Loaded, generated: Path) -> list[str]:
    """What the ledger says is proved of the files of a spec."""
    from kgen.verify.ledger import proof_of

    lines = []
    for path in sorted((generated / loaded.folder).glob("*.py")):
        if found := proof_of(path, generated):
            tools = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
            counted = f"{found['proved']} obligations proved, {found['unknown']} unknown"
            lines.append(f"proof of {path.name}: {counted} ({tools})")
    return lines


def proof_cell(proof: dict[str, int] | None) -> str | None:
    """How much of a file is proved, for a table."""
    return None if proof is None else f"{proof['proved']} of {proof['proved'] + proof['unknown']}"
