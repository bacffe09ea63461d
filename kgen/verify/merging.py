"""`kgen ledger merge`: what several machines found, as one ledger.

Records are put together by file and place. Of two that speak of one text of a file at one place the one of a full run
stays, then the one that claims less: the order of ledgers, and how often each is given, makes no difference. A run
that fails takes its record away from its own ledger alone: it exits with 1, and what it left is not to be merged.
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
    """Merge ledgers into the one at `into`, which may not be there yet; how many files and records that has then.

    In a project's own, beside the emitted files, what these were before is forgotten as `ledger.update` does. Raises
    `KgenError`, and writes nothing, where one of them is no ledger.
    """
    found = [_read(path) for path in paths]
    folder = into.parent
    if not folder.is_dir():
        hint = "make it first, or name another file"
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
    """All records of some ledgers."""
    merged: Ledger = {}
    for files in ledgers:
        for digest, entry in files.items():
            own = merged.setdefault(digest, {"file": entry["file"], "records": {}})
            # A text that several files have is known by one of their names.
            own["file"] = min(own["file"], entry["file"])
            for place, record in entry["records"].items():
                other = own["records"].get(place, record)
                own["records"][place] = max(record, other, key=_claims)
    return merged


def _claims(record: dict[str, Any]) -> tuple[Any, ...]:
    """Greater for the record that is kept: of a full run, with the worse errors, of fewer cases, with more unknown;
    and then any order, if only it is one."""
    worst = record.get("worst", {}).values()
    kernels = record.get("kernels", {})
    uses = [value for use in kernels.values() for value in use.values()] if isinstance(kernels, dict) else []
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
    hint = "merge what `kgen verify --record` wrote"
    try:
        return ledger.read_path(path, hint)
    except FileNotFoundError:
        message = "cannot read the ledger: there is no such file"
        raise KgenError(Diagnostic("bad-ledger", message, str(path), 1, 1, hint=hint)) from None
