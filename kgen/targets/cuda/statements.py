"""Passes that simplify the scalar statements of a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kgen.targets.code import Assign, Code, Name, Statement, renamed


def without_copies(statements: Iterable[Statement]) -> list[Statement]:
    """Remove constants that are copies of a name, and use that name."""
    copies: dict[str, Code] = {}
    found = []
    for statement in statements:
        changed = statement.map(lambda code: renamed(code, copies))
        if isinstance(changed, Assign) and changed.type and isinstance(changed.value, Name):
            copies[changed.name] = changed.value
        else:
            found.append(changed)
    return found


def stored_at_once(statements: list[Statement]) -> list[Statement]:
    """Remove constants that are only stored, and store their value: `out[i] = x * w`."""
    made = {s.name: s for s in statements if isinstance(s, Assign) and s.type}
    uses = Counter(name for s in statements for name in s.uses)
    found: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Assign) and isinstance(value := statement.value, Name):
            once = made.get(value.name) if uses[value.name] == 1 else None
            if once is not None:
                found.remove(once)
                statement = replace(statement, values=once.values)
        found.append(statement)
    return found
