"""Verdicts on emitted kernels: a test that passed is skipped while everything that decides its
outcome is the same.

A test calls `verdict(problem, *emitted)` when all of its inputs exist. If that call is recorded,
the test passes and ends there. A record is a hash of:

- the programs of the emitted files, without comments, docstrings and layout
- the programs of the files that these import from their folder
- the problem with its trees
- the programs of the modules that verify: reference, cases, inputs and harness
- the programs of the test file and of the modules that it imports
- versions

Modules that distribute work and write results are left out. Planning and rendering decide an
outcome only through the problem and the files. A test checks those before the call, and only
verifies after it.

tests/verdicts.json keeps the records of `thorough` tests, for the versions in constraints.txt.
`sampling.py` marks all tests with a verdict, except for a sample. A `thorough` test without a
record fails. `scripts/test --stale` runs it and writes the record, if these versions are installed.
pytest's cache keeps the records of the sample, for one Python with its installed packages.

A verdict is kept when its test has passed, including the teardown of its fixtures.
"""

from __future__ import annotations

import ast
import fcntl
import gc
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from functools import cache, lru_cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kgen.render.program import program
from support.running.sampling import mark

FILE = "tests/verdicts.json"
CACHE = "pytest's cache"
KEPT = "kgen/verdicts"
"""Path of the records in that cache."""
HANDING_ON = {
    *(f"{name}.py" for name in ("compiling", "costs", "found", "ledger", "merging", "processes")),
    *("sanitizing.py", "verifying.py"),
    "farm",
}
"""Modules of `kgen/verify` that distribute work and record results. They have their own tests."""
DIGEST = pytest.StashKey[str]()
PROGRAMS = pytest.StashKey[dict[tuple[str, Path], list[str]]]()


class OnRecord(Exception):
    """Exception that ends a test whose verdict is recorded."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked `thorough`")
    parser.addoption("--stale", action="store_true", help="also run tests with a stale verdict")
    parser.addoption("--fresh", action="store_true", help="ignore recorded verdicts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `thorough` tests that have no verdict, unless `--all` is set."""
    mark(items)
    if not config.getoption("--all"):
        left_out = [
            x for x in items if _thorough(x) and "verdict" not in getattr(x, "fixturenames", ())
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [x for x in items if x not in left_out]


def pytest_collection_finish() -> None:
    """Exclude the collected tests and the modules from garbage collection.

    They stay until the end. Each full collection would visit millions of their objects.
    """
    gc.collect()
    gc.freeze()


class Verdict:
    """The fixture `verdict` of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item

    def __call__(self, problem: Any, *emitted: Path | str) -> None:
        """End the test if it passed before with these files of a problem.

        Each of `emitted` is a file, a folder or a text. With the problem None, the files belong to
        no spec, and the hash covers all families.
        """
        assert DIGEST not in self.item.stash, "a test has one verdict"
        thorough, option = _thorough(self.item), self.item.config.getoption
        digest = self.item.stash[DIGEST] = self._digest(problem, emitted)
        runs = option("--all") or option("--stale") or not thorough
        if not (option("--fresh") and runs) and _known(self.item, digest):
            self.item.user_properties.append(("verdict", FILE if thorough else CACHE))
            raise OnRecord
        if not runs:
            pytest.fail(
                f"what this test runs has changed: run `scripts/test --stale`, commit {FILE}", False
            )

    def _digest(self, problem: Any, emitted: Iterable[Path | str]) -> str:
        root, family = self.item.config.rootpath, getattr(problem, "kernel", "*")
        texts = [text for one in emitted for file in (one, *_beside(one)) for text in _texts(file)]
        parts = [_name(self.item), _said(problem), *texts, *self._deciding(family)]
        parts.append(_pinned(root) if _thorough(self.item) else _versions())
        return hashlib.sha256(
            "".join(f"{len(part)}\n{part}" for part in parts).encode()
        ).hexdigest()

    def _deciding(self, family: str) -> list[str]:
        """Return the programs of the modules that verify, and of those that the test imports.

        They are read once in a session for each family and test file: hundreds of tests share them.
        """
        root, test = self.item.config.rootpath, self.item.path
        known = self.item.config.stash.setdefault(PROGRAMS, {})
        if (family, test) not in known:
            of_family = f"kgen/kernels/{family}"
            own = ("__init__", "verify/**/*", "targets/*/__init__", "targets/*/compile*")
            places = ("kgen/verify/**/*.py", *(f"{of_family}/{module}.py" for module in own))
            modules = _imported((path for place in places for path in root.glob(place)), root)
            helpers = _imported([test, root / "tests/conftest.py"], root / "tests", test.parent)
            known[family, test] = [
                f"{path.relative_to(root)}\n{_program(path.read_bytes(), path.suffix)}"
                for path in sorted(modules | helpers)
            ]
        return known[family, test]


@lru_cache(1024)
def _program(content: bytes, suffix: str) -> str:
    """The program of a module, which the digests of hundreds of tests contain."""
    return program(content, suffix).decode()


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    """Return a function that ends a test whose verdict is recorded.

    See `tests/support/running/verdicts.py`.
    """
    return Verdict(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except OnRecord:
        del pyfuncitem.stash[DIGEST]
        return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if DIGEST in item.stash:
        if not report.passed:
            del item.stash[DIGEST]
        elif report.when == "teardown":
            _keep(item, item.stash[DIGEST])
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of verdicts from each record."""
    said = [
        dict(report.user_properties).get("verdict")
        for report in terminalreporter.stats.get("passed", ())
    ]
    taken = Counter(place for place in said if place)
    if taken:
        counts = ", ".join(f"{count} from {place}" for place, count in sorted(taken.items()))
        terminalreporter.write_line(f"verdicts: {counts} (`--fresh` runs these tests again)")


def _thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _key(item: pytest.Item) -> str:
    """Return the key in the file of verdicts.

    The stem suffices, because names of test files are unique.
    """
    return f"{item.path.stem}::{_name(item)}"


def _known(item: pytest.Item, digest: str) -> bool:
    if _thorough(item):
        with open(item.config.rootpath / FILE, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return bool(json.load(file).get(_key(item)) == digest)
    cache = _cache(item)
    # An incomplete record counts as none.
    return cache is not None and cache.get(f"{KEPT}/{digest}", False) is True


def _cache(item: pytest.Item) -> pytest.Cache | None:
    """Return pytest's cache, or None with `-p no:cacheprovider`."""
    return getattr(item.config, "cache", None)


def _keep(item: pytest.Item, digest: str) -> None:
    if not _thorough(item):
        if cache := _cache(item):
            cache.set(f"{KEPT}/{digest}", True)
        return
    if not _as_pinned(item.config.rootpath):
        return
    with open(item.config.rootpath / FILE, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = json.load(file) | {_key(item): digest}
        file.seek(0)
        file.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
        file.truncate()


def _said(problem: Any) -> str:
    """Return the text of a problem and of its properties."""
    made = (name for name, value in vars(type(problem)).items() if isinstance(value, property))
    return "\n".join([repr(problem), *(f"{name} = {getattr(problem, name)!r}" for name in made)])


def _texts(emitted: Path | str) -> Iterator[str]:
    """Yield the programs of a text, a file, or all files of a folder with their names."""
    if isinstance(emitted, str):
        yield program(emitted.encode(), ".py").decode()
    elif emitted.is_dir():
        # The manifest has hashes of texts. Nothing that runs reads it. Bytecode repeats the texts.
        left_out = {"manifest.json", "__pycache__"}
        for path in sorted(
            p for p in emitted.rglob("*") if p.is_file() and left_out.isdisjoint(p.parts)
        ):
            yield str(path.relative_to(emitted))
            yield from _texts(path)
    else:
        yield program(emitted.read_bytes(), emitted.suffix).decode()


def _beside(emitted: Path | str) -> list[Path]:
    """Return the files that an emitted file imports from its folder: launch functions, kernels for
    one chip.
    """
    if isinstance(emitted, str) or emitted.suffix != ".py":
        return []
    text = emitted.read_text()
    if "from ." not in text:  # parsing takes long, and most files stand alone
        return []
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    named = [
        [one.module] if one.module else [x.name for x in one.names]
        for one in nodes
        if one.level == 1
    ]
    places = {emitted.with_name(f"{name}.py") for names in named for name in names}
    return sorted(place for place in places if place.is_file())


def _imported(files: Iterable[Path], *folders: Path) -> set[Path]:
    """Return files with the files that they import, directly or indirectly, from some folders.

    Imports of plans and of `problem.py` are left out.
    """
    found: set[Path] = set()
    to_do = [*files]
    while to_do:
        if (path := to_do.pop()) in found or _hands_on(path):
            continue
        found.add(path)
        if path.name != "problem.py" and path.parent.name != "plan":
            bases = [
                folder.joinpath(*name.split("."))
                for name in _imports(path.read_text())
                for folder in folders
            ]
            places = [
                place for base in bases for place in (base.with_suffix(".py"), base / "__init__.py")
            ]
            to_do += [place for place in places if place.is_file()]
    return found


def _hands_on(path: Path) -> bool:
    """True if a module of `kgen/verify`, or its folder, is in `HANDING_ON`."""
    place = path.parent if path.parent.name in HANDING_ON else path
    return place.name in HANDING_ON and place.parent.name == "verify"


@cache
def _imports(source: str) -> frozenset[str]:
    """Return the modules that a source imports, anywhere except for type checking.

    Imported names are included, because they may be modules.
    """
    found: set[str] = set()
    to_do: list[ast.AST] = [ast.parse(source)]
    while to_do:
        node = to_do.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            to_do += ast.iter_child_nodes(node)
    return frozenset(found)


def _pinned(root: Path) -> str:
    """Return the lines of constraints.txt that can change results: numpy, torch, Triton and
    CUDA.
    """
    lines = (root / "constraints.txt").read_text().splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("numpy", "torch", "triton", "nvidia", "cuda"))
    )


def _as_pinned(root: Path) -> bool:
    """True if these versions are installed."""
    wanted = map(Requirement, _pinned(root).splitlines())
    return all(
        one.specifier.contains(version(one.name), prereleases=True)
        for one in wanted
        if one.marker is None or one.marker.evaluate()
    )


@cache
def _versions() -> str:
    """Return the versions of Python, of the machine, and of all installed packages."""
    there = sorted({f"{one.name} {one.version}" for one in distributions()})
    return "\n".join([platform.python_version(), platform.platform(), *there])
