"""Refuses a name of a spec that would mean something else too in an emitted file.

Kernels and launchers have names of their own, and make others of the spec's: `slopes` gives `slopes_ptr`,
`stride_slopes_0`, `d_slopes`. A list of those that clash would have to follow every template. In place of it, this
is a check of finished files. They are rendered a second time with names that nothing else can have, and Python says
which names each scope of them has. Where two would be one under the spec's own names, they are rendered with those
two as they are: they clash if the scope has one name less. What is emitted never follows from it.

Files of another language are read by nobody: their names give way to the spec's, or are `reserved` (`Source`).
"""

from __future__ import annotations

import ast
import symtable
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic
from kgen.spec.renaming import SECTIONS, inside, renamed

if TYPE_CHECKING:
    from kgen.spec.load import Loaded
    from kgen.targets import Source


def clashes(
    loaded: Loaded, sources: Mapping[str, Source], rendered: Callable[[Loaded], Mapping[str, str]]
) -> dict[str, str]:
    """The names of a spec that are other names too in its files, and in which; `rendered` gives those of Python."""
    others = rendered(apart(loaded))
    suspects = {
        file: {group for scope in _scopes(text) for group in _alike(scope)} for file, text in others.items()
    }
    names = _names(loaded)
    found: dict[int, str] = {}
    for file in (f for f, source in sources.items() if loaded.spec.name in source.reserved):
        found.setdefault(names.index(loaded.spec.name), file)
    for group in sorted(set().union(*suspects.values()), key=sorted):
        files = rendered(apart(loaded, but=group))
        for file in (f for f in files if group in suspects[f] and _fewer(files[f], others[f])):
            found.setdefault(max(group), file)
    return {names[number]: file for number, file in sorted(found.items())}


def given_way(loaded: Loaded, clashing: Collection[str]) -> Loaded | None:
    """The spec with other names within its files for those that clash; None where one does that callers use, or that
    has given way already."""
    from kgen.family import family

    own = {name for section in SECTIONS for name in getattr(loaded.spec, section, ())}
    if not family(loaded.spec.kernel).names_give_way or not own - {*loaded.called} >= {*clashing}:
        return None
    other = {name: f"{name}_arg" for name in clashing}
    if own & {*other.values()}:
        return None
    return inside(loaded, other)


def hidden(loaded: Loaded, files: Mapping[str, str]) -> dict[str, str]:
    """The names that gave way in vain, and the file: it has what callers say as a name of its own, or stores it in the
    function that they call."""
    found: dict[str, str] = {}
    for file, text in files.items():
        tree = ast.parse(text)
        own = {*symtable.symtable(text, "", "exec").get_identifiers()}
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            arguments = {argument.arg for argument in function.args.kwonlyargs}
            own |= arguments & {
                node.id
                for node in ast.walk(function)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
        found |= {inner: file for inner, user in loaded.called.items() if user in own}
    return found


def refusals(loaded: Loaded, clashing: Mapping[str, str]) -> list[Diagnostic]:
    """What to say of names that clash in a file."""
    return [_diagnostic(loaded, loaded.called.get(name, name), file) for name, file in clashing.items()]


def apart(loaded: Loaded, but: Collection[int] = ()) -> Loaded:
    """The spec with names that nobody has: those of specs and templates have single underscores. Each has a number of
    its own, or `dx` would be what is made of `x` here, too. Those whose numbers are in `but` stay as they are."""
    names = enumerate(_names(loaded))
    other = {name: name if number in but else f"{name}__{number}z" for number, name in names}
    return renamed(loaded, other)


def _names(loaded: Loaded) -> list[str]:
    return [loaded.spec.name, *(n for section in SECTIONS for n in getattr(loaded.spec, section, ()))]


def _as_written(word: str) -> tuple[str, frozenset[int]]:
    """What a name is under the spec's own names, and the numbers of those that it is made of."""
    start, *parts = word.split("__")
    numbers = set()
    for part in parts:
        number, _, rest = part.lower().partition("z")
        if number.isdecimal():
            numbers.add(int(number))
            start += part[len(part) - len(rest) :]
        else:
            start += f"__{part}"
    return start, frozenset(numbers)


def _alike(scope: set[str]) -> Iterator[frozenset[int]]:
    """The numbers of the spec's names that make two names of a scope one."""
    written = defaultdict(list)
    for word in (word for word in scope if "__" in word):
        name, numbers = _as_written(word)
        if numbers:
            written[name].append(numbers)
    for name, found in written.items():
        if len(found) > 1 or name in scope:
            yield frozenset().union(*found)


def _fewer(text: str, other: str) -> bool:
    """Whether a scope of a file has fewer names than the same scope of the other."""
    scopes = (list(_scopes(_with_own_variables(file))) for file in (other, text))
    others = next(scopes)
    try:
        return any(len(scope) < len(other) for scope, other in zip(next(scopes), others, strict=True))
    except SyntaxError:  # Two arguments of one name.
        return True


class _Comprehensions(ast.NodeTransformer):
    """Renames their variables: they are no others', though since Python 3.12 they have no scope of their own."""

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        targets = [name for part in node.generators for name in ast.walk(part.target)]
        own = {name.id for name in targets if isinstance(name, ast.Name)}
        outside = set(ast.walk(node.generators[0].iter))
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id in own and name not in outside:
                name.id += "_own"
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]


def _with_own_variables(text: str) -> str:
    return ast.unparse(_Comprehensions().visit(ast.parse(text)))


def _scopes(text: str) -> Iterator[set[str]]:
    """The names of each scope of a file, with those that scopes in it take from outside of them."""
    found: list[set[str]] = []

    def from_outside(table: symtable.SymbolTable) -> set[str]:
        """What a scope does not define itself. A class defines nothing for the functions in it."""
        within = set().union(*map(from_outside, table.get_children()))
        own = set(table.get_identifiers())
        found.append(own | within)
        if isinstance(table, symtable.Function):
            return (own | within).difference(table.get_locals())
        return within | {name for name in own if not table.lookup(name).is_local()}

    from_outside(symtable.symtable(text, "", "exec"))
    yield from found


def _diagnostic(loaded: Loaded, name: str, file: str) -> Diagnostic:
    from kgen.spec.source import Document

    document = Document(loaded.text, loaded.path.as_posix())
    message, hint = f"`{name}` is already a name in {file}", "choose another name"
    for section in SECTIONS:
        if name in document.data.get(section, ()):
            return document.key("name-taken", message, (section, name), hint)
    return document.value("name-taken", message, ("name",), hint)
