"""Lookup of names by Python's rules."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from kgen.diagnostics import did_you_mean, shown
from kgen.flex import modules
from kgen.flex.packages import PYTHON
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import MISSING, UNBOUND, Scope


def value(ev: Reader, node: ast.Name, scope: Scope, place: Place) -> Any:
    """Return the value of a name. Refuse a name without a value."""
    found = scope.find(node.id)
    if found is UNBOUND:
        hint = "the function binds this name later: assign it first"
        place.refuse("unknown-name", f"{shown(node.id)} has no value here", hint)
    if found is not MISSING:
        return found
    if node.id in PYTHON:
        return ev.external(f"builtins.{node.id}")
    if hasattr(builtins, node.id):
        place.refuse(
            "not-in-language", f"`{node.id}` cannot be read", "use arithmetic, torch and math"
        )
    module = scope.closure()
    while not isinstance(module, modules.Module) and hasattr(module, "outer"):
        module = module.outer.closure()
    known = list(module.names) if isinstance(module, modules.Module) else []
    hint = did_you_mean(node.id, known) or "define it in the source"
    place.refuse("unknown-name", f"{shown(node.id)} is not defined", hint)
