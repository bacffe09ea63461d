"""Collect the names that the files of a family define, for `kgen/spec/names.py`.

Render specs with marked names: names of specs and templates have single underscores. Python lists
the names in each scope of a file. A name in the scope of a spec's name is the file's own.
"""

from __future__ import annotations

import ast
import symtable
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kgen.expr import hoist
from kgen.family import NAMES
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load_variants, loads
from kgen.spec.names import KINDS, kinds_of
from kgen.spec.renaming import renamed

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = NAMES
SAMPLES = {
    # No spec of the repository has a decay with a part that is computed separately.
    "chunk_output": """kernel: chunk_output
name: sample
dtype: bf16
head_dim: 64
decay: tanh(g[i]) + 2 * tanh(g[i]) * (i + 1) + exp(g_gamma[h])
passes: [forward, backward]
targets: {triton: {}}
""",
}
"""Additional specs for the collection."""
VALUE = KINDS.index("values")
STEM = "stem"


def specs_of(family: str) -> list[Loaded]:
    """Return the specs of a family in the repository, and the samples."""
    paths = [*sorted(ROOT.glob("specs/*.yaml")), *sorted(ROOT.glob("tests/specs/*.yaml"))]
    found = [one for path in paths for one in load_variants(path) if one.spec.kernel == family]
    return [*found, loads(SAMPLES[family], "sample.yaml")] if family in SAMPLES else found


def apart(loaded: Loaded) -> Loaded:
    """Return the spec with marked names that encode their place in the spec and their kind."""
    kinds = kinds_of(loaded)
    other = {
        name: f"{STEM}__{n}z{KINDS.index(kind)}z" for n, (name, kind) in enumerate(kinds.items())
    }
    return renamed(
        loaded, {name: f"{STEM}__{n}z{VALUE}z" for n, name in enumerate(loaded.locals)} | other
    )


def rendered_apart(loaded: Loaded, *, single: bool = False) -> dict[str, str]:
    """Render a spec with marked names, including the values that kernels compute separately."""
    make = hoist._Builder._name
    with patch.object(hoist._Builder, "_name", lambda *args: f"{make(*args)}__0z{VALUE}z"):
        return render_spec(apart(loaded), single=single)


OWN_FUNCTIONS = ("serve",)
"""Passes with functions of their own, whose names other specs may use."""


def collected(specs: Iterable[Loaded]) -> dict[str, Any]:
    """Return the content of `names.json` for the family of the specs."""
    forms: dict[str, set[str]] = defaultdict(set)
    own: dict[str, set[str]] = defaultdict(set)
    function: dict[str, set[str]] = defaultdict(set)
    kernels: dict[str, set[str]] = defaultdict(set)
    for loaded in specs:
        for text in _files(loaded):
            passes = getattr(loaded.spec, "passes", ())
            function[next((one for one in OWN_FUNCTIONS if one in passes), "")] |= _of_function(
                text
            )
            for kernel, names in _of_kernels(text):
                kernels[kernel] |= names
            for scope in scopes(with_own_variables(text)):
                marked = {word: found for word in scope if (found := _marks(word))}
                for word, marks in marked.items():
                    for _, kind in marks:
                        own[kind] |= {name for name in scope if "__" not in name}
                    if len(marks) == 1 and marks[0][1] != "values":
                        forms[marks[0][1]].add(_form(word))
    kinds = {
        kind: {"forms": sorted(forms[kind]), "own": sorted(own[kind])}
        for kind in KINDS
        if own[kind]
    }
    # A kernel with a name of one spec can have any name of another spec. Therefore all its names
    # count, in all files.
    every = {
        name
        for names in kernels.values()
        if any(map(_marks, names))
        for name in names
        if "__" not in name
    }
    every |= {name for of in own.values() for name in of}
    always = function.pop("", set())
    of_passes = {name: sorted(names - always) for name, names in sorted(function.items())}
    return {
        "kinds": kinds,
        "function": sorted(always),
        "of_passes": of_passes,
        "every": sorted(every),
    }


def in_trees(family: str) -> list[str]:
    """Return the variables that plans of a family add to the trees of a spec."""
    package = ROOT / "kgen"
    # Passes over expressions use scores and positions, which only attention has.
    passes = package.glob("expr/*.py") if family == "attention" else ()
    found = set()
    for path in [
        *passes,
        *package.glob("targets/**/*.py"),
        *package.glob(f"kernels/{family}/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Var"
            )
            if called and node.args and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return sorted(found)


def _files(loaded: Loaded) -> Iterator[str]:
    files = rendered_apart(loaded)
    if "triton.py" in files:
        files |= rendered_apart(loaded, single=True)
    yield from (text for name, text in files.items() if name.endswith(".py"))


def _marks(word: str) -> list[tuple[str, str]]:
    """Return place and kind of each marked name inside a name."""
    found = []
    for part in word.lower().split("__")[1:]:
        place, kind, *rest = [*part.split("z"), ""]
        if rest and place.isdecimal() and kind.isdecimal():
            found.append((place, KINDS[int(kind)]))
    return found


def _form(word: str) -> str:
    """Return the pattern of a name: `{name}` stands for the name in the spec."""
    before, after = word.split("__")
    upper = "Z" in after
    rest = after.split("Z" if upper else "z", 2)[2]
    return f"{before[: -len(STEM)]}{'{NAME}' if upper else '{name}'}{rest}"


def scopes(text: str) -> Iterator[set[str]]:
    """Yield the names of each scope of a file, with the names that inner scopes take from
    outside.
    """
    found: list[set[str]] = []

    def from_outside(table: symtable.SymbolTable) -> set[str]:
        """Return the names that a scope does not define.

        A class defines no names for its functions.
        """
        within = set().union(*map(from_outside, table.get_children()))
        own = set(table.get_identifiers())
        found.append(own | within)
        if isinstance(table, symtable.Function):
            return (own | within).difference(table.get_locals())
        return within | {name for name in own if not table.lookup(name).is_local()}

    from_outside(symtable.symtable(text, "", "exec"))
    yield from found


class _Comprehensions(ast.NodeTransformer):
    """Rename the variables of comprehensions. Since Python 3.12 they have no separate scope."""

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        targets = [name for part in node.generators for name in ast.walk(part.target)]
        own = {name.id for name in targets if isinstance(name, ast.Name)}
        outside = set(ast.walk(node.generators[0].iter))
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id in own and name not in outside:
                name.id += "__own"
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]


def with_own_variables(text: str) -> str:
    """Return a file whose comprehensions have unique variables."""
    return ast.unparse(_Comprehensions().visit(ast.parse(text)))


def _of_function(text: str) -> set[str]:
    """Return the names of a file that an argument of the spec would hide.

    Include names that are assigned in functions with such an argument, but not those of a block
    that then raises. Ignore a module that no such function uses.
    """
    tree = ast.parse(text)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    found = {*symtable.symtable(text, "", "exec").get_identifiers()}
    found -= _modules(tree) - {
        n.id for n in _names(f for f in functions if _has_one(f, f.args.args))
    }
    by_keyword = [f for f in functions if _has_one(f)]
    raised = {id(n) for f in by_keyword for n in _before_raise(f)}
    stored = [n for n in _names(by_keyword) if isinstance(n.ctx, ast.Store)]
    found |= {n.id for n in stored if id(n) not in raised}
    return {name for name in found if "__" not in name}


def _before_raise(function: ast.FunctionDef) -> Iterator[ast.Name]:
    """Yield the names in blocks that end with `raise`. The arguments are not read after them."""
    blocks = (getattr(n, part, None) for n in ast.walk(function) for part in ("body", "orelse"))
    for block in blocks:
        if isinstance(block, list) and block and isinstance(block[-1], ast.Raise):
            yield from (n for line in block for n in ast.walk(line) if isinstance(n, ast.Name))


def _of_kernels(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the functions of a file that Triton compiles, with their names."""
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    for kernel in (f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)):
        arguments = {a.arg for a in ast.walk(kernel.args) if isinstance(a, ast.arg)}
        yield kernel.name, arguments | {n.id for n in _names([kernel])}


def _has_one(function: ast.FunctionDef, more: Iterable[ast.arg] = ()) -> bool:
    """True for a function with a keyword argument of the spec, or one among `more`."""
    return any(_marks(a.arg) for a in (*function.args.kwonlyargs, *more))


def _names(functions: Iterable[ast.FunctionDef]) -> Iterator[ast.Name]:
    yield from (n for function in functions for n in ast.walk(function) if isinstance(n, ast.Name))


def _modules(tree: ast.Module) -> set[str]:
    """Return the names of imported modules."""
    imports = (n for n in tree.body if isinstance(n, ast.Import))
    return {(alias.asname or alias.name).partition(".")[0] for n in imports for alias in n.names}
