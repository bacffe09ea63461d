"""Methods of terms, tensors and Python sequences."""

from __future__ import annotations

from typing import Any

from kgen.flex import ascending, elementwise, python, several, tensors
from kgen.flex.elementwise import NO_REDUCTION, applied, made, operand
from kgen.flex.lengths import settled
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.tables import DTYPES, ELEMENTWISE, REDUCTIONS, SAME
from kgen.flex.values import (
    DtypeOf,
    Method,
    Part,
    Tensor,
    Term,
    changes_in_place,
    is_number,
    measured,
    note_change,
    plain,
)

Keywords = dict[str, Any]


@settled
def method(ev: Reader, bound: Method, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return the result of a method of a term, a tensor or a sequence."""
    owner, name = bound.owner, bound.name
    if isinstance(owner, list | dict | str):
        return python.of_sequence(ev, owner, name, args, keywords, place)
    args, keywords = plain(args), {key: plain(value) for key, value in keywords.items()}
    if ev.of_a_pair:
        args, keywords = (
            [*map(measured, args)],
            {key: measured(value) for key, value in keywords.items()},
        )
    if is_number(owner):
        return python.of_number(owner, name, args, place)
    if isinstance(owner, Tensor | Part):
        if name in ("size", "dim", "ndimension", "numel"):
            return several.size(owner, name, args, keywords, place)
        if name == "unbind" and _by_elements(ev, owner):
            return _unbound(owner, args, keywords, place)
        if name == "detach" and ev.of_a_pair:
            return tensors.detached(owner, place)
    if not ev.of_a_pair:
        note_change([*([owner] if changes_in_place(name) else ()), keywords.get("out")])
    owner = several.whole(ev, owner, place)
    if isinstance(owner, Tensor):
        if not ev.of_a_pair and not any(isinstance(a, Term) for a in args):
            return _of_tensor(ev, owner, name, args, keywords, place)
        if name in REDUCTIONS:
            place.refuse("reduction", f"`.{name}()` is a reduction", NO_REDUCTION)
        owner = operand(ev, owner, place)
    return _of_value(ev, owner, name, args, keywords, place)


def _of_tensor(
    ev: Reader, owner: Tensor, name: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    """Return the result of a method of a whole tensor, before the mods."""
    found = several.several(ev, name, [owner, *args], keywords, place)
    if found is None:
        found = tensors.method(ev, owner, name, args, keywords, place)
    ascending.learn(name, [owner, *args], keywords, found)
    return found


def _of_value(
    ev: Reader, value: Any, name: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    """Return the result of a method of a value of the pair or of an element."""
    if name == "requires_grad_" and not ev.of_a_pair:
        return ev.learn(value, not args or args[0] is not False, place)
    if name in SAME:
        if name != "clone":
            return value
        value = operand(ev, value, place)
        return tensors.detached(value, place) if ev.detaches else value
    if name in ("detach", "item"):
        return tensors.detached(operand(ev, value, place), place)
    if name in ("to", "type", "type_as"):
        return _cast(ev, value, args, keywords, place)
    if name in DTYPES:
        return made(ev, "cast", (operand(ev, value, place), DTYPES[name]), place)
    if name.startswith("new_"):
        return _new(ev, value, name, args, keywords, place)
    base = name.removesuffix("_") if not name.endswith("__") else name
    if base != name and base in ELEMENTWISE:
        place.refuse(
            "not-in-language",
            f"`.{name}()` changes a tensor in place",
            f"write `x = x.{base}(...)`",
        )
    if name in ("max", "min") and args:
        return applied(ev, name, (value, *args), place)
    if name in ELEMENTWISE:
        if ELEMENTWISE[name][0] == "where":
            args = [args[0], value, *args[1:]] if args else args
            return elementwise.called(ev, name, args, keywords, place)
        return elementwise.called(ev, name, [value, *args], keywords, place)
    if name in REDUCTIONS:
        place.refuse("reduction", f"`.{name}()` is a reduction", NO_REDUCTION)
    if name in ("view", "reshape", "squeeze", "unsqueeze", "expand", "flatten"):
        place.refuse(
            "not-in-language", f"`.{name}()` changes a shape", "a value of the pair has no shape"
        )
    place.refuse(
        "not-in-language",
        f"`.{name}()` cannot be read",
        "write the computation with torch functions",
    )


def _by_elements(ev: Reader, owner: Tensor | Part) -> bool:
    """True if the rows stay parts of one buffer. Before the mods, rows become separate tensors."""
    return ev.of_a_pair or isinstance(owner, Part) or len(owner.shape or ()) == 1


def _unbound(owner: Any, args: list[Any], keywords: Keywords, place: Place) -> Any:
    axis = keywords.get("dim", args[0] if args else 0)
    if axis != 0 and not (axis == -1 and len(several.shape_of(owner) or ()) == 1):
        place.refuse(
            "whole-tensor", "`.unbind()` returns columns here", "index them: `t[:, 0]` is `t[i, 0]`"
        )
    return tuple(several.rows(owner, place))


def _cast(ev: Reader, value: Any, args: list[Any], keywords: Keywords, place: Place) -> Any:
    wanted = keywords.get("dtype", keywords.get("other", args[0] if args else None))
    if isinstance(wanted, Term | Part):
        return made(ev, "like", (operand(ev, value, place), operand(ev, wanted, place)), place)
    if isinstance(wanted, DtypeOf):
        return made(ev, "like", (operand(ev, value, place), wanted.term), place)
    if isinstance(wanted, str) or wanted is None or tensors.is_device(wanted):
        return value
    return made(ev, "cast", (operand(ev, value, place), tensors.dtype(wanted, place)), place)


def _new(
    ev: Reader, owner: Any, name: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    fills = {"new_ones": 1, "new_zeros": 0}
    if name == "new_tensor":
        value = args[0] if args else None
    elif name == "new_full":
        value = keywords.get("fill_value", args[1] if len(args) > 1 else None)
    else:
        value = fills.get(name)
    shape = keywords.get("size", args[0] if args else ())
    if not is_number(value) or (name != "new_tensor" and shape not in ((), [], 1, (1,), [1])):
        place.refuse(
            "not-in-language",
            f"`.{name}()` makes a tensor with several elements",
            "make a number, of shape `()`",
        )
    wanted = keywords.get("dtype")
    const = Term("const", (value,), place)
    if wanted is None:
        return (
            const
            if name == "new_tensor"
            else Term("like", (const, operand(ev, owner, place)), place)
        )
    return _cast(ev, const, [wanted], {}, place)
