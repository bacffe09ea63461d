"""Calls of torch, of Python's own functions, and of functions that are known by name, on terms and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kgen.expr.parse import FLOAT32_MAX
from kgen.flex import ascending, effects, iterators, numbers, python, records, several, tensors
from kgen.flex.lengths import settled
from kgen.flex.source import Place
from kgen.flex.tables import DEFAULTS, DTYPES, ELEMENTWISE, NO_GRAD, RANDOM, REDUCTIONS, SAME
from kgen.flex.values import (
    MISSING,
    DtypeOf,
    Extent,
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
    kind,
    measured,
    note_change,
    plain,
)

if TYPE_CHECKING:
    from kgen.flex.evaluating import Evaluator

Keywords = dict[str, Any]

_KNOWN_MASKS = {"and_masks": "bitand", "or_masks": "bitor"}
_TRANSPARENT = frozenset(
    {
        *("compile", "script", "ignore", "lru_cache", "cache", "staticmethod", "wraps"),
        *("disable", "jit"),
    }
)
"""Decorators that leave what a function computes."""
_WRAPPING = {f"builtins.{name}": name for name in ("staticmethod", "classmethod", "property")}
JOINED = "kgen.joined"
DETACHED = "kgen.detached"


# --- operations of elements ------------------------


def applied(ev: Evaluator, fn: str, args: tuple[Any, ...], place: Place) -> Any:
    """An operation of elements: a term, or a tensor where whole tensors are computed ahead of the mods."""
    if ev.of_a_pair or any(isinstance(a, Term) for a in args):
        args = tuple(tensors.scalar(a, place) for a in args)
    if any(isinstance(a, Tensor) for a in args):
        if not ev.of_a_pair and not any(isinstance(a, Term) for a in args):
            return tensors.computed(fn, args, place)
        whole = next(a for a in args if isinstance(a, Tensor))
        message = f"{tensors.called(whole)} is a whole tensor here"
        place.refuse("whole-tensor", message, "index it, so that one element is left")
    if fn == "mul" and any(isinstance(a, float) and math.isinf(a) for a in args):
        hint = 'write `torch.where(allowed, score, -float("inf"))`'
        place.refuse("not-in-language", "a product with infinity is NaN where the other factor is zero", hint)
    return made(ev, fn, [operand(ev, a, place) for a in args], place)


def made(ev: Evaluator, fn: str, args: Sequence[Any], place: Place) -> Term:
    """The result of an operation, without a gradient in `torch.no_grad()`."""
    term = Term(fn, args, place)
    return Term("detach", (term,), place) if ev.detaches else term


def operand(ev: Evaluator, value: Any, place: Place) -> Term | int | float | bool:
    """What an operation of a pair may be applied to."""
    if isinstance(value, Part):
        return tensors.element(value)
    value = tensors.scalar(value, place)
    if isinstance(value, Tensor):
        message = f"{tensors.called(value)} is a whole tensor here"
        place.refuse("whole-tensor", message, "index it, so that one element is left")
    if isinstance(value, Unknown):
        ev.untold(value)
    if isinstance(value, Term) or is_number(value):
        return value  # type: ignore[no-any-return]
    place.refuse("bad-call", f"{kind(value)} is used as a number", "use numbers and tensors")


def _elementwise(ev: Evaluator, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    fn, parameters = ELEMENTWISE[name]
    for ignored in ("out", "inplace", "device"):
        keywords.pop(ignored, None)
    if name in ("max", "min") and len(args) == 1:
        place.refuse("reduction", f"`{name}` is a reduction", _NO_REDUCTION)
    given = dict(zip(parameters, args, strict=False))
    mode = keywords.pop("rounding_mode", None)
    scale = keywords.pop("alpha", 1) if fn in ("add", "sub") else 1
    scale = keywords.pop("value", 1) if fn == "addcmul" else scale
    tanh = keywords.pop("approximate", "none") == "tanh"
    if len(args) > len(parameters) or set(keywords) - {*parameters}:
        place.refuse("bad-call", f"`{name}` is not called so", f"write `{name}({', '.join(parameters)})`")
    given |= keywords
    if fn == "clamp":
        return _clamped(ev, given, place)
    defaults = DEFAULTS.get(fn, {})
    given = {p: value for p, value in given.items() if value is not None or p not in defaults}
    missing = [p for p in parameters if p not in given and p not in defaults]
    if missing:
        place.refuse("bad-call", f"`{name}` needs `{missing[0]}`", f"write `{name}({', '.join(parameters)})`")
    values = tuple(given.get(p, defaults.get(p)) for p in parameters)
    if any(isinstance(v, Unknown) for v in values) and not ev.of_a_pair:
        return next(v for v in values if isinstance(v, Unknown))
    if fn == "gelu" and tanh:
        fn = "gelu_tanh"
    if fn == "div" and mode is not None:
        fn = "floordiv" if mode == "floor" else "truncdiv"
    if scale != 1:
        values = (*values[:-1], applied(ev, "mul", (values[-1], scale), place))
    return applied(ev, fn, values, place)


def _clamped(ev: Evaluator, given: Keywords, place: Place) -> Any:
    value = given.get("input")
    low, high = given.get("min"), given.get("max")
    if low is None and high is None:
        place.refuse("bad-call", "`clamp` needs a bound", "write `clamp(x, min, max)`")
    if low is not None and high is not None:
        return applied(ev, "clamp", (value, low, high), place)
    return applied(ev, "min" if low is None else "max", (value, high if low is None else low), place)


_NO_REDUCTION = "a mod is computed for one pair; compute the sum beforehand, and index the tensor of sums"
_NO_CHANCE = "draw the numbers beforehand, and index the tensor that has them"


# --- functions of other packages ------------------------


def of_lengths(
    ev: Evaluator, fn: str, args: tuple[Any, ...], place: Place
) -> tuple[tuple[Any, ...], Extent | None]:
    """The operands of an operator, lengths as what they are in a mod; or what an operator makes of lengths ahead of
    the mods."""
    first = next((a for a in args if isinstance(a, Extent)), None)
    if first is None or ev.of_a_pair:
        return tuple(map(measured, args)), None
    if not all(is_number(a) or isinstance(a, Extent) for a in args):
        return args, None
    return args, replace(first, term=applied(ev, fn, tuple(map(measured, args)), place))


@settled
def external(ev: Evaluator, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """A call of a function that is known by its name alone."""
    package, _, name = path.partition(".")
    if ev.of_a_pair and package != "builtins":
        args, keywords = [*map(measured, args)], {key: measured(value) for key, value in keywords.items()}
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
        # Comparisons and calls use its mask.
        mask = args[0] if args else keywords["mask_mod"]
        if is_callable(mask):
            called = ev.classes.caller(mask, place) if isinstance(mask, Instance) else mask
            if effects.runs_changes(ev, called):
                effects.escaped(ev, [mask], place)
            return mask
    if last == "noop_mask":
        return True
    if last == "_identity" and args:
        return args[0]
    if last == "causal_mask_function" and len(args) == 4:
        return ev.operate("le", (args[3], args[2]), place)
    if package in ("math", "numpy", "np") and last in numbers.MATH and all(is_number(a) for a in args):
        return numbers.mathematics(last, args, place)
    if package == "torch":
        return _torch(ev, path, args, keywords, place)
    if ev.of_a_pair:
        if last in RANDOM:
            place.refuse("randomness", f"`{path}` is random", _NO_CHANCE)
        if package == "math" and any(isinstance(a, Term | Part) for a in args):
            place.refuse(
                "other-package", f"`{path}` takes numbers, not tensors", f"write `torch.{last}(...)`"
            )
        message = f"`{path}` is a function of another package"
        place.refuse("other-package", message, "write what it does with torch, or import a mod without it")
    effects.escaped(ev, [*args, *keywords.values()], place)
    return Unknown(place, f"what `{path}` gives")


def _of_types(ev: Evaluator, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """A call that makes a type, a part of one, or a number of a type; MISSING for any other."""
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
    if package in ("numpy", "np") and last in numbers.SCALARS and len(args) == 1 and is_number(args[0]):
        return numbers.computed(lambda: numbers.scalar(last, args[0]), place)
    return MISSING


def _torch(ev: Evaluator, path: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    last = path.rpartition(".")[2].removeprefix("special_")
    args, keywords = plain(args), {key: plain(value) for key, value in keywords.items()}
    given = dict(keywords)
    if not ev.of_a_pair:
        note_change([*(args if changes_in_place(last) else ()), keywords.get("out")])
    found = _of_torch(ev, path, last, args, keywords, place)
    if not ev.of_a_pair:
        ascending.learn(last, args, given, found)
    return found


def _of_torch(ev: Evaluator, path: str, last: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
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
        place.refuse("not-in-language", f"`{path}` changes a tensor in place", "make it with its value")
    effects.escaped(ev, [a for a in (*args, *keywords.values()) if is_callable(a)], place)
    two = last in ("max", "min") and len(args) + ("other" in keywords) == 2
    if two and not isinstance(args[-1], int):
        return applied(ev, last, (*args, *keywords.values()), place)
    if last == "unbind" and args and isinstance(args[0], Tensor | Part):
        return method(ev, Method(args[0], last), args[1:], keywords, place)
    args = [several.whole(ev, a, place) for a in args]
    if not ev.of_a_pair and (last != "where" or len(args) == 1):
        found = several.several(ev, last, args, keywords, place)
        if found is not None:
            return found
    if last in ELEMENTWISE:
        return _elementwise(ev, last, args, keywords, place)
    made = tensors.made(ev, last, args, keywords, place)
    if made is not None:
        return made
    if last in DTYPES and not args:
        return External(path)
    if ev.of_a_pair:
        if last in RANDOM:
            place.refuse("randomness", f"`{path}` is random", _NO_CHANCE)
        if last in REDUCTIONS:
            place.refuse("reduction", f"`{path}` is a reduction", _NO_REDUCTION)
        message = f"`{path}` is not a function of elements that can be read"
        place.refuse("not-in-language", message, "write what it does with arithmetic, `where`, `exp`, `log`")
    return tensors.derived(args, keywords, place)


class _Limits:
    """`torch.finfo(...)`."""

    def __init__(self, of: str, dtype: Any) -> None:
        self.of = of
        self.dtype = dtype

    def find_attribute(self, name: str, place: Place) -> Any:
        if self.of == "finfo" and name == "min":
            # A score's dtype, and any that is not known, is fp32.
            known = isinstance(self.dtype, External)
            return Least(-_MOST.get(tensors.dtype(self.dtype, place) if known else "fp32", FLOAT32_MAX))
        if self.of == "iinfo" and name in ("min", "max"):
            return -(2**31) if name == "min" else 2**31 - 1
        place.refuse("not-in-language", f"`{self.of}(...).{name}` depends on a dtype", "write the number")


_MOST = {"fp16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
"""The greatest numbers of dtypes that have less than fp32."""

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


def _joined(ev: Evaluator, args: list[Any], place: Place) -> Any:
    """What `and_masks(...)` and `or_masks(...)` give, called."""
    fn, masks, *pair = args
    result: Any = None
    for mask in masks:
        value = ev.call(mask, pair, {}, place)
        result = value if result is None else ev.operate(fn, (result, value), place)
    return result


def _functools(ev: Evaluator, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    if not args or not is_callable(args[0]):
        place.refuse("bad-call", f"`{name}` needs a function first", "write the function first")
    function, *rest = args
    if name == "partial":
        return Partial(function, tuple(rest), keywords)
    if not rest:
        place.refuse("bad-call", "`reduce` needs something to reduce", "write `reduce(function, values)`")
    items = list(ev.items(rest[0], place))
    if len(rest) > 1:
        items.insert(0, rest[1])
    if not items:
        place.refuse("bad-call", "`reduce` is given nothing", "give it an initial value")
    result = items[0]
    for item in items[1:]:
        result = ev.call(function, [result, item], {}, place)
    return result


def decorated(ev: Evaluator, decorator: Any, function: Any, place: Place) -> Any:
    """A function with a decorator."""
    if not isinstance(decorator, External | Unknown):
        return ev.call(decorator, [function], {}, place)
    name = decorator.path if isinstance(decorator, External) else decorator.what
    if name.rpartition(".")[2].strip("` gives") in ("cache", "lru_cache") and isinstance(function, Function):
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
        return Unknown(place, f"what the decorator `{name}` makes of `{called}`")
    if decorator.error is None and any(known in name for known in _TRANSPARENT):
        ev.renamed = ev.renamed or "wraps" in name
        return function
    effects.escaped(ev, [function], place)
    return decorator


# --- methods ------------------------


@settled
def method(ev: Evaluator, bound: Method, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """A call of a method of a term, of a tensor, or of a sequence."""
    owner, name = bound.owner, bound.name
    if isinstance(owner, list | dict | str):
        return python.of_sequence(ev, owner, name, args, keywords, place)
    args, keywords = plain(args), {key: plain(value) for key, value in keywords.items()}
    if ev.of_a_pair:
        args, keywords = [*map(measured, args)], {key: measured(value) for key, value in keywords.items()}
    if is_number(owner):
        return python.of_number(owner, name, args, place)
    if isinstance(owner, Tensor | Part) and name in ("size", "dim", "ndimension", "numel"):
        return several.size(owner, name, args, keywords, place)
    if isinstance(owner, Tensor | Part) and name == "unbind" and _by_elements(ev, owner):
        return _unbound(owner, args, keywords, place)
    if isinstance(owner, Tensor | Part) and name == "detach" and ev.of_a_pair:
        return tensors.detached(owner, place)
    if not ev.of_a_pair:
        note_change([*([owner] if changes_in_place(name) else ()), keywords.get("out")])
    owner = several.whole(ev, owner, place)
    if isinstance(owner, Tensor):
        if not ev.of_a_pair and not any(isinstance(a, Term) for a in args):
            found = several.several(ev, name, [owner, *args], keywords, place)
            if found is None:
                found = tensors.method(ev, owner, name, args, keywords, place)
            ascending.learn(name, [owner, *args], keywords, found)
            return found
        if name in REDUCTIONS:
            place.refuse("reduction", f"`.{name}()` is a reduction", _NO_REDUCTION)
        owner = operand(ev, owner, place)
    value = owner
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
            "not-in-language", f"`.{name}()` changes a tensor in place", f"write `x = x.{base}(...)`"
        )
    if name in ("max", "min") and args:
        return applied(ev, name, (value, *args), place)
    if name in ELEMENTWISE:
        fn = ELEMENTWISE[name]
        if fn[0] == "where":
            args = [args[0], value, *args[1:]] if args else args
            return _elementwise(ev, name, args, keywords, place)
        return _elementwise(ev, name, [value, *args], keywords, place)
    if name in REDUCTIONS:
        place.refuse("reduction", f"`.{name}()` is a reduction", _NO_REDUCTION)
    if name in ("view", "reshape", "squeeze", "unsqueeze", "expand", "flatten"):
        place.refuse("not-in-language", f"`.{name}()` changes a shape", "one value of the pair has no shape")
    place.refuse(
        "not-in-language", f"`.{name}()` cannot be read", "write what it does with torch's functions"
    )


def _by_elements(ev: Evaluator, owner: Tensor | Part) -> bool:
    """True if what is taken apart stays one buffer; ahead of the mods its rows become tensors of their own."""
    return ev.of_a_pair or isinstance(owner, Part) or len(owner.shape or ()) == 1


def _unbound(owner: Any, args: list[Any], keywords: Keywords, place: Place) -> Any:
    axis = keywords.get("dim", args[0] if args else 0)
    if axis != 0 and not (axis == -1 and len(several.shape_of(owner) or ()) == 1):
        place.refuse("whole-tensor", "`.unbind()` gives columns here", "index them: `t[:, 0]` is `t[i, 0]`")
    return tuple(several.rows(owner, place))


def _cast(ev: Evaluator, value: Any, args: list[Any], keywords: Keywords, place: Place) -> Any:
    wanted = keywords.get("dtype", keywords.get("other", args[0] if args else None))
    if isinstance(wanted, Term | Part):
        return made(ev, "like", (operand(ev, value, place), operand(ev, wanted, place)), place)
    if isinstance(wanted, DtypeOf):
        return made(ev, "like", (operand(ev, value, place), wanted.term), place)
    if isinstance(wanted, str) or wanted is None or tensors.is_device(wanted):
        return value
    return made(ev, "cast", (operand(ev, value, place), tensors.dtype(wanted, place)), place)


def _new(ev: Evaluator, owner: Any, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
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
            "not-in-language", f"`.{name}()` makes more than a number", "make a number, of shape `()`"
        )
    wanted = keywords.get("dtype")
    const = Term("const", (value,), place)
    if wanted is None:
        return const if name == "new_tensor" else Term("like", (const, operand(ev, owner, place)), place)
    return _cast(ev, const, [wanted], {}, place)


__all__ = ["JOINED", "applied", "decorated", "external", "method", "operand"]
