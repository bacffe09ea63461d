"""Lines of emitted files have at most 120 columns."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kgen.targets.folding import COLUMNS

GENERATED = Path(__file__).resolve().parents[1] / "generated"
LONGER = {"hopper.py": 6, "triton.py": 101, "cuda.py": 3}
"""Lines that are longer still, of all files of a name: these numbers only shrink."""
LONGER_IN_KERNELS = 4
"""The same of kernels in `triton.py`."""


def long_lines(path: Path) -> list[int]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]


def in_kernels(path: Path) -> Iterator[int]:
    """The numbers of the lines of functions that Triton compiles."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            assert node.end_lineno is not None
            yield from range(node.lineno, node.end_lineno + 1)


def test_lines_are_not_too_long() -> None:
    files = [path for path in sorted(GENERATED.rglob("*")) if path.suffix in (".py", ".cu")]
    assert len(files) > 100
    found: Counter[str] = Counter()
    for path in files:
        found[path.name] += len(long_lines(path))
    assert {name: count for name, count in found.items() if count > LONGER.get(name, 0)} == {}


def test_lines_of_portable_kernels_are_not_too_long() -> None:
    found = [
        f"{path.parent.name}:{number}"
        for path in sorted(GENERATED.rglob("triton.py"))
        for number in sorted({*long_lines(path)} & {*in_kernels(path)})
    ]
    assert len(found) <= LONGER_IN_KERNELS, found
