"""Rename the names of a spec, in its model and its trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kgen.expr.nodes import Node, Read, Var, length_of, measured, transform

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

SECTIONS = ("buffers", "params")
"""The fields of a model whose keys are names."""


def inside(loaded: Loaded, other: Mapping[str, str]) -> Loaded:
    """Return the spec with the names in `other` replaced inside its files; callers use the names as
    before.
    """
    called = {
        **loaded.called,
        **{inner: loaded.called.get(name, name) for name, inner in other.items()},
    }
    return replace(renamed(loaded, other), called=called)


def renamed(loaded: Loaded, other: Mapping[str, str]) -> Loaded:
    """Return the spec with each name in `other` replaced."""
    spec = loaded.spec

    def rename(node: Node) -> Node:
        if isinstance(node, Var) and (length := measured(node.name)):
            return length_of(other.get(length[0], length[0]), length[1])
        if isinstance(node, Var):
            return replace(node, name=other.get(node.name, node.name))
        return (
            replace(node, buffer=other[node.buffer])
            if isinstance(node, Read) and node.buffer in other
            else node
        )

    fields: dict[str, object] = {"name": other.get(spec.name, spec.name)}
    for section in SECTIONS:
        if hasattr(spec, section):
            values = getattr(spec, section).items()
            fields[section] = {other.get(name, name): value for name, value in values}
    trees = {field: transform(tree, rename) for field, tree in loaded.trees.items()}
    named = {other.get(name, name): transform(tree, rename) for name, tree in loaded.locals.items()}
    called = {other.get(name, name): user for name, user in loaded.called.items()}
    return replace(
        loaded, spec=spec.model_copy(update=fields), trees=trees, locals=named, called=called
    )
