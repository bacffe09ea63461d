"""One direction of imports: every module imports only from its own stage and earlier ones.

Shared code knows no kernel family. A family is a package of `kgen.kernels` with its own stages, and
imports no other family.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kgen
from kgen.family import NAMES, Family, Lazy, Target, family

STAGES = (
    *(
        "diagnostics",
        "files",
        "settings",
        "sizes",
        "pages",
        "family",
        "expr",
        "spec",
        "targets",
        "render",
    ),
    *(
        "flex",
        "verify",
        "build",
        "prove",
        "bench",
        "reports",
        "tuning",
        "kernels",
        "cli",
        "__main__",
    ),
)
AS_THEY_ARE = (
    "kgen.kernels.attention.parallel",
    "kgen.kernels.linear_attention.parallel",
    "kgen.targets.ranks",
    "kgen.kernels.attention.flash",
    "kgen.kernels.linear_attention.fla",
    "kgen.build.runtime",
)
"""Folders whose files are emitted unchanged, so they import each other relatively."""
OWN_STAGES = {
    "fields": "spec",
    "serving": "spec",
    "spec": "spec",
    "plan": "spec",
    "parallel": "targets",
    "flash": "spec",
    "fla": "spec",
    "explaining": "spec",
    "lowered": "targets",
    "targets": "targets",
    "adapt": "flex",
    "verify": "verify",
    "prove": "prove",
    "bench": "bench",
    "tune": "tuning",
}
"""The stages of a family, each with the last shared stage that it may import."""
OF_SCHEDULES = {
    "plan": "plan",
    "conditions": "plan",
    "explained": "explaining",
    "verify": "verify",
    "cases": "verify",
    "prove": "prove",
}
"""The stages of modules in the folder of a schedule. All other modules there belong to
`targets`.
"""
PACKAGE = Path(kgen.__file__).parent
RUNTIME = {"torch", "triton", "numpy", "matplotlib"}
RENDERING = STAGES[: STAGES.index("flex") + 1]
OWN_RENDERING = ("fields", "serving", "spec", "plan", "explaining", "lowered", "targets")


def modules() -> list[str]:
    paths = sorted(
        path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")
    )
    return [
        ".".join(path.parts).removesuffix(".__init__")
        for path in paths
        if "_data" not in path.parts
    ]


def stage(module: str) -> str | None:
    """Return the stage of a module of kgen, or None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def own(module: str) -> tuple[str | None, str | None]:
    """Return the family of a module and its stage there, or None for shared code.

    A target's folder may contain the module that compiles its files. A schedule has modules of
    several stages.
    """
    match [*module.split("."), None, None]:
        case _, "kernels", name, "targets", _, "compile", *_:
            return name, "verify"
        case _, "kernels", name, "schedules", "schedule", *_:
            return name, "plan"
        case _, "kernels", name, "schedules", _, None, *_:
            return name, "plan"
        case _, "kernels", name, "schedules", _, part, *_:
            return name, OF_SCHEDULES.get(str(part), "targets")
        case _, "kernels", name, place, *_:
            return name, place
    return None, None


def tree(module: str) -> ast.Module:
    base = PACKAGE.parent.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[str]:
    """Yield the imports anywhere in a module, including imports for type checking."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            place = node.module
            if node.level:
                folder = module.rpartition(".")[0]
                assert folder in AS_THEY_ARE, f"{module} imports relatively"
                place = f"{folder}.{place}"
            yield from (f"{place}.{alias.name}" for alias in node.names)


MODULES = modules()
FAMILIES = [module for module in MODULES if own(module)[0]]
MACHINERY = [module for module in MODULES if stage(module) and not own(module)[0]]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("module", MACHINERY)
def test_direction(module: str) -> None:
    """Shared code imports earlier stages, and nothing of a family."""
    place = stage(module)
    assert place in STAGES, f"{module} belongs to no stage"
    for name in imports(module):
        if name.startswith("kgen.") and (other := stage(name)) in STAGES:
            assert STAGES.index(other) <= STAGES.index(place), f"{module} imports {name}"
            assert own(name)[0] is None, f"{module} imports {name}"


@pytest.mark.parametrize("module", FAMILIES)
def test_direction_in_a_family(module: str) -> None:
    stages = list(OWN_STAGES)
    name, place = own(module)
    assert name in NAMES
    assert place is None or place in stages, f"{module} belongs to no stage"
    for imported in imports(module):
        if not imported.startswith("kgen."):
            continue
        other, its = own(imported)
        if other is None:  # `FAMILY` needs only its class
            last = OWN_STAGES[place] if place else "family"
            assert STAGES.index(stage(imported) or "diagnostics") <= STAGES.index(last), (
                f"{module} imports {imported}"
            )
        else:
            assert other == name, f"{module} imports {imported}"
            assert place, (
                f"{module} imports {imported}: it is there for those who need nothing of the family"
            )
            assert stages.index(str(its)) <= stages.index(place), f"{module} imports {imported}"


SCHEDULES = [path.parent for path in sorted(PACKAGE.glob("kernels/*/schedules/*/__init__.py"))]


def belongs(module: str) -> str | None:
    """Return the schedule folder that contains a module, as a module name, or None."""
    parts = module.split(".")
    inside = parts[3:4] == ["schedules"] and PACKAGE.joinpath(*parts[1:5]) in SCHEDULES
    return ".".join(parts[:5]) if inside else None


def test_no_schedule_imports_another() -> None:
    assert len(SCHEDULES) >= 3
    found = [
        f"{module} imports {imported}"
        for module in MODULES
        if (own_schedule := belongs(module))
        for imported in imports(module)
        if belongs(imported) not in (None, own_schedule)
    ]
    assert found == []


KNOW_A_SCHEDULE = {"tune.tuning": "portable"}
"""Modules of attention that import one schedule, with its name. The list only shrinks."""


def test_only_the_list_knows_schedules() -> None:
    """Files, launchers, explanations and proofs loop over all schedules."""
    found = {
        module.removeprefix("kgen.kernels.attention."): of.rpartition(".")[2]
        for module in MODULES
        if not belongs(module)
        for imported in imports(module)
        if (of := belongs(imported))
    }
    assert found == KNOW_A_SCHEDULE


NAMES_OF_LIBRARIES = re.compile(r"\b(?:triton|cutlass)(?:\.\w+)+|\bIS_NVIDIA_HOPPER\b")
"""Modules of Triton and CuTe, and a constant of fla."""
LIST_OF_SCHEDULES = "kernels/attention/schedules/__init__.py"
"""The list of schedules. It has each schedule once, as a line."""


def names_hopper(path: Path) -> bool:
    """True if a file names Hopper, other than in a name of a library or in the list of
    schedules.
    """
    text = NAMES_OF_LIBRARIES.sub("", path.read_text(encoding="utf-8"))
    if path == PACKAGE / LIST_OF_SCHEDULES:
        text = text.replace('\n    "hopper",\n', "\n", 1)
    return "hopper" in text.lower()


def test_a_chip_is_named_in_its_folder() -> None:
    root = PACKAGE.parent
    files = [
        *PACKAGE.rglob("*.py"),
        *root.glob("templates/**/*.j2"),
        *root.glob("templates/**/*.h"),
    ]
    outside = [path for path in files if "hopper" not in path.parts and "_data" not in path.parts]
    assert len(outside) > 400
    assert [path.relative_to(root).as_posix() for path in outside if names_hopper(path)] == []


def test_a_name_of_a_chip_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for text in ('"hopper",', "_tanh_hopper(x)", "# on Hopper", "gluon.hopper", "import hopper"):
        file.write_text(text)
        assert names_hopper(file), text
    file.write_text(
        "from triton.experimental.gluon.nvidia.hopper import x\n"
        "import cutlass.utils.hopper_helpers as y\n"
    )
    assert not names_hopper(file)


def reached(module: str, steps: Mapping[str, set[str]]) -> set[str]:
    """Return every module that a module imports, directly or through others."""
    found: set[str] = set()
    left = [module]
    while left:
        fresh = steps[left.pop()] - found
        found |= fresh
        left += fresh
    return found


def cyclic(steps: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through others."""
    return {module for module in steps if module in reached(module, steps)}


def test_a_cycle_is_found() -> None:
    assert cyclic({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and for type checking count, too."""
    steps = {
        module: {name if name in MODULES else name.rpartition(".")[0] for name in imports(module)}
        & {*MODULES}
        for module in MODULES
    }
    assert cyclic(steps) == set()


@pytest.mark.parametrize("module", [module for module in MACHINERY if module != "kgen.family"])
def test_machinery_names_no_family(module: str) -> None:
    said = {node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant)}
    parts = {part for name in NAMES for part in family(name).parts}
    assert not said & ({*NAMES} | parts)
    assert not [text for text in said if isinstance(text, str) and text.startswith("kgen.kernels.")]


TARGETS = {target for name in NAMES for target in family(name).targets}


@pytest.mark.parametrize(
    "module", [m for m in MODULES if own(m)[1] != "targets" and m != "kgen.expr.rows"]
)
def test_nothing_lists_targets(module: str) -> None:
    """Facts about a target are in its folder, so that no other table grows with the targets.

    Spellings of functions are the exception.
    """
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            listed = {item.value for item in items if isinstance(item, ast.Constant)} & TARGETS
            assert len(listed) < 2, f"{module}, line {node.lineno}: {', '.join(map(str, listed))}"


def lazies(value: Any) -> Iterator[Lazy]:
    """Yield all `Lazy` values in an object."""
    if isinstance(value, Lazy):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from lazies(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from lazies(one)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from lazies(getattr(value, field.name))


def test_every_package_of_kernels_is_a_family() -> None:
    for name in NAMES:
        assert family(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_what_it_says(name: str) -> None:
    found = family(name)
    assert isinstance(found, Family)
    assert found.name == name
    assert len(list(lazies(found))) > 5
    for lazy in lazies([found, dict(found.targets)]):
        assert lazy.place.startswith((f"kgen.kernels.{name}.", "kgen.spec."))
        assert lazy.get() is not None
    assert found.verification
    assert found.bench
    assert {target.part for target in found.targets.values()} - {None} == set(found.parts)


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_a_family(name: str) -> None:
    """Each target is a folder that describes its files.

    Triton, which runs on every chip, is first.
    """
    targets = family(name).targets
    folders = [
        path.parent.name for path in (PACKAGE / "kernels" / name / "targets").glob("*/__init__.py")
    ]
    assert sorted(targets) == sorted(folders)
    assert next(iter(targets)) == "triton"
    extras = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    for target in targets.values():
        assert isinstance(target, Target)
        assert f"\n{target.runtime.extra} = [" in extras
        assert target.runtime.compiler is None or importlib.util.find_spec(target.runtime.compiler)
    assert [
        one for one, options in family(name).model.get().model_fields["targets"].default if options
    ]


def loaded_by(code: str) -> set[str]:
    """Return the modules that are loaded after running code in its own process."""
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return set(run.stdout.split())


OF_FILES = {f"kgen.render.{name}" for name in ("header", "layout", "manifest", "program", "writer")}
"""Modules that read file names, header lines, and finished files."""


PRINTING = [m for m in MACHINERY if stage(m) in ("targets", "render")]
OF_PRINTING = ("plan", "lowered", "targets", "schedules", "adapt")
PRINTING += [m for m in FAMILIES if own(m)[1] in OF_PRINTING]
PARSERS = {"ast", "re", "symtable", "token", "tokenize"}


@pytest.mark.parametrize("module", [m for m in PRINTING if m not in OF_FILES])
def test_printed_text_is_not_looked_into(module: str) -> None:
    """Planning, printing and rendering decide on trees, never on text."""
    assert not PARSERS & {name.partition(".")[0] for name in imports(module)}


def test_a_module_is_short() -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")
    }
    assert [f"{path}: {length} lines" for path, length in lengths.items() if length > 500] == []


LINES, PARAMETERS = 60, 8


def defined(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function with its qualified name, including nested functions and methods."""
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".strip(".")
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from defined(child, name)


def above_a_limit(function: ast.FunctionDef) -> bool:
    """True for more than `LINES` lines, or more than `PARAMETERS` parameters without `self`.

    A verb of the command line may have more parameters.
    """
    given = function.args
    names = [
        one.arg
        for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        if one
    ]
    number = len(names) - (names[:1] in (["self"], ["cls"]))
    made = (one.func for one in function.decorator_list if isinstance(one, ast.Call))
    verb = any(isinstance(one, ast.Name) and one.id == "verb" for one in made)
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    return lines > LINES or (number > PARAMETERS and not verb)


def test_limits_of_a_function() -> None:
    names = ", ".join(f"x{number}" for number in range(9))
    texts = {
        "few": "def f(self, " + ", ".join(names.split(", ")[1:]) + "): pass",
        "many": f"def f({names}): pass",
        "verb": f"@verb('f')\ndef f({names}): pass",
        "short": "def f():\n" + "    f()\n" * 59,
        "long": "@verb('f')\ndef f():\n" + "    f()\n" * 60,
    }
    found = {
        name
        for name, text in texts.items()
        for _, one in defined(ast.parse(text))
        if above_a_limit(one)
    }
    assert found == {"many", "long"}


def test_a_function_is_short_and_has_few_parameters() -> None:
    found = {
        f"{module}: {name}"
        for module in MODULES
        for name, function in defined(tree(module))
        if above_a_limit(function)
    }
    assert found == set()


def test_rendering_needs_no_runtime() -> None:
    emitted = {m for m in MACHINERY if m.rpartition(".")[0] in AS_THEY_ARE}
    names = [m for m in MACHINERY if stage(m) in RENDERING and m not in emitted]
    names += [m for m in FAMILIES if own(m)[1] in (None, *OWN_RENDERING)]
    assert not RUNTIME & loaded_by(f"import {', '.join(names)}")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("attention", "causal"),
        ("norm", "rms_norm"),
        ("chunk_output", "retention_output"),
        ("linear_attention", "retnet"),
    ],
)
def test_rendering_imports_one_family(name: str, spec: str) -> None:
    code = "from pathlib import Path; from kgen.render.project import render_all; "
    there = loaded_by(code + f"render_all([Path('specs/{spec}.yaml')], Path('generated'))")
    assert {own(module)[0] for module in there if module.startswith("kgen.kernels.")} == {name}
    assert not RUNTIME & there
