"""Modules of the source: their files and their names. Nothing is imported.

A file is read when one of its names is used. Then all its statements are read in order.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol

from kgen.diagnostics import Diagnostic, KgenError, shown
from kgen.flex import scopes, source
from kgen.flex.packages import STARS
from kgen.flex.source import Place, Source
from kgen.flex.values import MISSING, External, Frame, Function, Scope, Unknown

MAX_MODULES = 64


def find(given: str) -> Path:
    """Return the file of SOURCE: a path, the folder of a package, or a dotted module name.

    Raise `KgenError` if there is none.
    """
    path = Path(given)
    if path.is_dir():
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
        files = ", ".join(f"`{file.as_posix()}`" for file in sorted(path.glob("*.py"))[:4])
        hint = f"name a file of it: {files}" if files else "name a Python file"
        raise KgenError(
            Diagnostic("no-source", "the folder has no `__init__.py`", given, 1, 1, hint=hint)
        )
    if path.suffix == ".py" or path.exists():
        return path
    found = _located(given.split("."), ["", *sys.path])
    if found is None:
        hint = "name a Python file, or a module that Python can import here"
        raise KgenError(
            Diagnostic("no-source", "there is no such file or module", given, 1, 1, hint=hint)
        )
    return found


def _located(parts: Sequence[str], places: Sequence[str]) -> Path | None:
    """Return the file of a module below some folders.

    Unlike `importlib.util.find_spec`, run no package.
    """
    if not all(part.isidentifier() for part in parts):
        return None
    PathFinder.invalidate_caches()
    search: list[str] | None = list(places)
    for part in parts:
        # Only the last name: with a dotted name, Python would look up the package in `sys.modules`.
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations else []
    origin = spec.origin if spec else None
    return Path(os.path.relpath(origin)) if origin and origin.endswith(".py") else None


@dataclass(frozen=True, eq=False)
class Deferred:
    """A name of another file. The file is read when the name is used."""

    module: Module
    parts: tuple[str, ...]
    level: int
    name: str | None = None
    inner: tuple[str, ...] = ()
    """Submodules that `import a.b.c` imports as well."""

    def found(self) -> Any:
        if self.name is None and self.module.is_folder(self.parts, self.level):
            return Folder(self.module, self.parts, self.level)
        found = self.module.located(self.parts, self.level)
        if self.name is None:
            return self._whole(found)
        if isinstance(found, Module):
            value = found.find(self.name)
            if value is not MISSING:
                if found.bindings[self.name] > 1 and (not found.done or found.imports(self.module)):
                    place = Place(self.module.source, self.module.tree)
                    return Unknown(
                        place, f"`{self.name}`, which is bound again later in {found.source.name},"
                    )
                return value
            found = self.module.located((*self.parts, self.name), self.level)
            return MISSING if found is None or isinstance(found, External) else found
        return self.module.library.external(f"{found.path}.{self.name}")

    def _whole(self, found: Any) -> Any:
        """Return a module.

        Refuse a package name that importing a module of the same name would change.
        """
        package = found
        for name in self.inner:
            if not isinstance(package, Module):
                break
            inner = package.inner(name)
            if inner is None:
                place = Place(self.module.source, self.module.tree)
                return Unknown(place, f"the module `{'.'.join((*self.parts, *self.inner))}`")
            if isinstance(inner, Folder):
                break
            if package.find(name) not in (inner, MISSING) and not package.imports(inner):
                place = Place(package.source, package.tree)
                return Unknown(place, f"`{name}`, a name and a module of {package.source.name},")
            package = inner
        return found


@dataclass(frozen=True, eq=False)
class Folder:
    """A package without `__init__.py`. It contains only modules."""

    module: Module
    parts: tuple[str, ...]
    level: int

    def find_attribute(self, name: str, place: Place) -> Any:
        parts = (*self.parts, name)
        if self.module.is_folder(parts, self.level):
            return Folder(self.module, parts, self.level)
        found = self.module.located(parts, self.level)
        if not isinstance(found, Module):
            place.refuse(
                "unknown-name", f"the folder has no module {shown(name)}", "check its files"
            )
        return found


class Library(Protocol):
    """Interface for looking up other modules."""

    def module(self, path: Path) -> Module:
        """Return the module of a file. Each file is read once."""

    def external(self, path: str) -> Any:
        """Return the value of a name of another package."""


class Module(Frame):
    """A file and its names.

    Its statements are read in order. Names bound by a statement that cannot be read are refused
    where they are used.
    """

    def __init__(self, text: Source, library: Library, path: Path | None = None) -> None:
        super().__init__(NOWHERE)
        self.context = self
        self.source = text
        self.library = library
        self.path = path
        self.tree = text.module()
        self.bindings = Counter(_stored(self.tree))
        self.lost: Unknown | None = None
        """Set if unread code could have bound any name."""
        self.done = False
        """True after the statements are read."""

    def find(self, name: str) -> Any:
        value = self.names.get(name, MISSING)
        if isinstance(value, Deferred):
            value = value.found()
            if value is MISSING:
                return MISSING
            self.names[name] = value
        if value is MISSING and name == "__name__":
            return self.path.stem if self.path else "module"
        return self.lost if value is MISSING and self.lost is not None else value

    def forget_all(self, unknown: Unknown) -> None:
        """Forget all names, because unread code could have bound any."""
        self.lost = unknown
        for name in self.names:
            self.names[name] = unknown

    # Imports ------------------------

    def imports(self, other: Module) -> bool:
        """True if the file imports another one.

        Then Python runs one file between statements of the other.
        """
        found = (
            node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)
        )
        return any(path == other.path for node in found for path in self._files(node))

    def imported(self, node: ast.Import | ast.ImportFrom) -> list[Module]:
        """Return the modules of the source that a statement imports."""
        return [self.library.module(path) for path in self._files(node)]

    def _files(self, node: ast.Import | ast.ImportFrom) -> Iterator[Path]:
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        above = node.module.split(".") if isinstance(node, ast.ImportFrom) and node.module else []
        for alias in node.names:
            name = alias.name.split(".") if alias.name != "*" else []
            for parts in (above, [*above, *name]):
                if (parts or level) and (path := self._file(parts, level)) is not None:
                    yield path

    def bind(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        """Bind the names of an `import` in its frame."""
        place = Place(self.source, node)
        parts = (
            tuple(node.module.split("."))
            if isinstance(node, ast.ImportFrom) and node.module
            else ()
        )
        for alias in node.names:
            if isinstance(node, ast.Import):
                whole = tuple(alias.name.split("."))
                found = self._whole(whole, alias.asname is not None)
            elif alias.name == "*":
                self._star(parts, node.level, frame, place)
                continue
            else:
                found = self._deferred(parts, node.level, alias.name)
            name = alias.asname or alias.name.split(".")[0]
            scopes.store(frame, name, place).names[name] = found

    def _whole(self, parts: tuple[str, ...], named: bool) -> Any:
        """Return the module of `import a.b as c`, or the package of `import a.b`."""
        if self._file(parts, 0) is not None and (not named or self.is_folder(parts[:1], 0)):
            return Deferred(
                self, parts if named else parts[:1], 0, inner=() if named else parts[1:]
            )
        return self._deferred(parts if named else parts[:1], 0, None)

    def member(self, name: str) -> Any:
        """Return `module.name`: a name of the module, or a submodule, which Python is assumed to
        have imported.
        """
        value = self.find(name)
        return (self.inner(name) or MISSING) if value is MISSING else value

    def inner(self, name: str) -> Module | Folder | None:
        """Return a module of a package, which is read, or a folder in it."""
        if self.path is None or self.path.name != "__init__.py":
            return None
        if self.is_folder((name,), 1):
            return Folder(self, (name,), 1)
        path = self._file((name,), 1)
        return None if path is None else self.library.module(path)

    def is_folder(self, parts: Sequence[str], level: int) -> bool:
        """True for a folder without `__init__.py` that contains a Python file or a package."""
        below = self._folder(parts, level) if all(part.isidentifier() for part in parts) else None
        if below is None or self._file(parts, level) is not None:
            return False
        folder = below.joinpath(*parts)
        return any(True for pattern in ("*.py", "*/*.py") for _ in folder.glob(pattern))

    def _deferred(self, parts: tuple[str, ...], level: int, name: str | None) -> Any:
        if self._file(parts, level) is None:
            if name is not None and self._file((*parts, name), level) is not None:
                return Deferred(self, (*parts, name), level)
            path = ".".join(parts)
            return self.library.external(path if name is None else f"{path}.{name}")
        return Deferred(self, parts, level, name)

    def _star(self, parts: tuple[str, ...], level: int, frame: Frame, place: Place) -> None:
        found = self.located(parts, level)
        if isinstance(found, Module):
            names = found.find("__all__")
            if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
                chosen = list(names)
            elif names is MISSING and found.lost is None and found.done:
                chosen = [name for name in found.names if not name.startswith("_")]
            else:
                place.refuse(
                    "not-known", "the names of this `*` are unknown", "import each name explicitly"
                )
            for name in chosen:
                frame.names[name] = found.names.get(name, MISSING)
                if frame.names[name] is MISSING:
                    del frame.names[name]
        elif found.path in STARS:
            for name in STARS[found.path]:
                frame.names[name] = self.library.external(f"{found.path}.{name}")
        else:
            hint = "import each used name explicitly"
            error = place.wrong("not-known", f"the names of `{found.path}` may hide others", hint)
            self.forget_all(Unknown(place, f"the definitions of `{found.path}`", error=error))

    def located(self, parts: Sequence[str], level: int) -> Module | External:
        """Return a module in the same folder or package.

        Any other module belongs to another package.
        """
        path = self._file(parts, level)
        return External(".".join(parts)) if path is None else self.library.module(path)

    def _file(self, parts: Sequence[str], level: int) -> Path | None:
        folder = self._folder(parts, level)
        if folder is None:
            return None
        path = _located(parts, [str(folder)]) if parts else folder / "__init__.py"
        return path if path is not None and os.path.isfile(path) else None

    def _folder(self, parts: Sequence[str], level: int) -> Path | None:
        """Return the folder from which a module name is resolved."""
        if self.path is None:
            return None
        folder = Path(os.path.realpath(self.path)).parent
        if level:
            for _ in range(level - 1):
                folder = folder.parent
            return folder
        package = None
        while os.path.isfile(folder / "__init__.py"):
            folder, package = folder.parent, folder.name
        # A sibling folder of a package is another package, like every installed package.
        return None if package is not None and parts[0] != package else folder


def _stored(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file binds in any scope, once for each binding."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.AsyncFunctionDef(name=name)
            ):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.split(".")[0]
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


class _Nowhere:
    """The scope around modules."""

    def find(self, name: str) -> Any:
        return MISSING

    def closure(self) -> Scope:
        return self


NOWHERE = _Nowhere()


def load(path: Path, library: Library) -> Module:
    """Return a file as a module whose statements are not read yet.

    Raise `KgenError` if it cannot be parsed.
    """
    return Module(source.read(path), library, path)


def functions(module: Module) -> list[str]:
    """Return the names of a module's own functions, for hints."""
    return [
        name
        for name, value in module.names.items()
        if isinstance(value, Function)
        and value.place.source is module.source
        and value.name == name
    ]
