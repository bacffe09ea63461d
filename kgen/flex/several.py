"""Splitting and joining of tensors: rows, and torch functions that return several tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kgen.flex import numbers, tensors
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import Part, Root, Shape, Tensor, Unknown, extent

Extents = tuple[int | None, ...]
_PAIRED = frozenset(
    {"max", "min", "sort", "topk", "median", "nanmedian", "mode", "kthvalue", "cummax", "cummin"}
)
_OF_LISTS = frozenset(("stack", "cat", "concat", "concatenate"))
_FROM_OUTSIDE = frozenset({"load", "from_numpy", "frombuffer", "from_dlpack", "from_file"})


class Results(tuple[Any, ...]):
    """Values and indices, as returned by `torch.max(dim=...)`."""

    def find_attribute(self, name: str, place: Place) -> Any:
        if name in ("values", "indices"):
            return self[name == "indices"]
        return Unknown(place, f"`.{name}`")


def shape_of(value: Tensor | Part) -> Extents | None:
    """Return the extents of the dimensions without an index."""
    if isinstance(value, Tensor):
        return value.shape
    return None if value.tensor.shape is None else value.tensor.shape[len(value.indices) :]


def rows(value: Any, place: Place) -> list[Any]:
    """Return the items of a loop over a tensor with a known extent."""
    if not isinstance(value, Tensor | Part):
        hint = "write the steps one by one: the source must define the number of steps"
        place.refuse("data-dependent", "a loop runs over a value of the pair", hint)
    shape = shape_of(value)
    if not shape or shape[0] is None:
        named = tensors.called(value if isinstance(value, Tensor) else value.tensor)
        message = f"a loop runs over {named}, whose length is unknown here"
        hint = "state its shape in the source, or in EXPR: `t := torch.zeros(3, 2)`"
        place.refuse("data-dependent", message, hint)
    if isinstance(value, Tensor) and value.name is None and len(shape) > 1:
        return [_made(value, place, shape[1:]) for _ in range(shape[0])]
    tensor, before = (value, ()) if isinstance(value, Tensor) else (value.tensor, value.indices)
    numbers.sized((), shape[0], place)
    return [Part(tensor, (*before, i), place) for i in range(shape[0])]


def whole(ev: Reader, value: Any, place: Place) -> Any:
    """Return a row as a tensor, before the mods."""
    if ev.of_a_pair or not isinstance(value, Part) or not shape_of(value):
        return value
    return _made(value.tensor, place, shape_of(value))


def size(
    value: Tensor | Part, name: str, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return `.size()`, `.dim()` or `.numel()`."""
    if name in ("dim", "ndimension"):
        return tensors.attribute(value, "ndim", place)
    shape = tensors.attribute(value, "shape", place)
    axis = keywords.get("dim", args[0] if args else None)
    if isinstance(shape, Shape) and axis is not None:
        return shape.find_item(axis, place)
    if isinstance(shape, Shape) and name == "numel" and shape.tensor is not None and not shape.gone:
        return extent(shape.tensor, None, shape)
    if isinstance(shape, Unknown):
        return shape
    if name == "numel":
        unknown = next((n for n in shape if isinstance(n, Unknown)), None)
        if unknown is None:
            return math.prod(shape)
        return unknown if len(shape) == 1 else Unknown(place, unknown.what, unknown.hint)
    if axis is None:
        return shape
    return numbers.computed(lambda: shape[axis], place)


def several(
    ev: Reader, name: str, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return the results of a torch function that splits tensors, before the mods; None for other
    functions.
    """
    if name in _FROM_OUTSIDE:
        of = [a for a in args if isinstance(a, Tensor)]  # the result may share memory with these
        roots = tuple(root for a in of for root in a.roots) or (Root(),)
        return Tensor(place, None, None, None, origin=tensors.origin(place), open=True, roots=roots)
    if name == "meshgrid":
        return _meshgrid(args, keywords, place)
    if name in _OF_LISTS and args and isinstance(args[0], list | tuple):
        return _joined(name, args[0], keywords.get("dim", args[1] if len(args) > 1 else 0), place)
    first = args[0] if args else None
    if name in ("tril_indices", "triu_indices"):
        return Tensor(place, None, (2, None), "int64", origin=tensors.origin(place), open=True)
    if not isinstance(first, Tensor):
        return None
    rest = args[1:]
    axis = keywords.get(
        "dim", rest[-1] if len(rest) > (name in ("split", "chunk", "topk", "kthvalue")) else None
    )
    if name == "unbind":
        return _split(first, [1] * (_extent(first, axis or 0) or 0), axis or 0, True, place)
    if name in ("split", "chunk"):
        return _split(
            first, _pieces(name, first, rest, keywords, axis or 0), axis or 0, False, place
        )
    if name in ("searchsorted", "bucketize"):
        values = (
            args[1]
            if name == "searchsorted" and len(args) > 1
            else first
            if name == "bucketize"
            else None
        )
        if isinstance(values, Tensor):
            dtype = "int32" if keywords.get("out_int32") is True else "int64"
            return _made(values, place, values.shape, dtype=dtype)
    if name in ("unique", "unique_consecutive"):
        return _unique(name, first, rest, keywords, place)
    if name == "nonzero" or name == "argwhere" or (name == "where" and len(args) == 1):
        rank = None if first.shape is None else len(first.shape)
        if name == "where" or keywords.get("as_tuple") is True:
            if rank is None:
                return Unknown(place, f"the number of tensors that `{name}` returns")
            return tuple(
                _made(first, place, (None,), dtype="int64", open=True) for _ in range(rank)
            )
        return _made(first, place, (None, rank), dtype="int64", open=True)
    if name == "masked_select":
        return _made(first, place, (None,), open=True)
    if name in _PAIRED and (type(axis) is int or name in ("sort", "topk", "kthvalue", "mode")):
        values = _made(first, place, _reduced(name, first, axis, keywords))
        return Results((values, dataclasses.replace(values, dtype="int64", grad=False)))
    return None


def _made(of: Tensor, place: Place, shape: Extents | None, **fields: Any) -> Tensor:
    grad = of.grad and fields.get("dtype") is None
    return dataclasses.replace(
        of,
        **{
            "name": None,
            "place": place,
            "origin": tensors.origin(place),
            "shape": shape,
            "grad": grad,
            "facts": None,
            **fields,
        },
    )


def _extent(of: Tensor, axis: Any) -> int | None:
    if of.shape is None or type(axis) is not int or not -len(of.shape) <= axis < len(of.shape):
        return None
    return of.shape[axis]


def _split(of: Tensor, sizes: Sequence[int], axis: Any, gone: bool, place: Place) -> Any:
    """Return the pieces of a tensor along a dimension."""
    if not sizes or of.shape is None:
        return Unknown(place, f"the number of parts of {tensors.called(of)}")
    numbers.sized((), len(sizes), place)
    at = axis % len(of.shape)
    before, after = of.shape[:at], of.shape[at + 1 :]
    return tuple(_made(of, place, (*before, *(() if gone else (n,)), *after)) for n in sizes)


def _pieces(
    name: str, of: Tensor, rest: Sequence[Any], keywords: Mapping[str, Any], axis: Any
) -> Sequence[int]:
    extent = _extent(of, axis)
    given = rest[0] if rest else keywords.get("split_size_or_sections", keywords.get("chunks"))
    if extent is None:
        return ()
    if name == "split" and isinstance(given, list | tuple):
        return tuple(given) if all(type(n) is int for n in given) and sum(given) == extent else ()
    if type(given) is not int or given < 1:
        return ()
    most = given if name == "split" else -(-extent // given)
    return [min(most, extent - start) for start in range(0, extent, max(most, 1))]


def _meshgrid(args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    order = keywords.get("indexing", "ij")
    if not given or not all(isinstance(a, Tensor) for a in given) or order not in ("ij", "xy"):
        return Unknown(place, "the result of `meshgrid`")
    extents = [_extent(a, 0) for a in given]
    if order == "xy" and len(extents) > 1:
        extents[:2] = extents[1::-1]
    return tuple(_made(a, place, tuple(extents)) for a in given)


def _joined(name: str, given: Sequence[Any], axis: Any, place: Place) -> Any:
    """Return the result of `stack` or `cat`."""
    if not given or not all(isinstance(t, Tensor) for t in given):
        return None
    dtypes = {t.dtype for t in given}
    fields: dict[str, Any] = {
        "dtype": dtypes.pop() if len(dtypes) == 1 else None,
        "grad": any(t.grad for t in given),
        "open": any(t.open for t in given),
        "roots": tuple(root for t in given for root in t.roots),
    }
    shapes = [t.shape for t in given]
    rank = None if shapes[0] is None else len(shapes[0]) + (name == "stack")
    shape: Extents | None = None
    if rank and type(axis) is int and -rank <= axis < rank:
        shape = _stacked(shapes, axis % rank) if name == "stack" else _appended(shapes, axis % rank)
    return dataclasses.replace(_made(given[0], place, shape), **fields)


def _stacked(shapes: Sequence[Extents | None], axis: int) -> Extents | None:
    first = shapes[0]
    if first is None or any(shape != first for shape in shapes):
        return None
    return (*first[:axis], len(shapes), *first[axis:])


def _appended(shapes: Sequence[Extents | None], axis: int) -> Extents | None:
    first = shapes[0]
    if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
        return None
    extents = [shape[axis] for shape in shapes if shape is not None]
    total = None if None in extents else sum(n for n in extents if n is not None)
    return (*first[:axis], total, *first[axis + 1 :])


def _unique(
    name: str, of: Tensor, rest: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    parameters = ("sorted", "return_inverse", "return_counts", "dim")
    given = dict(
        zip(parameters if name == "unique" else parameters[1:], rest, strict=False)
    ) | dict(keywords)
    axis = given.get("dim")
    found = [_made(of, place, (None,) if axis is None else None, open=True)]
    if given.get("return_inverse") is True:
        shape = of.shape if axis is None else (_extent(of, axis),)
        found.append(_made(of, place, shape, dtype="int64"))
    if given.get("return_counts") is True:
        found.append(_made(of, place, (None,), dtype="int64", open=True))
    return found[0] if len(found) == 1 else tuple(found)


def _reduced(name: str, of: Tensor, axis: Any, keywords: Mapping[str, Any]) -> Extents | None:
    """Return the shape after a reduction of a dimension."""
    if of.shape is None or name in ("sort", "cummax", "cummin"):
        return of.shape
    if name == "topk" or type(axis) is not int or not -len(of.shape) <= axis < len(of.shape):
        return None
    at = axis % len(of.shape)
    kept = (1,) if keywords.get("keepdim") is True else ()
    return (*of.shape[:at], *kept, *of.shape[at + 1 :])
