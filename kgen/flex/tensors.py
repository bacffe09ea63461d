"""Tensors of the source: constructors, indexing and operations on whole tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from kgen.flex import ascending, shapes
from kgen.flex.composed import TRUTH
from kgen.flex.inference import COMPARISONS, LOGICAL, REAL, ROUNDING
from kgen.flex.reader import Reader
from kgen.flex.shapes import Extents
from kgen.flex.source import Place
from kgen.flex.tables import DTYPES, ELEMENTWISE, RANDOM, SAME
from kgen.flex.values import (
    DtypeOf,
    External,
    FromEnd,
    Method,
    Part,
    Shape,
    Tensor,
    Term,
    Unknown,
    extent,
    is_number,
    kind,
    measured,
    plain,
)

_FILLED = frozenset(("zeros", "ones", "empty", "full", "rand", "randn", "randint"))
_LIKE = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"))


def called(tensor: Tensor) -> str:
    """Return the name of a tensor for messages."""
    return f"`{tensor.name}`" if tensor.name else "a tensor"


def is_device(value: Any) -> bool:
    """True if an argument of `.to` is a device and not a dtype."""
    if isinstance(value, External):
        return value.path.rpartition(".")[2] not in DTYPES
    return isinstance(value, str | Unknown)


def dtype(value: Any, place: Place) -> str:
    """Return kgen's name of a dtype."""
    if isinstance(value, External) and (name := value.path.rpartition(".")[2]) in DTYPES:
        return DTYPES["float32" if value.path == "builtins.float" else name]
    place.refuse(
        "bad-dtype", f"{kind(value)} is not a dtype", "write `torch.float32`, `torch.int32`, ..."
    )


def attribute(owner: Term | Part | Tensor, name: str, place: Place) -> Any:
    """Return an attribute of a term or a tensor."""
    tensor = (
        owner if isinstance(owner, Tensor) else owner.tensor if isinstance(owner, Part) else None
    )
    gone = len(owner.indices) if isinstance(owner, Part) else 0
    shape = None if tensor is None or tensor.shape is None else tensor.shape[gone:]
    untold = f"the shape of {called(tensor)}" if tensor else ""
    hint = (
        f"state it in the source, or in EXPR: `{tensor.name} := torch.zeros(...)`" if tensor else ""
    )
    match name:
        case "dtype":
            if tensor is None:
                assert isinstance(owner, Term)
                return DtypeOf(owner)
            names = {ours: theirs for theirs, ours in reversed(DTYPES.items())}
            return (
                External(f"torch.{names[tensor.dtype]}")
                if tensor.dtype
                else Unknown(place, "a dtype")
            )
        case "device":
            return External("device")
        case "shape":
            if tensor is None:
                return ()
            if shape is None:
                return Shape(place, untold, hint, tensor=tensor, gone=gone)
            unknown = Unknown(place, untold, hint)
            return tuple(
                extent(tensor, gone + i, unknown) if n is None else n for i, n in enumerate(shape)
            )
        case "ndim":
            return (
                0
                if tensor is None
                else Unknown(place, untold, hint)
                if shape is None
                else len(shape)
            )
        case "T" | "mT" if isinstance(owner, Tensor):
            turned = None if shape is None else shape[::-1]
            return _changed(owner, place, shape=turned)
    return Method(owner, name)


# --- indexing ------------------------


def indexed(ev: Reader, owner: Tensor | Part, index: tuple[Any, ...], place: Place) -> Any:
    """Return a tensor with further indices, or, before the mods, a slice of it."""
    tensor, before = (owner, ()) if isinstance(owner, Tensor) else (owner.tensor, owner.indices)
    index = tuple(map(measured, plain(index)))
    index = tuple(scalar(i, place) for i in index) if ev.of_a_pair else index
    given = tuple(i for i in index if not _is_ellipsis(i))
    rank = len(before) + len(given)
    if ev.of_a_pair and len(given) == len(index) - 1 and rank == len(tensor.shape or range(rank)):
        return element(indexed(ev, owner, given, place))  # all axes have an index
    if tensor.open and not ev.of_a_pair and len(index) == 1 and isinstance(index[0], str):
        return Tensor(place, origin=origin(place), open=True)  # a file with several tensors
    if any(isinstance(i, slice | Tensor | list) or i is None or _is_ellipsis(i) for i in index):
        if not ev.of_a_pair:
            chosen = any(
                isinstance(i, Tensor) and i.dtype in ("bool", "uint8", None) for i in index
            )
            sliced = not before and all(i is None or _forward(i) for i in index)
            shape = _sliced(tensor.shape, index) if sliced else None
            cut = _changed(tensor, place, shape=shape, open=tensor.open or chosen)
            ascending.learn("sliced" if sliced else "chosen", [tensor], {}, cut)
            return cut
        place.refuse(
            "whole-tensor", "more than one element is read", "index one element: `tensor[i, j]`"
        )
    found = list(before)
    for i in index:
        if isinstance(i, Part):
            i = element(i)
        if isinstance(i, Unknown):
            ev.untold(i)
        if not isinstance(i, Term | int) or isinstance(i, bool):
            place.refuse("bad-index", f"{kind(i)} is an index", "index with integers")
        found.append(_position(i, tensor, len(found), place) if isinstance(i, int) else i)
    if tensor.shape is not None and len(found) > len(tensor.shape):
        message = (
            f"{called(tensor)} has {len(tensor.shape)} dimensions, and {len(found)} indices here"
        )
        place.refuse("bad-index", message, "use one index for each dimension")
    part = Part(tensor, tuple(found), place)
    return detached(part, place) if ev.detaches and ev.of_a_pair else part


def _is_ellipsis(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, Unknown) and index.what == "this literal")


def _forward(index: Any) -> bool:
    """True for a slice with a positive step."""
    return isinstance(index, slice) and (
        index.step is None or (type(index.step) is int and index.step > 0)
    )


def _sliced(shape: Extents | None, index: Sequence[Any]) -> Extents | None:
    """Return the extents after slices and new axes. The length of a slice is unknown."""
    cut = sum(i is not None for i in index)
    if shape is None or cut > len(shape):
        return None
    return (*(1 if i is None else None for i in index), *shape[cut:])


def _position(index: int, tensor: Tensor, axis: int, place: Place) -> int:
    """Return a constant index, counted from the front. Refuse one that is out of bounds."""
    extent = tensor.shape[axis] if tensor.shape and axis < len(tensor.shape) else None
    if extent is not None and not -extent <= index < extent:
        message = (
            f"the index {index} is out of bounds: dimension {axis} of {called(tensor)} has {extent}"
        )
        place.refuse("bad-index", message, f"use an index from {-extent} to {extent - 1}")
    return FromEnd(index) if index < 0 else index


def owned(value: Any, place: Place, grad: bool, follows: bool = False) -> Any:
    """Return a parameter or a tensor of a module. Calls pass its elements, even a single one."""
    match value:
        case Tensor():
            # A module may load other values.
            return dataclasses.replace(
                value, grad=grad, follows=follows or value.follows, facts=None
            )
        case Part(tensor=tensor, indices=before):
            shape = None if tensor.shape is None else tensor.shape[len(before) :]
            return Tensor(place, None, shape, tensor.dtype, grad, origin(place), follows=follows)
        case Term():
            known = value.args[1] if value.fn == "cast" else "fp32"
            return Tensor(place, None, (), known, grad, origin(place), follows=follows)
    return value


def scalar(value: Any, place: Place) -> Any:
    """Return the element of a zero-dimensional tensor. Return other values unchanged."""
    if isinstance(value, Tensor) and value.shape == ():
        return _read(value, (), place)
    return value


def _read(tensor: Tensor, indices: tuple[Any, ...], place: Place) -> Term:
    """Return the term of an element. The tensor may be detached."""
    if tensor.detached_from is not None:
        return Term("detach", (_read(tensor.detached_from, indices, place),), place)
    return Term("read", (tensor, *indices), place)


def detached(value: Any, place: Place) -> Any:
    """Return a value of a pair without its gradient. Return other values unchanged."""
    match value:
        case Tensor():
            return dataclasses.replace(value, detached_from=value)
        case Part():
            return dataclasses.replace(value, tensor=detached(value.tensor, place))
        case Term():
            return Term("detach", (value,), place)
    return value


def element(part: Part) -> Term:
    """Return the element of a tensor whose dimensions all have an index."""
    tensor = part.tensor
    if tensor.shape is not None and len(part.indices) < len(tensor.shape):
        message = (
            f"{called(tensor)} has {len(tensor.shape)} dimensions, and {len(part.indices)} are "
            "indexed"
        )
        part.place.refuse("whole-tensor", message, "index all of them, so that one element is left")
    return _read(tensor, part.indices, part.place)


# --- constructors ------------------------


def made(ev: Reader, name: str, args: list[Any], keywords: Mapping[str, Any], place: Place) -> Any:
    """Return the tensor of a torch constructor; None for other functions."""
    if ev.of_a_pair and name in RANDOM:
        hint = "draw the numbers beforehand, and index the tensor that has them"
        place.refuse("randomness", f"`{name}` is random", hint)
    if ev.of_a_pair:
        args = [scalar(a, place) for a in args]
        keywords = {key: scalar(value, place) for key, value in keywords.items()}
    asked = keywords.get("dtype")
    known = None if asked is None or isinstance(asked, DtypeOf | Unknown) else dtype(asked, place)
    grad = keywords.get("requires_grad") is True
    if name in ("tensor", "as_tensor", "scalar_tensor") and args:
        return _literal(args[0], known, grad, place)
    if name == "Parameter" and args:
        return owned(
            args[0], place, grad=keywords.get("requires_grad", True) is not False, follows=True
        )
    if name in _LIKE and args:
        return _like(name, args, keywords, known, place)
    if name in _FILLED:
        return _filled(name, args, keywords, known, grad, place)
    if name in ("arange", "linspace", "logspace", "eye", "randperm"):
        whole = name in ("arange", "randperm") and all(isinstance(a, int | Unknown) for a in args)
        return Tensor(
            place,
            None,
            shapes.of_constructor(name, args, keywords),
            known or ("int64" if whole else "fp32"),
            grad,
            origin(place),
        )
    if name in ("tril", "triu", "flip", "roll", "cumsum", "repeat_interleave", "sort") and args:
        of = args[0]
        if isinstance(of, Tensor):
            kept = of.shape if name in ("tril", "triu", "flip", "roll", "cumsum") else None
            summed = "int64" if name == "cumsum" and of.dtype in _WHOLE else of.dtype
            return _changed(of, place, shape=kept, dtype=known or summed)
    return None


def _literal(value: Any, known: str | None, grad: bool, place: Place) -> Any:
    if is_number(value):
        const = Term("const", (value,), place)
        made = const if known is None else Term("cast", (const, known), place)
        return owned(made, place, grad=True) if grad else made
    if isinstance(value, Term | Part | Tensor):
        return owned(value, place, grad=True) if grad else value
    if isinstance(value, Unknown):
        return Tensor(place, None, None, known, grad, origin(place), open=True)
    shape, leaves = shapes.of_lists(value)
    if known is None and leaves:
        types = {type(leaf) for leaf in leaves}
        known = (
            "fp32"
            if float in types
            else "int64"
            if int in types
            else "bool"
            if types == {bool}
            else None
        )
    tensor = Tensor(place, None, shape, known, grad, origin(place))
    if shape is not None and known in _WHOLE and not place.source.name.startswith("--"):
        tensor.facts = ascending.literal(_flat(value), math.prod(n or 0 for n in shape[:-1]))
    return tensor


def _flat(value: Any) -> list[Any]:
    """Return the leaves of nested lists in order."""
    if not isinstance(value, list | tuple | range):
        return [value]
    return [leaf for item in value for leaf in _flat(item)]


def _like(
    name: str, args: list[Any], keywords: Mapping[str, Any], known: str | None, place: Place
) -> Any:
    of = args[0]
    fill = keywords.get("fill_value", args[1] if len(args) > 1 else None)
    value = {"zeros_like": 0, "ones_like": 1, "full_like": fill}.get(name)
    if isinstance(of, Tensor):
        return _changed(of, place, dtype=known or of.dtype)
    if isinstance(of, Part):
        of = element(of)
    if not isinstance(of, Term) or not (is_number(value) or isinstance(value, Term)):
        return Unknown(place, f"the result of `{name}`")
    const = value if isinstance(value, Term) else Term("const", (value,), place)
    return Term("cast", (const, known), place) if known else Term("like", (const, of), place)


def _filled(
    name: str,
    args: list[Any],
    keywords: Mapping[str, Any],
    known: str | None,
    grad: bool,
    place: Place,
) -> Any:
    args = list(args)
    fill = {"zeros": 0.0, "ones": 1.0}.get(name)
    if name == "full":
        fill = keywords.get("fill_value", args.pop() if len(args) > 1 else None)
        if known is None and is_number(fill):
            known = (
                "bool" if isinstance(fill, bool) else "int64" if isinstance(fill, int) else "fp32"
            )
    if name == "randint":
        args = [keywords.get("size", args[-1] if args else None)]
        known = known or "int64"
    sizes = keywords.get(
        "size", args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    )
    if not isinstance(sizes, list | tuple):
        return Tensor(place, None, None, known or "fp32", grad, origin(place))
    if not sizes and is_number(fill) and not grad:
        return Term("cast", (Term("const", (fill,), place), known or "fp32"), place)
    shape = tuple(n if type(n) is int else None for n in sizes)
    return Tensor(place, None, shape, known or "fp32", grad, origin(place))


# --- tensors that are computed before the mods ------------------------


def computed(
    fn: str, args: Sequence[Any], place: Place, keywords: Mapping[str, Any] = MappingProxyType({})
) -> Tensor:
    """Return the result of a pointwise operation on whole tensors."""
    found = [a for a in args if isinstance(a, Tensor)]
    if any(a.shape is None for a in found):
        shape: Extents | None = None
    else:
        shape = (
            found[0].shape if len(found) == 1 else shapes.broadcast([a.shape or () for a in found])
        )
    made = Tensor(
        place,
        None,
        shape,
        _promoted(fn, args),
        any(a.grad for a in found),
        origin(place),
        any(a.open for a in found),
        follows=any(a.follows for a in found),
    )
    ascending.learn(fn, args, keywords, made)
    return made


_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "fp16", "bf16", "fp32", "fp64")
_WHOLE, _REALS = _ORDER[:6], _ORDER[6:]


def _promoted(fn: str, args: Sequence[Any]) -> str | None:
    """Return the dtype of the result, or None if the dtype of a tensor is unknown."""
    if fn in COMPARISONS | LOGICAL | TRUTH:
        return "bool"
    values = {"where": args[1:], "masked_fill": (*args[:1], *args[2:])}.get(fn, args)
    dtypes = {a.dtype for a in values if isinstance(a, Tensor)}
    if None in dtypes:
        return None
    dtype = max(filter(None, dtypes), key=_ORDER.index, default="bool")
    if dtypes >= {"fp16", "bf16"}:
        dtype = "fp32" if dtype != "fp64" else dtype
    if dtypes >= {"uint8", "int8"} and dtype == "int8":
        dtype = "int16"
    real = fn == "div" or fn in REAL - ROUNDING or any(isinstance(a, float) for a in values)
    if real and dtype not in _REALS:
        return "fp64" if fn == "float_power" else "fp32"
    if dtype == "bool" and any(type(a) is int for a in values):
        return "int64"
    return dtype


def method(
    ev: Reader, owner: Tensor, name: str, args: list[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return the result of a method of a whole tensor, before the mods."""
    if name in SAME or (
        name == "to" and (not args or is_device(args[0])) and "dtype" not in keywords
    ):
        if name == "requires_grad_":
            owner.grad = not args or args[0] is not False
        return owner
    if name == "to":
        wanted = keywords.get("dtype", args[-1] if args else None)
        known = None if isinstance(wanted, Unknown | DtypeOf) else dtype(wanted, place)
        return _changed(owner, place, dtype=known, follows=False)
    if name in DTYPES:
        return _changed(owner, place, dtype=DTYPES[name], follows=False)
    if name in ("detach", "clone"):
        return _changed(owner, place, grad=False, origin=owner.origin)
    if name in ("view", "reshape"):
        sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        return _changed(owner, place, shape=shapes.reshaped(owner.shape, sizes))
    if (
        name == "unsqueeze"
        and owner.shape is not None
        and args
        and args[0] in range(len(owner.shape) + 1)
    ):
        shape = (*owner.shape[: args[0]], 1, *owner.shape[args[0] :])
        return _changed(owner, place, shape=shape)
    if name == "unsqueeze" and owner.shape is None:
        return _changed(owner, place)
    if name in ("flatten", "ravel") and not args:
        return _changed(owner, place, shape=shapes.reshaped(owner.shape, (-1,)))
    if name == "t":
        return attribute(owner, "T", place)
    if name in shapes.MOVED:
        return _changed(owner, place, shape=shapes.moved(name, owner.shape, args))
    if name in ("tril", "triu", "cumsum", "flip"):
        return made(ev, name, [owner, *args], keywords, place)
    if name in ("item", "tolist"):
        return Unknown(place, f"the elements of {called(owner)}")
    if name in ELEMENTWISE:
        return computed(ELEMENTWISE[name][0], (owner, *args), place, keywords)
    return derived([owner, *args], keywords, place)


def _changed(owner: Tensor, place: Place, **fields: Any) -> Tensor:
    """Return a tensor derived from another one here, without a name."""
    known = {"name": None, "place": place, "origin": origin(place), "facts": None}
    return dataclasses.replace(owner, **{**known, **fields})


def derived(args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
    """Return the opaque result of a torch function on tensors."""
    given = [
        b for a in (*args, *keywords.values()) for b in (a if isinstance(a, list | tuple) else (a,))
    ]
    first = next((a for a in given if isinstance(a, Tensor)), None)
    if first is not None:
        found = [a for a in given if isinstance(a, Tensor)]
        roots = tuple(root for a in found for root in a.roots)
        is_open = any(a.open for a in found)
        return Tensor(place, None, None, None, first.grad, origin(place), is_open, roots=roots)
    return Unknown(place, "the result of torch here")


def origin(place: Place) -> str:
    name = place.source.name
    return (
        f"stated in {name}"
        if name.startswith("--")
        else f"created in line {place.line} of {PurePath(name).name}"
    )
