"""Reports of GPU runs: one row per spec, valid for one text of its Triton file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.verify import ledger

ROOT = Path(__file__).resolve().parents[2]


def emitted(spec: str) -> Path:
    """Return the path of the Triton file of a spec."""
    return ROOT / "generated" / spec / "triton.py"


@dataclass(frozen=True)
class Report:
    """A JSON file with one row per spec."""

    path: Path

    def enter(self, spec: str, row: Mapping[str, Any] | None) -> None:
        """Record the row of a spec for the current text of its file.

        If `row` is None, remove the row.
        """
        rows = self._read()
        rows.pop(spec, None)
        if row is not None:
            rows[spec] = {"hash": ledger.file_hash(emitted(spec)), **row}
        self.path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def current(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows whose hash equals the hash of the current file."""
        for spec, row in sorted(self._read().items()):
            if row["hash"] == ledger.file_hash(emitted(spec)):
                yield row

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = (
            json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        )
        return found
