"""Import of the mods of a source as a spec that can be rendered."""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

from kgen.diagnostics import Diagnostic, KgenError, escaped
from kgen.expr.nodes import Call, Const, Node, Type, Var, buffers_of, length_of, transform
from kgen.expr.printed_size import MAX_NODES
from kgen.flex import modules
from kgen.flex.ascending import ascends
from kgen.flex.evaluating import Evaluator
from kgen.flex.functions import signature
from kgen.flex.inference import infer, walk
from kgen.flex.lowering import End, Lowering
from kgen.flex.source import Place, Source
from kgen.flex.tensors import called, element, scalar
from kgen.flex.text import size
from kgen.flex.values import (
    MISSING,
    Class,
    External,
    Frame,
    FromEnd,
    Function,
    Instance,
    Method,
    Part,
    Partial,
    Scope,
    Tensor,
    Term,
    Unknown,
    is_callable,
    kind,
    measured,
)
from kgen.flex.writing import Spec
from kgen.spec.common import MAX_RANK, REALS, checked_name, differentiable

PAIR = ("b", "h", "q_idx", "kv_idx")
OF_INDEX = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}
MODS = {"score_mod": ("score", *PAIR), "mask_mod": PAIR}


@dataclass(frozen=True)
class Options:
    """Fields of a spec besides its mods."""

    name: str | None = None
    head_dim: int = 128
    gqa: int | str = 1
    dtype: str = "bf16"


@dataclass(eq=False)
class Asked:
    """The scope of an EXPR: names of the source, torch and math.

    Any other name is a tensor of the call.
    """

    outer: Scope
    source: Source
    node: ast.AST
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def find(self, name: str) -> Any:
        value = self.outer.find(name)
        if value is not MISSING:
            return value
        if name in ("torch", "math", "functools", "and_masks", "or_masks", "noop_mask"):
            return External(name)
        if hasattr(builtins, name):
            return MISSING
        if name not in self.tensors:
            place = Place(self.source, self.node)
            self.tensors[name] = Tensor(place, name, origin="passed by the caller")
        return self.tensors[name]

    def closure(self) -> Scope:
        return self


def imported(given: str, asked: Mapping[str, str | None], options: Options) -> Spec:
    """Return the spec of the mods `asked` (EXPR by field) of SOURCE.

    Raise `KgenError` if one is refused.
    """
    if not any(asked.values()):
        hint = (
            "name a function of the source with `--score` or `--mask`, or a call that returns one"
        )
        raise KgenError(
            Diagnostic("usage", "expected `--score` or `--mask`, got neither", hint=hint)
        )
    evaluator = Evaluator()
    module = evaluator.module(modules.find(given))
    mods: dict[str, tuple[Any, Place]] = {}
    for kind_of, text in asked.items():
        if text is not None:
            mods[kind_of] = _asked(evaluator, module, text, f"--{kind_of.removesuffix('_mod')}")
    if options.name is None:
        options = dataclasses.replace(options, name=_default_name(module, asked.values()))
    said = ", ".join(f"{field}={text}" for field, text in asked.items() if text is not None)
    path = module.path
    of_package = path is not None and path.name == "__init__.py"
    origin = (
        f"{(path.parent.name or given if of_package else path.name) if path else given}: {said}"
    )
    return built(evaluator, mods, options, origin)


def _asked(ev: Evaluator, module: modules.Module, text: str, option: str) -> tuple[Any, Place]:
    """Return the function of an EXPR."""
    source = Source(option, text.strip())
    node = source.expression()
    place = Place(source, node)
    scope = Asked(module, source, node)
    with reading(place):
        value = ev.expression(node, Frame(scope, context=ev), source)
    named = value.owner if isinstance(value, Method) else value
    if isinstance(named, Tensor):
        known = ", ".join(f"`{name}`" for name in modules.functions(module)[:8])
        hint = f"the source has {known}" if known else "name a function of the source"
        said = f"`{escaped(text.strip())}`"
        if any(named is unknown for unknown in scope.tensors.values()):
            place.refuse(
                "unknown-name", f"{said} is not defined in {escaped(module.source.name)}", hint
            )
        what = "a tensor" if named is value else "a method of a tensor"
        place.refuse("bad-call", f"{said} is {what}, expected a function of a pair", hint)
    return value, place


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Report a `RecursionError` as a source that nests too deep."""
    try:
        yield
    except RecursionError:
        place.refuse(
            "too-deep", "the source nests too deep to be read", "split it into smaller parts"
        )


def built(
    ev: Evaluator, mods: Mapping[str, tuple[Any, Place]], options: Options, origin: str
) -> Spec:
    """Return the spec of some functions. Raise `KgenError` if one is refused."""
    terms: dict[str, Term] = {}
    for field_, (function, place) in mods.items():
        with reading(place):
            terms[field_] = _inlined(ev, field_, function, place)
    wanted = {term: Type.FLOAT if f == "score_mod" else Type.BOOL for f, term in terms.items()}
    dtypes = infer(wanted)
    found = _tensors(terms.values())
    names = _names(found)
    lowering = Lowering(dtypes, names)
    trees = {f: _rooted(lowering, f, term) for f, term in terms.items()}
    trees = {f: tree for f, tree in trees.items() if not _says_nothing(f, tree)}
    shapes = {
        t: _shape(t, name, terms.values(), lowering, options.gqa) for t, name in names.items()
    }
    ends = {
        node: _from_end(end, names[end.tensor], shapes[end.tensor])
        for node, end in lowering.ends.items()
    }
    trees = {f: transform(tree, lambda node: ends.get(node, node)) for f, tree in trees.items()}
    used = {name for tree in trees.values() for name in buffers_of(tree)}
    learned = differentiable(trees["score_mod"]) if "score_mod" in trees else frozenset()
    spec = Spec(
        _name(options.name, mods), origin, options.dtype, options.head_dim, options.gqa, trees
    )
    for tensor, name in names.items():
        if name not in used:
            continue
        dtype = tensor.dtype or dtypes[tensor]
        dtype = "any" if tensor.follows and dtype in REALS else dtype
        said = "; ".join(filter(None, (tensor.origin, *_assumed(tensor, dtype))))
        spec.buffers[name] = (shapes[tensor], dtype, tensor.grad and name in learned, said)
        if ascends(tensor):
            spec.ascending.add(name)
    for field_, (function, place) in mods.items():
        spec.places[field_] = function.place if isinstance(function, Function) else place
    for node, label in lowering.labels.items():
        spec.labels[transform(node, lambda part: ends.get(part, part))] = label
    checks = [
        check.note
        for check in ev.unchecked
        if check.concerns({t for t in names if names[t] in used})
    ]
    spec.notes += [*ev.notes, *lowering.notes, *dict.fromkeys(checks)]
    return spec


def _inlined(ev: Evaluator, field_: str, function: Any, place: Place) -> Term:
    """Return the term that a mod computes for a pair."""
    names = MODS[field_]
    if isinstance(function, Unknown) and function.error is not None:
        ev.untold(function)
    if not is_callable(function):
        place.refuse(
            "bad-call",
            f"a {field_} must be a function, got {kind(function)}",
            "name a function, or a call that returns one",
        )
    _check_signature(function, names, field_, place)
    pair = [Term("var", (name,), place) for name in names]
    with ev.reading(object(), of_a_pair=True):
        value = ev.call(function, pair, {}, place)
    if isinstance(value, bool | int | float):
        return Term("const", (value,), place)
    value = element(value) if isinstance(value, Part) else scalar(measured(value), place)
    if not isinstance(value, Term):
        hint = f"a {field_} returns " + (
            "a score" if field_ == "score_mod" else "true if the pair is kept"
        )
        at = function.place if isinstance(function, Function) else place
        if is_callable(value):
            hint = (
                f"it returns a function: call it, `{signature(function)}`"
                if isinstance(function, Function)
                else hint
            )
        at.refuse("bad-call", f"the {field_} returns {kind(value)}", hint)
    return value


def _check_signature(function: Any, names: tuple[str, ...], field_: str, place: Place) -> None:
    """Refuse a mod whose required parameters are not the names of its pair."""
    if not isinstance(function, Function):
        return
    given = function.node.args
    parameters = [a.arg for a in (*given.posonlyargs, *given.args)]
    needed = [p for p in parameters if p not in function.defaults]
    most = len(names) if given.vararg else len(parameters)
    if len(needed) > len(names) or most < len(names):
        message = (
            f"a {field_} takes ({', '.join(names)}), `{function.name}` takes "
            f"({', '.join(parameters)})"
        )
        other = "mask_mod" if field_ == "score_mod" else "score_mod"
        hint = f"call it if it returns one: `{signature(function)}`"
        if len(parameters) == len(MODS[other]) and parameters[-4:-2] == ["b", "h"]:
            hint = (
                f"it has the parameters of a {other}: name it with `--{other.removesuffix('_mod')}`"
            )
        place.refuse("bad-call", message, hint)


def _rooted(lowering: Lowering, field_: str, term: Term) -> Node:
    node = lowering.tree(term)
    lowering.place = term.place
    if field_ == "mask_mod":
        node = lowering.truth(node)
    elif node.type is Type.BOOL:
        term.place.refuse(
            "wrong-type",
            "the score_mod returns a truth value",
            "return a number, with `torch.where`",
        )
    if size(node) > MAX_NODES:
        hint = "use fewer operations, or put numbers into a tensor"
        term.place.refuse("too-large", f"the expression has more than {MAX_NODES} terms", hint)
    return node


def _says_nothing(field_: str, tree: Node) -> bool:
    return tree == (Var("score", Type.FLOAT) if field_ == "score_mod" else Const(True, Type.BOOL))


# --- tensors ------------------------


def _assumed(tensor: Tensor, dtype: str) -> Iterator[str]:
    """Yield the comments on a buffer."""
    if tensor.open:
        yield "its extents depend on unknown values: any"
    if tensor.dtype is None:
        yield f"{dtype} assumed"


def _tensors(terms: Iterable[Term]) -> list[Tensor]:
    found = (term.args[0] for term in walk(list(terms)) if term.fn in ("read", "length"))
    return list(dict.fromkeys(found))


def _names(tensors: Iterable[Tensor]) -> dict[Tensor, str]:
    """Return the buffer name of each tensor. Numbers distinguish equal names."""
    names: dict[Tensor, str] = {}
    for tensor in tensors:
        if tensor.name is None:
            message = "a tensor without a name is read"
            tensor.place.refuse("no-name", message, "give it a name: `table = ...`")
        name = tensor.name.strip("_")
        while "__" in name:
            name = name.replace("__", "_")
        number = 2
        own = name
        while own in names.values():
            own, number = f"{name}_{number}", number + 1
        names[tensor] = own
    return names


def _shape(
    tensor: Tensor, name: str, terms: Iterable[Term], lowering: Lowering, gqa: int | str
) -> tuple[int | str, ...]:
    """Return the shape of a buffer: sizes that its indices imply, otherwise the extents of the
    source.
    """
    indexed = [
        term.args[1:] for term in walk(list(terms)) if term.fn == "read" and term.args[0] is tensor
    ]
    ranks = {len(indices) for indices in indexed}
    if len(ranks) > 1:
        tensor.place.refuse(
            "bad-index",
            f"`{name}` is read with {min(ranks)} and with {max(ranks)} indices",
            "use the same number",
        )
    if not ranks and (tensor.shape is None or len(tensor.shape) != 1):
        message = f"the shape of {called(tensor)} cannot be determined without running the source"
        hint = f"state it in the source, or in EXPR: `{tensor.name} := torch.zeros(...)`"
        tensor.place.refuse("not-known", message, hint)
    rank = next(iter(ranks or {1}))
    if rank > MAX_RANK:
        message, hint = f"`{name}` has {rank} dimensions", f"a buffer has at most {MAX_RANK}"
        tensor.place.refuse("bad-shape", message, hint)
    columns = [
        [
            lowering.of(indices[axis])
            for indices in indexed
            if not isinstance(indices[axis], FromEnd)
        ]
        for axis in range(rank)
    ]
    known = tensor.shape or (None,) * rank
    if tensor.open:
        return tuple(extent or "any" for extent in known)
    return tuple(_extent(nodes, extent, gqa) for nodes, extent in zip(columns, known, strict=True))


def _extent(nodes: list[Node], extent: int | None, gqa: int | str) -> int | str:
    """Return the size that an index implies, otherwise the extent of the source, or `any`."""
    by_index = [OF_INDEX.get(node.name) for node in nodes if isinstance(node, Var)]
    # A tensor that is also read at `b + 1` has one more element.
    beyond = [OF_INDEX.get(node.name) for node in map(_before, nodes) if isinstance(node, Var)]
    for size_ in ("B", "HQ", "SQ", "SK"):
        if size_ in by_index and size_ not in beyond:
            return size_
    if type(gqa) is int and gqa > 1 and nodes and all(_of_kv_head(node, gqa) for node in nodes):
        return "HKV"
    return extent or "any"


def _before(node: Node) -> Node | None:
    """Return `index` for `index + constant`, otherwise None."""
    match node:
        case Call(fn="add", args=(index, Const(value=by)) | (Const(value=by), index)) if by > 0:
            return index
    return None


def _from_end(end: End, name: str, shape: tuple[int | str, ...]) -> Node:
    """Return the position of a negative index, or a length."""
    if end.axis is None and len(shape) != 1:
        message = f"the number of elements of {called(end.tensor)} is not in the language of specs"
        end.place.refuse("not-in-language", message, "multiply its lengths")
    if end.axis is not None and not -len(shape) <= end.axis < len(shape):
        message = f"{called(end.tensor)} has {len(shape)} dimensions, got dimension {end.axis}"
        end.place.refuse("bad-index", message, "use one of its dimensions")
    axis = (end.axis or 0) % len(shape)
    known = shape[axis]
    if isinstance(known, int):
        return Const(known + (end.position or 0), Type.INT)
    length = length_of(name, axis) if known == "any" else Var(known, Type.INT)
    return (
        length
        if end.position is None
        else Call("sub", (length, Const(-end.position, Type.INT)), Type.INT)
    )


def _of_kv_head(node: Node, gqa: int) -> bool:
    match node:
        case Call(fn="floordiv", args=(Var(name="h"), Const(value=value))):
            return bool(value == gqa)
    return False


# --- names ------------------------


def _default_name(module: modules.Module, asked: Iterable[str | None]) -> str | None:
    """Return a name made of the requested functions, in their order."""
    names: list[str] = []
    for text in filter(None, asked):
        nodes = [
            n
            for n in ast.walk(Source("", text.strip()).expression())
            if isinstance(n, ast.Name | ast.Attribute)
        ]
        for node in sorted(nodes, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0)):
            if isinstance(node, ast.Name):
                if isinstance(module.names.get(node.id), Function | Partial | Instance | Class):
                    names.append(node.id)
            elif names:
                names.append(node.attr)
    return _usable(names)


def _usable(names: Iterable[str]) -> str | None:
    """Join names of functions to a valid name of a spec, or return None."""
    joined = "_".join(dict.fromkeys(filter(None, map(_snake, names))))[:60].strip("_")
    for name in (joined, f"{joined[:50]}_attention", f"attention_{joined[:50]}"):
        try:
            return checked_name(name.replace("__", "_").strip("_"))
        except PydanticCustomError:
            continue
    return None


def _name(given: str | None, mods: Mapping[str, tuple[Any, Place]]) -> str:
    """Return the name of the spec: the requested one, or a name made of its mods."""
    if given is not None:
        try:
            return checked_name(given)
        except PydanticCustomError as error:
            context = error.context or {}
            raise KgenError(
                Diagnostic(
                    context["code"], context["message"], "--name", 1, 1, hint=context["hint"]
                )
            ) from None
    return _usable(_called(function) for function, _ in mods.values()) or "imported"


def _called(function: Any) -> str:
    match function:
        case Function(node=ast.FunctionDef(name=name)):
            return name
        case Partial(function=inner):
            return _called(inner)
    return ""


def _snake(name: str) -> str:
    """Return a Python name in lower_snake_case."""
    made = ""
    for before, c in zip(" " + name, name, strict=False):
        made += "_" * (c.isupper() and before.islower()) + (
            c.lower() if c.isascii() and c.isalnum() else "_"
        )
    return "_".join(part for part in made.split("_") if part)


__all__ = ["MODS", "Options", "built", "imported"]
