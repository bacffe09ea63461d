"""`kgen ledger merge`: combine the ledgers of several machines.

Records are combined by file and place. If two records have the same text and place, a full run
wins, then the weaker claim. The result does not depend on the order of the ledgers. A failed run
removes its record from its own ledger only, and exits with 1. Do not merge that ledger.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.verify import ledger
from kgen.verify.ledger import Ledger


def merge(paths: Sequence[Path], into: Path) -> tuple[int, int]:
    """Merge ledgers into the one at `into`, and return its numbers of files and records.

    `into` need not exist. Next to emitted files, records of earlier texts are removed as in
    `ledger.update`. Raises `KgenError`, and writes nothing, if a file is not a ledger.
    """
    found = [_read(path) for path in paths]
    folder = into.parent
    if not folder.is_dir():
        hint = "create the folder, or name another file"
        raise KgenError(Diagnostic("no-folder", "there is no such folder", str(folder), hint=hint))
    with ledger.locked(folder):
        if into.exists():
            found.append(_read(into))
        merged = union(found)
        if into.name == ledger.FILENAME and (present := ledger.present(folder)):
            merged = ledger.kept(merged, present)
        ledger.write(into, merged)
    return len(merged), sum(len(entry["records"]) for entry in merged.values())


def union(ledgers: Sequence[Ledger]) -> Ledger:
    """Return all records of some ledgers."""
    merged: Ledger = {}
    for files in ledgers:
        for digest, entry in files.items():
            own = merged.setdefault(digest, {"file": entry["file"], "records": {}})
            # Files with the same text share one name.
            own["file"] = min(own["file"], entry["file"])
            for place, record in entry["records"].items():
                other = own["records"].get(place, record)
                own["records"][place] = max(record, other, key=_claims)
    return merged


def _claims(record: dict[str, Any]) -> tuple[Any, ...]:
    """Sort key; the record with the greater key is kept.

    A full run, worse errors, fewer cases and more unknown obligations are greater. The rest makes
    the order total.
    """
    worst = record.get("worst", {}).values()
    kernels = record.get("kernels", {})
    uses = (
        [value for use in kernels.values() for value in use.values()]
        if isinstance(kernels, dict)
        else []
    )
    return (
        not record.get("quick", False),
        max((entry["ratio"] for entry in worst), default=0.0),
        max((entry["error"] for entry in worst), default=0.0),
        -record.get("cases", 0),
        record.get("unknown", 0),
        -record.get("proved", 0),
        record.get("counts", {}).get("lived", 0),
        sum(uses),
        json.dumps(record, sort_keys=True),
    )


def _read(path: Path) -> Ledger:
    hint = "merge files that `kgen verify --record` wrote"
    try:
        return ledger.read_path(path, hint)
    except FileNotFoundError:
        message = "cannot read the ledger: there is no such file"
        raise KgenError(Diagnostic("bad-ledger", message, str(path), 1, 1, hint=hint)) from None
