"""Calls of torch, of Python builtins, and of other functions that are known by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kgen.expr.parse import FLOAT32_MAX
from kgen.flex import (
    ascending,
    effects,
    elementwise,
    instances,
    iterators,
    numbers,
    python,
    records,
    several,
    tensors,
)
from kgen.flex.elementwise import NO_REDUCTION
from kgen.flex.lengths import settled
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.tables import DTYPES, ELEMENTWISE, NO_GRAD, RANDOM, REDUCTIONS
from kgen.flex.values import (
    MISSING,
    External,
    Function,
    Instance,
    Least,
    Method,
    Part,
    Partial,
    Tensor,
    Term,
    Unknown,
    Wrapped,
    changes_in_place,
    is_callable,
    is_number,
    measured,
    note_change,
    plain,
)

Keywords = dict[str, Any]

_KNOWN_MASKS = {"and_masks": "bitand", "or_masks": "bitor"}
_TRANSPARENT = frozenset(
    {
        *("compile", "script", "ignore", "lru_cache", "cache", "staticmethod", "wraps"),
        *("disable", "jit"),
    }
)
"""Decorators that do not change the result of a function."""
_WRAPPING = {f"builtins.{name}": name for name in ("staticmethod", "classmethod", "property")}
JOINED = "kgen.joined"
DETACHED = "kgen.detached"


_NO_CHANCE = "draw the numbers beforehand, and index the tensor that has them"


# --- functions of other packages ------------------------


@settled
def external(ev: Reader, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return the result of a function that is known only by its name."""
    package, _, name = path.partition(".")
    if ev.of_a_pair and package != "builtins":
        args, keywords = (
            [*map(measured, args)],
            {key: measured(value) for key, value in keywords.items()},
        )
    last = path.rpartition(".")[2]
    if path == JOINED:
        return _joined(ev, args, place)
    if path == DETACHED:
        with ev.gradients(False):
            return ev.call(args[0], args[1:], keywords, place)
    if package == "builtins":
        return python.called(ev, name, args, keywords, place)
    if path in ("functools.partial", "functools.reduce"):
        return _functools(ev, last, args, keywords, place)
    if package == "itertools":
        found = iterators.called(ev, last, args, keywords, place)
        if found is not MISSING:
            return found
    if package == "operator" and (fn := _OPERATOR.get(last)):
        return ev.operate(fn, tuple(args), place)
    found = _of_types(ev, path, args, keywords, place)
    if found is not MISSING:
        return found
    if last in _KNOWN_MASKS and args and all(is_callable(a) for a in args):
        return Partial(External(JOINED), (_KNOWN_MASKS[last], tuple(args)), {})
    if last == "create_block_mask" and not ev.of_a_pair and (args or "mask_mod" in keywords):
        mask = args[0] if args else keywords["mask_mod"]
        if is_callable(mask):
            return _block_mask(ev, mask, place)
    if last == "noop_mask":
        return True
    if last == "_identity" and args:
        return args[0]
    if last == "causal_mask_function" and len(args) == 4:
        return ev.operate("le", (args[3], args[2]), place)
    if (
        package in ("math", "numpy", "np")
        and last in numbers.MATH
        and all(is_number(a) for a in args)
    ):
        return numbers.mathematics(last, args, place)
    if package == "torch":
        return _torch(ev, path, args, keywords, place)
    if ev.of_a_pair:
        if last in RANDOM:
            place.refuse("randomness", f"`{path}` is random", _NO_CHANCE)
        if package == "math" and any(isinstance(a, Term | Part) for a in args):
            message = f"`{path}` takes numbers, not tensors"
            place.refuse("other-package", message, f"write `torch.{last}(...)`")
        message = f"`{path}` is a function of another package"
        place.refuse(
            "other-package", message, "write the computation with torch, or import a mod without it"
        )
    effects.escaped(ev, [*args, *keywords.values()], place)
    return Unknown(place, f"the result of `{path}`")


def _block_mask(ev: Reader, mask: Any, place: Place) -> Any:
    """Return the mask of `create_block_mask`, which comparisons and calls use."""
    called = instances.caller(mask, place) if isinstance(mask, Instance) else mask
    if effects.runs_changes(ev, called):
        effects.escaped(ev, [mask], place)
    return mask


def _of_types(ev: Reader, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return the result of a call that makes a type or a typed number; MISSING for other calls."""
    package, last = path.partition(".")[0], path.rpartition(".")[2]
    if path == "enum.auto":
        return External("enum.auto()")
    if path == "torch.Size" and len(args) == 1:
        return tuple(ev.items(args[0], place))
    if path in ("collections.namedtuple", "typing.NamedTuple"):
        return records.named_tuple(ev, args, keywords, place)
    if path == "dataclasses.dataclass" and not args:
        return Partial(records.DATACLASS, (), keywords)
    if path == "dataclasses.field" and not args:
        return records.field(keywords, place)
    if (
        package in ("numpy", "np")
        and last in numbers.SCALARS
        and len(args) == 1
        and is_number(args[0])
    ):
        return numbers.computed(lambda: numbers.scalar(last, args[0]), place)
    return MISSING


def _torch(ev: Reader, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    last = path.rpartition(".")[2].removeprefix("special_")
    args, keywords = plain(args), {key: plain(value) for key, value in keywords.items()}
    given = dict(keywords)
    if not ev.of_a_pair:
        note_change([*(args if changes_in_place(last) else ()), keywords.get("out")])
    found = _of_torch(ev, path, last, args, keywords, place)
    if not ev.of_a_pair:
        ascending.learn(last, args, given, found)
    return found


def _of_torch(
    ev: Reader, path: str, last: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    if last in ("finfo", "iinfo"):
        return _Limits(last, args[0] if args else None)
    if last in NO_GRAD:
        wraps = args and is_callable(args[0])
        if args and not wraps and args[0] is not True:
            return Unknown(place, f"`{path}` with this argument")
        return Partial(External(DETACHED), (args[0],), {}) if wraps else External(path)
    if last in ("compile", "script", "is_tensor", "vmap"):
        if args and is_callable(args[0]):
            return args[0]
        return External(path)
    if any(isinstance(a, Term) for a in args) and not ev.of_a_pair and not effects.harmless(path):
        place.refuse(
            "not-in-language",
            f"`{path}` changes a tensor in place",
            "create it with its final value",
        )
    effects.escaped(ev, [a for a in (*args, *keywords.values()) if is_callable(a)], place)
    two = last in ("max", "min") and len(args) + ("other" in keywords) == 2
    if two and not isinstance(args[-1], int):
        return elementwise.applied(ev, last, (*args, *keywords.values()), place)
    if last == "unbind" and args and isinstance(args[0], Tensor | Part):
        return ev.call(Method(args[0], last), args[1:], keywords, place)
    args = [several.whole(ev, a, place) for a in args]
    if not ev.of_a_pair and (last != "where" or len(args) == 1):
        found = several.several(ev, last, args, keywords, place)
        if found is not None:
            return found
    if last in ELEMENTWISE:
        return elementwise.called(ev, last, args, keywords, place)
    made = tensors.made(ev, last, args, keywords, place)
    if made is not None:
        return made
    if last in DTYPES and not args:
        return External(path)
    if ev.of_a_pair:
        if last in RANDOM:
            place.refuse("randomness", f"`{path}` is random", _NO_CHANCE)
        if last in REDUCTIONS:
            place.refuse("reduction", f"`{path}` is a reduction", NO_REDUCTION)
        message = f"`{path}` is not a pointwise function that can be read"
        place.refuse(
            "not-in-language",
            message,
            "write the computation with arithmetic, `where`, `exp`, `log`",
        )
    return tensors.derived(args, keywords, place)


class _Limits:
    """The value of `torch.finfo(...)`."""

    def __init__(self, of: str, dtype: Any) -> None:
        self.of = of
        self.dtype = dtype

    def find_attribute(self, name: str, place: Place) -> Any:
        if self.of == "finfo" and name == "min":
            # Scores are fp32, and unknown dtypes are assumed to be.
            known = isinstance(self.dtype, External)
            return Least(
                -_MOST.get(tensors.dtype(self.dtype, place) if known else "fp32", FLOAT32_MAX)
            )
        if self.of == "iinfo" and name in ("min", "max"):
            return -(2**31) if name == "min" else 2**31 - 1
        place.refuse(
            "not-in-language", f"`{self.of}(...).{name}` depends on a dtype", "write the number"
        )


_MOST = {"fp16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
"""The largest number of each dtype with a smaller range than fp32."""

_OPERATOR = {
    "and_": "bitand",
    "or_": "bitor",
    "xor": "bitxor",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "floordiv",
    "mod": "mod",
    "neg": "neg",
    "invert": "invert",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
}


def _joined(ev: Reader, args: list[Any], place: Place) -> Any:
    """Return the mask that `and_masks(...)` or `or_masks(...)` computes."""
    fn, masks, *pair = args
    result: Any = None
    for mask in masks:
        value = ev.call(mask, pair, {}, place)
        result = value if result is None else ev.operate(fn, (result, value), place)
    return result


def _functools(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    if not args or not is_callable(args[0]):
        place.refuse("bad-call", f"`{name}` needs a function first", "write the function first")
    function, *rest = args
    if name == "partial":
        return Partial(function, tuple(rest), keywords)
    if not rest:
        place.refuse("bad-call", "`reduce` needs a sequence", "write `reduce(function, values)`")
    items = list(ev.items(rest[0], place))
    if len(rest) > 1:
        items.insert(0, rest[1])
    if not items:
        place.refuse("bad-call", "`reduce` gets an empty sequence", "add an initial value")
    result = items[0]
    for item in items[1:]:
        result = ev.call(function, [result, item], {}, place)
    return result


def decorated(ev: Reader, decorator: Any, function: Any, place: Place) -> Any:
    """Return a function with a decorator applied."""
    if not isinstance(decorator, External | Unknown):
        return ev.call(decorator, [function], {}, place)
    name = decorator.path if isinstance(decorator, External) else decorator.what
    if name.rpartition(".")[2].strip("` gives") in ("cache", "lru_cache") and isinstance(
        function, Function
    ):
        return replace(function, results={})
    if name in _WRAPPING and isinstance(function, Function):
        return Wrapped(_WRAPPING[name], function)
    if isinstance(decorator, External):
        if name.rpartition(".")[2] in NO_GRAD:
            return Partial(External(DETACHED), (function,), {})
        if name.rpartition(".")[2] in _TRANSPARENT:
            return function
        effects.escaped(ev, [function], place)
        called = getattr(function, "name", "a function")
        return Unknown(place, f"the result of the decorator `{name}` on `{called}`")
    if decorator.error is None and any(known in name for known in _TRANSPARENT):
        ev.renamed = ev.renamed or "wraps" in name
        return function
    effects.escaped(ev, [function], place)
    return decorator
