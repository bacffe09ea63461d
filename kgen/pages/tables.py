"""Tables that the pages of several families share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kgen.pages.model import Table, words


def counts(
    columns: Mapping[str, Counter[str]], more: Mapping[str, Mapping[str, int]] | None = None
) -> Table:
    """Build a table with a row per kind of operation, their sum, and `more` rows, which may lack
    columns.
    """
    kinds = dict.fromkeys(kind for found in columns.values() for kind in found)
    rows = [[kind, *(str(found[kind]) for found in columns.values())] for kind in kinds]
    rows.append(["all", *(str(found.total()) for found in columns.values())])
    rows += [
        [name, *(str(found.get(column, "")) for column in columns)]
        for name, found in (more or {}).items()
    ]
    return Table(("operation", *columns), tuple(tuple(map(words, row)) for row in rows))
