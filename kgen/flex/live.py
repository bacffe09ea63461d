"""Import of live functions: their source is read, and captured values are looked up."""

from __future__ import annotations

import abc
import ast
import enum
import functools
import inspect
import linecache
import types
from dataclasses import dataclass, field
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.flex import numbers
from kgen.flex.evaluating import Evaluator
from kgen.flex.source import Place, Source
from kgen.flex.tables import DTYPES
from kgen.flex.values import (
    MISSING,
    Class,
    External,
    Function,
    Instance,
    Member,
    Named,
    Partial,
    Scope,
    Tensor,
    Term,
    Unknown,
)


def spec(
    *,
    score_mod: Any = None,
    mask_mod: Any = None,
    name: str | None = None,
    head_dim: int = 128,
    gqa: int | str = 1,
    dtype: str = "bf16",
) -> str:
    """Return the YAML of a spec for live FlexAttention functions.

    Captured numbers become constants. Captured tensors become buffers with the names that the
    functions use, and keep their shapes and dtypes. No function is called. Raise `KgenError` if a
    function is refused.
    """
    from kgen.flex.importing import Options, built
    from kgen.flex.writing import settled

    reader = _Reader(Evaluator())
    given = {"score_mod": score_mod, "mask_mod": mask_mod}
    mods = {}
    for field_, function in given.items():
        if function is not None:
            function = _unwrapped(function)
            place = _place(function, field_)
            value = reader.value(function, field_, place)
            if isinstance(value, _Object):
                value = value.find_attribute("__call__", place)
            mods[field_] = (value, place)
    if not mods:
        raise KgenError(
            Diagnostic(
                "usage", "expected a score_mod or a mask_mod, got neither", hint="pass one of them"
            )
        )
    origin = ", ".join(
        f"{f}={getattr(g, '__qualname__', 'a function')}" for f, g in given.items() if g is not None
    )
    made = built(reader.evaluator, mods, Options(name, head_dim, gqa, dtype), origin)
    text, _ = settled(made, f"{made.name}.yaml")
    return text


@dataclass(eq=False)
class _Reader:
    evaluator: Evaluator
    sources: dict[str, tuple[Source, ast.Module]] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """Values kept alive, because lookups use their identity."""

    def value(self, live: Any, name: str, place: Place) -> Any:
        """Return the value of a captured object."""
        live = _unwrapped(live)
        if isinstance(live, enum.Enum):
            return _member(live, place)
        if (
            type(live).__module__ == "numpy"
            and getattr(live, "shape", None) == ()
            and hasattr(live, "item")
        ):
            return numbers.computed(lambda: _scalar(live), place)
        if isinstance(live, tuple) and type(live) is not tuple:
            items = [self.value(item, name, place) for item in live]
            fields = getattr(type(live), "_fields", None)
            return tuple(items) if fields is None else Named(items, _class(live, place, fields))
        if live is None or isinstance(live, bool | int | float | str):
            return live
        if type(live) in (tuple, list):
            # A mod may change only objects that it created.
            return self.known(type(live)(self.value(item, name, place) for item in live))
        if type(live) is dict:
            return self.known(
                {key: self.value(item, str(key), place) for key, item in live.items()}
            )
        if isinstance(live, types.ModuleType):
            return External(live.__name__)
        if isinstance(live, functools.partial):
            keywords = {key: self.value(item, key, place) for key, item in live.keywords.items()}
            args = tuple(self.value(item, name, place) for item in live.args)
            return Partial(self.value(live.func, name, place), args, keywords)
        if isinstance(live, types.FunctionType):
            return self.function(live, place)
        if isinstance(live, types.MethodType):
            return Partial(
                self.value(live.__func__, name, place),
                (self.value(live.__self__, "self", place),),
                {},
            )
        if _is_tensor(live):
            return self.tensor(live, name, place)
        if isinstance(live, enum.EnumMeta) or "_modules" in getattr(live, "__dict__", {}):
            return _Object(live, self, place, name)
        if _of_torch(live):
            return External(f"torch.{getattr(live, '__name__', str(live).removeprefix('torch.'))}")
        if (
            isinstance(live, type)
            and type(live) in (type, abc.ABCMeta)
            and live.__module__ not in _KNOWN
        ):
            return _Object(live, self, place, name)
        if isinstance(live, types.BuiltinFunctionType | type):
            return External(f"{live.__module__}.{live.__name__}")
        return _Object(live, self, place, name)

    def known(self, value: Any) -> Any:
        self.evaluator.made[id(value)] = value, self
        return value

    def tensor(self, live: Any, name: str, place: Place, follows: bool = False) -> Any:
        """Return a captured tensor. `follows` is true for a buffer of a module."""
        dtype = DTYPES.get(str(live.dtype).removeprefix("torch."))
        follows = follows or type(live).__name__ == "Parameter"
        if not live.shape and not live.requires_grad and not follows:
            value = live.item()
            self.evaluator.note(f"{name} is {value}, the value of the tensor at import")
            return Term("cast", (Term("const", (value,), place), dtype), place)
        if id(live) not in self.tensors:
            self.kept.append(live)
            shape = tuple(int(n) for n in live.shape)
            grad = bool(live.requires_grad)
            self.tensors[id(live)] = Tensor(place, name, shape, dtype, grad, follows=follows)
        return self.tensors[id(live)]

    def function(self, live: types.FunctionType, place: Place) -> Any:
        module = live.__module__ or ""
        if module.partition(".")[0] == "torch":
            if module == "torch.nn.attention.flex_attention" and live.__closure__:
                return self.located(live, place)
            return External(f"{module}.{live.__name__}")
        return self.located(live, place)

    def located(self, live: types.FunctionType, place: Place) -> Function:
        """Return a function with its place in its source text."""
        code = live.__code__
        source, tree = self.source(live, place)
        found = [node for node in ast.walk(tree) if _is(node, code)]
        if len({ast.dump(node) for node in found}) != 1:
            message = f"the source of `{live.__name__}` is ambiguous in line {code.co_firstlineno}"
            place.refuse("no-source", message, "put each function on a line of its own")
        node = found[0]
        assert isinstance(node, ast.FunctionDef | ast.Lambda)
        at = Place(source, node)
        arguments = code.co_varnames[: code.co_argcount]
        given = live.__defaults__ or ()
        pairs = [
            *zip(arguments[len(arguments) - len(given) :], given, strict=True),
            *(live.__kwdefaults__ or {}).items(),
        ]
        defaults = {name: self.value(value, name, at) for name, value in pairs}
        return Function(node, at, _Captured(live, self, at), defaults)

    def source(self, live: types.FunctionType, place: Place) -> tuple[Source, ast.Module]:
        file = inspect.getsourcefile(live) or live.__code__.co_filename
        if file not in self.sources:
            lines = linecache.getlines(file, live.__globals__)
            if not lines:
                message = f"the source of `{live.__name__}` cannot be found"
                place.refuse("no-source", message, "define it in a file, or in a notebook")
            source = Source(file, "".join(lines))
            self.sources[file] = source, source.module()
        return self.sources[file]


@dataclass(frozen=True, eq=False)
class _Captured:
    """The scope of a live function."""

    function: types.FunctionType
    reader: _Reader
    place: Place

    def find(self, name: str) -> Any:
        live = self.function
        cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
        if name in cells:
            try:
                return self.reader.value(cells[name].cell_contents, name, self.place)
            except ValueError:  # not assigned yet
                return MISSING
        if name in live.__globals__:
            return self.reader.value(live.__globals__[name], name, self.place)
        return MISSING

    def closure(self) -> Scope:
        return self


_KNOWN = frozenset(("builtins", "math", "enum", "functools", "itertools", "operator"))
"""Packages whose classes are known only by name."""
_CONTAINERS = frozenset(
    ("ModuleList", "ModuleDict", "Sequential", "ParameterList", "ParameterDict")
)
_PARTS = ("_member_map_", "_parameters", "_buffers", "_modules")
"""Attributes that contain members of enumerations or parts of torch modules."""


@dataclass(frozen=True, eq=False)
class _Object:
    """An object of another class.

    Its attributes are looked up without running code of the class.
    """

    live: Any
    reader: _Reader
    place: Place
    name: str

    def find_attribute(self, name: str, place: Place) -> Any:
        own = getattr(self.live, "__dict__", {})
        buffers = own.get("_buffers") or {}
        if _is_tensor(buffers.get(name)):
            return self.reader.tensor(buffers[name], name, place, follows=True)
        for names in (own, *(own.get(part) or {} for part in _PARTS)):
            if name in names:
                return self.reader.value(names[name], name, place)
        if isinstance(self.live, type):
            return self.constant(name, place)
        found = inspect.getattr_static(type(self.live), name, MISSING)
        if isinstance(found, types.FunctionType):
            return Partial(self.reader.function(found, place), (self,), {})
        if isinstance(found, staticmethod):
            return self.reader.value(found.__func__, name, place)
        if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
            return self.reader.evaluator.call(
                self.reader.function(found.fget, place), [self], {}, place
            )
        if isinstance(found, types.MemberDescriptorType):
            # A slot has its value without code of the class.
            return self.reader.value(found.__get__(self.live), name, place)
        if found is not MISSING and not hasattr(type(found), "__get__"):
            return self.reader.value(found, name, place)
        return Unknown(place, f"`.{name}` of a {type(self.live).__name__}")

    def constant(self, name: str, place: Place) -> Any:
        """Return an attribute of a class or of its bases."""
        found = inspect.getattr_static(self.live, name, MISSING)
        if isinstance(found, staticmethod):
            found = found.__func__
        if isinstance(found, classmethod) and isinstance(found.__func__, types.FunctionType):
            return Partial(self.reader.function(found.__func__, place), (self,), {})
        plain = isinstance(found, types.FunctionType) or not hasattr(type(found), "__get__")
        if found is MISSING or not plain:
            return Unknown(place, f"`.{name}` of `{self.live.__name__}`")
        return self.reader.value(found, name, place)

    def parts(self) -> dict[str, Any] | None:
        """Return the modules or parameters of a torch container by name; None for other objects."""
        cls = type(self.live)
        if cls.__module__ != "torch.nn.modules.container" or cls.__name__ not in _CONTAINERS:
            return None
        found = self.live.__dict__["_parameters" if "Parameter" in cls.__name__ else "_modules"]
        return dict(found)

    def part(self, key: str, live: Any, place: Place) -> Any:
        """Return an element of a container, with a valid buffer name."""
        return self.reader.value(live, f"{self.name}_{key}" if key.isdigit() else key, place)

    def find_items(self, place: Place) -> list[Any] | None:
        """Return the elements of a loop over the object; for a dictionary, its keys."""
        found = self.parts()
        if found is None:
            return None
        if type(self.live).__name__.endswith("Dict"):
            return list(found)
        return [self.part(name, part, place) for name, part in found.items()]

    def find_item(self, index: Any, place: Place) -> Any:
        """Return `owner[index]` of a container."""
        found = self.parts()
        if found is None:
            return Unknown(place, f"an element of a {type(self.live).__name__}")
        by_name = type(self.live).__name__.endswith("Dict")
        names: dict[Any, str] = (
            {name: name for name in found} if by_name else dict(enumerate(found))
        )
        at = index + len(found) if type(index) is int and index < 0 else index
        if type(at) not in (int, str) or at not in names:
            place.refuse(
                "bad-index", "there is no such element", "check the elements of the container"
            )
        return self.part(names[at], found[names[at]], place)


def _unwrapped(live: Any) -> Any:
    """Return the function wrapped by `torch.compile`, `torch.compiler.disable` or `lru_cache`."""
    while True:
        inner = getattr(live, "__dict__", {}).get("_torchdynamo_orig_callable")
        if inner is None and isinstance(live, functools._lru_cache_wrapper):
            inner = live.__wrapped__
        if inner is None:
            return live
        live = inner


def _class(live: Any, place: Place, fields: tuple[str, ...] | None = None) -> Class:
    return Class(type(live).__name__, place, {}, None, (), None, fields)


def _member(live: enum.Enum, place: Place) -> Any:
    """Return a member of an enumeration."""
    cls = _class(live, place)
    if isinstance(live, int):
        return Member(int(live), cls, live.name)
    known = live.value if isinstance(live.value, int | float | str) else Unknown(place, "`.value`")
    return Instance(cls, {"value": known, "name": live.name}, None)


def _scalar(live: Any) -> Any:
    """Return the value of a numpy scalar."""
    name = live.dtype.name
    return numbers.scalar(name, live.item()) if name in numbers.SCALARS else live.item()


def _is_tensor(live: Any) -> bool:
    return type(live).__module__.partition(".")[0] == "torch" and hasattr(
        type(live), "requires_grad"
    )


def _of_torch(live: Any) -> bool:
    name = getattr(live, "__name__", "")
    module = getattr(live, "__module__", None) or type(live).__module__
    return str(module).partition(".")[0] in ("torch", "_VariableFunctions") or (
        isinstance(live, types.BuiltinFunctionType)
        and "torch" in str(getattr(live, "__self__", ""))
        and bool(name)
    )


def _is(node: ast.AST, code: types.CodeType) -> bool:
    """True if a code object was compiled from the node."""
    if isinstance(node, ast.FunctionDef):
        lines = {node.lineno, *(d.lineno for d in node.decorator_list)}
        if node.name != code.co_name or code.co_firstlineno not in lines:
            return False
    elif (
        not isinstance(node, ast.Lambda)
        or code.co_name != "<lambda>"
        or node.lineno != code.co_firstlineno
    ):
        return False
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    if tuple(names) != code.co_varnames[: len(names)]:
        return False
    if isinstance(node, ast.Lambda) and hasattr(code, "co_positions"):
        first, last = node.body.col_offset, node.body.end_col_offset or 0
        places = [
            p
            for p in code.co_positions()
            if p[0] == p[1] == node.body.lineno == node.body.end_lineno
        ]
        return all(first <= (a or 0) and (z or 0) <= last for _, _, a, z in places if a != z)
    return True


def _place(function: Any, field_: str) -> Place:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    name = code.co_filename if code else field_
    text = "".join(linecache.getlines(name)) if code else ""
    node = ast.Pass(
        lineno=code.co_firstlineno if code else 1,
        col_offset=0,
        end_lineno=None,
        end_col_offset=None,
    )
    return Place(Source(name, text), node)
