"""In-place changes: elements, attributes, `+=` and `del`.

Lists of the source are Python lists here, so all aliases of a list see a change.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

from kgen.flex import effects, instances, naming, numbers, scopes
from kgen.flex.operators import binary
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import (
    Class,
    External,
    Frame,
    Function,
    Instance,
    Part,
    Partial,
    Passing,
    Tensor,
    Term,
    Unknown,
    note_change,
)


def put(ev: Reader, frame: Frame, name: str, value: Any, place: Place) -> None:
    """Bind a name to a value, in the frame that owns the name."""
    holder = scopes.store(frame, name, place)
    if holder is not frame:
        ev.changing(holder, place)
    holder.names[name] = value


def assign(ev: Reader, target: ast.expr, value: Any, frame: Frame, source: Source) -> None:
    place = Place(source, target)
    match target:
        case ast.Name(id=name):
            if isinstance(value, Term) and value.label is None:
                value.label = name
            if isinstance(value, Tensor) and value.name is None:
                value.name = name
            if isinstance(value, Passing):
                value = Unknown(
                    place, "an iterator that has a name", "make a list of it, `list(...)`"
                )
            put(ev, frame, name, value, place)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            if isinstance(value, Unknown):
                for element in elements:
                    assign(ev, element, value, frame, source)
                return
            items = list(ev.items(value, place))
            starred = [i for i, e in enumerate(elements) if isinstance(e, ast.Starred)]
            if starred and len(items) >= len(elements) - 1:
                first, last = starred[0], starred[0] + len(items) - len(elements) + 1
                items[first:last] = [ev.own(items[first:last])]
            if len(items) != len(elements):
                message = f"cannot unpack {len(items)} values into {len(elements)} names"
                place.refuse("bad-call", message, "use one value for each name")
            for element, item in zip(elements, items, strict=True):
                inner = element.value if isinstance(element, ast.Starred) else element
                assign(ev, inner, item, frame, source)
        case ast.Subscript():
            owner = ev.expression(target.value, frame, source)
            index = ev.expression(target.slice, frame, source)
            set_item(ev, owner, index, value, place)
        case ast.Attribute():
            owner = ev.expression(target.value, frame, source)
            set_attribute(ev, owner, target.attr, value, place)


def set_item(ev: Reader, owner: Any, index: Any, value: Any, place: Place) -> None:
    """Assign `owner[index] = value`."""
    if isinstance(owner, list | dict) and not isinstance(index, Term | Part | Tensor):
        if isinstance(index, Unknown):
            ev.untold(index)
        ev.changing(owner, place)
        if isinstance(index, slice):
            value = list(ev.items(value, place))
        numbers.computed(lambda: owner.__setitem__(index, value), place)
        numbers.sized(owner, 0, place)
    elif isinstance(owner, Unknown):
        effects.escaped(ev, [value], place)
    elif ev.of_a_pair or not isinstance(owner, Tensor):
        place.refuse(
            "not-in-language", "an element is assigned", "make a new value, with `torch.where`"
        )
    else:
        owner.change()


def set_attribute(ev: Reader, owner: Any, name: str, value: Any, place: Place) -> None:
    """Assign `owner.name = value`."""
    hint = "bind a name of the module"
    match owner:
        case Frame():
            ev.changing(owner, place)
            owner.names[name] = value
        case External(path=path):
            if "modules" in path.split("."):
                place.refuse("not-in-language", "a module is changed by its name", hint)
            ev.patched[f"{path}.{name}"] = Unknown(place, f"`{path}.{name}`")
            effects.escaped(ev, [value], place)
        case Tensor() | Term() if name == "requires_grad" and not ev.of_a_pair:
            ev.learn(owner, value is not False, place)
        case Tensor() if not ev.of_a_pair:
            owner.forget()
        case Class() | Instance():
            instances.store(ev, owner, name, value, place)
        case Function() | Partial() if name not in effects.HIDDEN:
            # No mod reads this attribute. From here on the names of functions are unknown.
            ev.renamed = True
            effects.escaped(ev, [value], place)
        case Unknown():
            effects.escaped(ev, [value], place)
        case _:
            place.refuse("not-in-language", f"the attribute `.{name}` is set", hint)


def update(ev: Reader, node: ast.AugAssign, frame: Frame, place: Place) -> None:
    """Run `target += value`, which changes a list in place."""
    target, source = node.target, place.source
    if isinstance(target, ast.Name):
        old = naming.value(ev, target, frame, Place(source, target))
        if isinstance(old, Term):
            _shared_term(ev, old, target, frame, place)
        if isinstance(old, Tensor) or not ev.of_a_pair:
            note_change(old)
    else:
        owner = ev.expression(target.value, frame, source)
        if isinstance(target, ast.Subscript):
            index = ev.expression(target.slice, frame, source)
            old = ev.item(owner, index, Place(source, target))
        else:
            old = ev.attribute(owner, target.attr, Place(source, target))
    new = ev.expression(node.value, frame, source)
    value = _in_place(ev, node, old, new, place) if isinstance(old, list) else None
    if value is None:
        value = ev.operate(binary(node.op), (old, new), place)
    if isinstance(target, ast.Name):
        assign(ev, target, value, frame, source)
    elif isinstance(target, ast.Subscript):
        set_item(ev, owner, index, value, place)
    else:
        set_attribute(ev, owner, target.attr, value, place)


def _in_place(ev: Reader, node: ast.AugAssign, old: list[Any], new: Any, place: Place) -> list[Any]:
    ev.changing(old, place)
    if isinstance(node.op, ast.Add):
        more = list(ev.items(new, place))
        numbers.sized(old, len(more), place).extend(more)
    else:
        old[:] = ev.operate(binary(node.op), (old, new), place)
    return old


def _shared_term(ev: Reader, old: Term, target: ast.Name, frame: Frame, place: Place) -> None:
    if not ev.of_a_pair or sum(value is old for value in frame.names.values()) > 1:
        hint = f"write `{target.id} = {target.id} ...`, which makes a new value"
        place.refuse("not-in-language", "a value that has two names is changed in place", hint)


def delete(ev: Reader, target: ast.expr, frame: Frame, source: Source) -> None:
    """Run `del target`."""
    place = Place(source, target)
    match target:
        case ast.Name(id=name):
            naming.value(ev, target, frame, place)
            holder = scopes.store(frame, name, place)
            if holder is not frame:
                ev.changing(holder, place)
            holder.names.pop(name, None)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                delete(ev, element, frame, source)
        case ast.Subscript():
            owner = ev.expression(target.value, frame, source)
            index = ev.expression(target.slice, frame, source)
            if not isinstance(owner, list | dict) or not isinstance(index, int | str | slice):
                place.refuse(
                    "not-in-language", "an element is deleted", "make a new value without it"
                )
            ev.changing(owner, place)
            numbers.computed(lambda: operator.delitem(owner, index), place)  # type: ignore[arg-type]
        case _:
            place.refuse("not-in-language", "an attribute is deleted", "leave it in place")
