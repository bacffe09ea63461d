"""Iterations of the loops of emitted kernels, counted in the interpreters over all quick cases and
checks.
"""

from __future__ import annotations

import ast
import importlib
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kgen.spec.load import load
from kgen.verify.families import problem_of
from support.interpreters.own_process import interpreted

ROOT = Path(__file__).resolve().parents[3]
Turns = dict[str, set[int]]
"""Observed iteration counts (0, 1, or 2 for several), by the function and header of the loop."""


class _Counted(ast.NodeTransformer):
    """Rewrite the loops of kernels so that they report their number of iterations."""

    def __init__(self) -> None:
        self.kernel = ""
        self.loops: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if any("jit" in ast.unparse(d) for d in node.decorator_list):
            self.kernel = node.name
            self.generic_visit(node)
            self.kernel = ""
        return node

    def _loop(self, header: str) -> str:
        name = f"{self.kernel}: {header}"
        while name in self.loops:
            name += " (again)"
        self.loops.append(name)
        return name

    def visit_For(self, node: ast.For) -> ast.AST:
        if self.kernel:
            name = self._loop(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")
            node.iter = ast.Call(
                ast.Name("_kgen_turns", ast.Load()), [ast.Constant(name), node.iter], []
            )
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        if not self.kernel:
            return node
        name = self._loop(f"while {ast.unparse(node.test)}")
        begin, turn = (
            ast.Expr(ast.Call(ast.Name(f"_kgen_{what}", ast.Load()), [ast.Constant(name)], []))
            for what in ("begin", "turn")
        )
        node.body.insert(0, turn)
        end = ast.Expr(ast.Call(ast.Name("_kgen_end", ast.Load()), [ast.Constant(name)], []))
        return [begin, node, end]


def counted(text: str) -> tuple[str, list[str]]:
    """Return the file with counting loops, and the names of the loops."""
    rewriter = _Counted()
    tree = ast.fix_missing_locations(rewriter.visit(ast.parse(text)))
    return ast.unparse(tree), rewriter.loops


def turns(spec: str, folder: Path, file: str = "triton.py") -> Turns:
    """Return the iteration counts of the loops in a file of a stock spec. `hopper.py` runs in the
    interpreter of Gluon.
    """
    package = folder / spec
    shutil.copytree(ROOT / "generated" / spec, package)
    text, loops = counted((package / file).read_text())
    (package / file).write_text(text)
    run = _run if file == "triton.py" else _run_hopper
    return {name: set() for name in loops} | interpreted(
        run, spec, package / "triton.py", seconds=SECONDS
    )


SECONDS = 3000.0


def _run(spec: str, path: Path) -> Turns:
    from kgen.verify import interpreter
    from kgen.verify.families import Subject
    from kgen.verify.toolchain import import_file

    interpreter.mend()
    loaded = load(ROOT / "specs" / f"{spec}.yaml")
    module, found = import_file(path, spec), _Found()
    found.hear(module)
    subject = Subject(problem_of(loaded), "triton", path, module, "cpu")
    cases = importlib.import_module(f"kgen.kernels.{loaded.spec.kernel}.verify.cases")
    for group in cases.groups(subject.problem):
        for name in cases.case_names(subject.problem, group, True):
            cases.run_case(subject, group, name)
    for name, (check, large) in cases.CHECKS.items():
        if not large and name not in ("misuse", "launches", "wrong-offsets"):
            check(subject)
    return dict(found.turns_of)


def _run_hopper(spec: str, path: Path) -> Turns:
    from kgen.verify.families import Subject

    problem = problem_of(load(ROOT / "specs" / f"{spec}.yaml"))
    family = f"kgen.kernels.{problem.kernel}"
    on_hopper = importlib.import_module(f"{family}.schedules.hopper.verify")
    groups = importlib.import_module(f"{family}.verify.cases").groups
    module, found = on_hopper.imported(path, spec), _Found()
    found.hear(module._hopper())
    subject = Subject(problem, "triton", path, module, "cpu")
    for group in groups(problem):
        for name in on_hopper.case_names(problem):
            on_hopper.run_case(subject, group, name)
    return dict(found.turns_of)


class _Found:
    """Iteration counts that kernels report. Partitions of a program are threads."""

    def __init__(self) -> None:
        self.turns_of: dict[str, set[int]] = defaultdict(set)
        self.under_way = threading.local()

    def hear(self, module: Any) -> None:
        """Install the counters in a file."""
        for name in ("turns", "begin", "turn", "end"):
            setattr(module, f"_kgen_{name}", getattr(self, name))

    def turns(self, name: str, steps: Iterable[Any]) -> Iterator[Any]:
        number = 0
        try:
            for step in steps:
                number += 1
                yield step
        finally:
            self.turns_of[name].add(min(number, 2))

    def begin(self, name: str) -> None:
        vars(self.under_way)[name] = 0

    def turn(self, name: str) -> None:
        vars(self.under_way)[name] += 1

    def end(self, name: str) -> None:
        self.turns_of[name].add(min(vars(self.under_way).pop(name), 2))
