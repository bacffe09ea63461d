"""Verdicts on emitted kernels: a test that passed is not run again while all that decides its outcome stays the same.

A test calls `verdict(problem, *emitted)` when it has what it will run. Where that is on record as right, the test ends
there, as passed. The record is a hash of: the programs in the emitted files (no comments, docstrings or layout) and in
the files that they import from their folder; the problem with its trees; the programs of the modules that verify
(reference, cases, inputs, harness), of the test file, and of the modules that these import; and versions. Modules that
distribute work and write results are left out. Planning and rendering decide an outcome only through the problem and
the files. A test checks those before the call, and only verifies after it.

Records are kept in pytest's cache, for one Python and all that is installed there; those of tests marked `thorough`,
which `scripts/test --all` runs, in tests/verdicts.json, for the versions that constraints.txt names: these tests fail
where it has none, and where other versions are installed none is written. A verdict is kept when its test has passed,
with the teardown of its fixtures.
"""

from __future__ import annotations

import ast
import fcntl
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
"""Where, in that cache."""
HANDING_ON = {
    *(f"{name}.py" for name in ("compiling", "costs", "found", "ledger", "merging", "processes")),
    *("sanitizing.py", "verifying.py"),
    "farm",
}
"""Of `kgen/verify`, what hands out work and writes down what came of it, which has tests of its own."""
DIGEST = pytest.StashKey[str]()


class OnRecord(Exception):
    """Ends a test whose verdict is on record."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked `thorough`, too")
    parser.addoption("--fresh", action="store_true", help="run again what is on record as right")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--all`, of the tests marked `thorough` those stay that have their verdict on record."""
    mark(items)
    if not config.getoption("--all"):
        left_out = [x for x in items if _thorough(x) and "verdict" not in getattr(x, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [x for x in items if x not in left_out]


class Verdict:
    """The fixture `verdict`, of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item

    def __call__(self, problem: Any, *emitted: Path | str) -> None:
        """End the test if it is on record as right with these files, folders of them, or texts, of a problem.

        Where that is None, they are of no spec, and any family may have a part in it.
        """
        assert DIGEST not in self.item.stash, "a test has one verdict"
        thorough, option = _thorough(self.item), self.item.config.getoption
        digest = self.item.stash[DIGEST] = self._digest(problem, emitted)
        runs = option("--all") or not thorough
        if not (option("--fresh") and runs) and _known(self.item, digest):
            self.item.user_properties.append(("verdict", FILE if thorough else CACHE))
            raise OnRecord
        if not runs:
            pytest.fail(f"what this test runs has changed: run `scripts/test --all`, commit {FILE}", False)

    def _digest(self, problem: Any, emitted: Iterable[Path | str]) -> str:
        root, test = self.item.config.rootpath, self.item.path
        of_family = f"kgen/kernels/{getattr(problem, 'kernel', '*')}"
        own = ("__init__", "verify/**/*", "targets/*/__init__", "targets/*/compile*")
        places = ("kgen/verify/**/*.py", *(f"{of_family}/{module}.py" for module in own))
        modules = _imported((path for place in places for path in root.glob(place)), root)
        helpers = _imported([test, root / "tests/conftest.py"], root / "tests", test.parent)
        texts = [text for one in emitted for file in (one, *_beside(one)) for text in _texts(file)]
        parts = [_name(self.item), _said(problem), *texts]
        for path in sorted(modules | helpers):
            parts.append(f"{path.relative_to(root)}\n{_program(path.read_bytes(), path.suffix)}")
        parts.append(_pinned(root) if _thorough(self.item) else _versions())
        return hashlib.sha256("".join(f"{len(part)}\n{part}" for part in parts).encode()).hexdigest()


@lru_cache(1024)
def _program(content: bytes, suffix: str) -> str:
    """The program of a module, which the digests of hundreds of tests contain."""
    return program(content, suffix).decode()


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    """Ends a test that is on record as right: see `tests/support/running/verdicts.py`."""
    return Verdict(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except OnRecord:
        del pyfuncitem.stash[DIGEST]
        return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if DIGEST in item.stash:
        if not report.passed:
            del item.stash[DIGEST]
        elif report.when == "teardown":
            _keep(item, item.stash[DIGEST])
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many verdicts were taken from where."""
    said = [
        dict(report.user_properties).get("verdict") for report in terminalreporter.stats.get("passed", ())
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
    """In the file of verdicts: names of tests are of one file each."""
    return f"{item.path.stem}::{_name(item)}"


def _known(item: pytest.Item, digest: str) -> bool:
    if _thorough(item):
        with open(item.config.rootpath / FILE, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return bool(json.load(file).get(_key(item)) == digest)
    cache = _cache(item)
    # What was cut off while it was written is as good as nothing.
    return cache is not None and cache.get(f"{KEPT}/{digest}", False) is True


def _cache(item: pytest.Item) -> pytest.Cache | None:
    """None with `-p no:cacheprovider`."""
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
    """A problem, and what it makes of itself."""
    made = (name for name, value in vars(type(problem)).items() if isinstance(value, property))
    return "\n".join([repr(problem), *(f"{name} = {getattr(problem, name)!r}" for name in made)])


def _texts(emitted: Path | str) -> Iterator[str]:
    """What there is to run: a text, a file, or all files of a folder with their names."""
    if isinstance(emitted, str):
        yield program(emitted.encode(), ".py").decode()
    elif emitted.is_dir():
        for path in sorted(path for path in emitted.rglob("*") if path.is_file()):
            yield str(path.relative_to(emitted))
            yield from _texts(path)
    else:
        yield program(emitted.read_bytes(), emitted.suffix).decode()


def _beside(emitted: Path | str) -> list[Path]:
    """The files that an emitted file imports from its folder: the launch functions, kernels for one chip."""
    if isinstance(emitted, str) or emitted.suffix != ".py":
        return []
    text = emitted.read_text()
    if "from ." not in text:  # parsing takes long, and most files stand alone
        return []
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    named = [[one.module] if one.module else [x.name for x in one.names] for one in nodes if one.level == 1]
    places = {emitted.with_name(f"{name}.py") for names in named for name in names}
    return sorted(place for place in places if place.is_file())


def _imported(files: Iterable[Path], *folders: Path) -> set[Path]:
    """Files and what they import of some folders, and so on, but not what a plan or a problem does."""
    found: set[Path] = set()
    to_do = [*files]
    while to_do:
        if (path := to_do.pop()) in found or _hands_on(path):
            continue
        found.add(path)
        if path.name != "problem.py" and path.parent.name != "plan":
            bases = [
                folder.joinpath(*name.split(".")) for name in _imports(path.read_text()) for folder in folders
            ]
            places = [place for base in bases for place in (base.with_suffix(".py"), base / "__init__.py")]
            to_do += [place for place in places if place.is_file()]
    return found


def _hands_on(path: Path) -> bool:
    """Whether a module of kgen, or its folder in `kgen/verify`, is one of those."""
    place = path.parent if path.parent.name in HANDING_ON else path
    return place.name in HANDING_ON and place.parent.name == "verify"


@cache
def _imports(source: str) -> frozenset[str]:
    """The modules that one imports, wherever in it, but for type checking alone; and names of these, which may be."""
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
    """The lines of constraints.txt that decide what kernels compute and what compilers make of them."""
    lines = (root / "constraints.txt").read_text().splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("numpy", "torch", "triton", "nvidia", "cuda"))
    )


def _as_pinned(root: Path) -> bool:
    """Whether these are the versions that are installed here."""
    wanted = map(Requirement, _pinned(root).splitlines())
    return all(
        one.specifier.contains(version(one.name), prereleases=True)
        for one in wanted
        if one.marker is None or one.marker.evaluate()
    )


@cache
def _versions() -> str:
    """Of Python, of the machine, and of all that is installed."""
    there = sorted({f"{one.name} {one.version}" for one in distributions()})
    return "\n".join([platform.python_version(), platform.platform(), *there])
