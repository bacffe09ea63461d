"""Kernel families, the values of `kernel:` in a spec, with the parts that each stage needs,
imported on first use.

A family is a package in `kgen/kernels` that defines `FAMILY`, a `Family`. A target is a package in
the family's folder `targets` that defines `TARGET`, a `Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast


def _packages(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in folder.glob("*/__init__.py")))


KERNELS = Path(__file__).parent / "kernels"
NAMES = _packages(KERNELS)
"""Names of all families, sorted."""


@dataclass(frozen=True)
class Lazy:
    """A module (`module`) or one of its members (`module:name`), imported by `get` or by a call."""

    place: str

    def get(self) -> Any:
        """Import and return the module or its member."""
        module, _, name = self.place.partition(":")
        found = import_module(module)
        return getattr(found, name) if name else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get()(*args, **kwargs)


@dataclass(frozen=True)
class Chip:
    """Kernels for one chip, in a `file` next to the emitted one. An `interpreter` runs them on the
    CPU.

    `cases` is a module; `kgen.verify.families` documents its members.
    """

    file: str
    arch: str
    """The architecture of the file, such as sm_90a."""
    module: str
    """The function of the emitted file that returns the module of `file`, or None."""
    choice: str
    """The function of the emitted file that returns True if these kernels can run on the tensors of
    a call.
    """
    interpreter: str
    cases: Lazy


@dataclass(frozen=True)
class Verification:
    """The parts of a family that verify its files. `kgen.verify.families` documents `problem` and
    `cases`.

    `problem` turns a spec into the data for worker processes, without torch. `cases` is a module.
    """

    problem: Lazy
    cases: Lazy
    chips: Lazy | None = None
    """A tuple: each `Chip` for which files contain special kernels."""


@dataclass(frozen=True)
class Bench:
    """The parts of a family that time its files against peers.

    `shape` is a module without torch: `Shape` parses a size; `PEERS` and `DEFAULT_PEERS` are names.
    `neutral` returns the shapes of other projects' benchmarks for a problem by text.
    `NEUTRAL_SPECS` says for which specs there are any.
    `race` takes a `BenchJob` and the functions to time, and returns rows. `plot` draws the reports
    of several specs into a file.
    """

    shape: Lazy
    race: Lazy
    plot: Lazy


@dataclass(frozen=True)
class Runtime:
    """The requirements to compile and run the files of a target, the same for all families."""

    imports: tuple[str, ...]
    """The packages that the files import, apart from the standard library."""
    tools: tuple[str, ...] = ()
    """The packages that compile the files. The ledger records results under the versions of these
    packages.
    """
    needs: str | None = None
    """The package that compiling or running the files needs, apart from torch and triton."""
    extra: str = "verify"
    """The extra of kgen's package that installs `needs`."""
    compiler: str | None = None
    """The module that compiles a file without a GPU (`python -m`); None if there is nothing to
    compile.
    """
    on_cpu: bool = False
    """True if the files run without a GPU."""


@dataclass(frozen=True)
class Target:
    """One target of a family, in the folder of that name.

    `sources` turns a spec into files (`kgen.targets.Source`). `emits` names these files for people.
    `options` is the model of the target's options in a spec. If the files compute only one part of
    the kernel, `part` names it, and `Family.parts` has its verification. `forward_only` files have
    no gradients, even if the spec lists backward. `obligations` states the proof obligations of the
    files (`kgen.prove`). `kgen render` proves the subset `pairs` before it writes the files.
    `points` compares plan and spec at sample points, without z3. `native` describes the calls of
    the kernels from C (`kgen.targets.native`).
    """

    runtime: Runtime
    sources: Lazy
    emits: str
    options: Lazy = Lazy("kgen.spec.targets:NoOptions")
    part: str | None = None
    forward_only: bool = False
    obligations: Lazy | None = None
    pairs: Lazy | None = None
    points: Lazy | None = None
    native: Lazy | None = None


@dataclass(frozen=True)
class Varying:
    """A field that may list several values. Each value has its own folder, and one function
    dispatches between them.

    `told` is a Python expression over the arguments of the emitted function, and `literal` its
    value for a checked spec. `word` is the spec's part of the folder's name, and `words` names the
    field for people.
    """

    told: str
    literal: Callable[[Any], str]
    word: Callable[[Any], str]
    words: str


def dtype_of(argument: str) -> Varying:
    """Dispatch on the dtype of an argument. In a spec with several dtypes, it is the dtype of the
    input.

    `_wanted.j2` defines `_wanted`. `_DTYPES` lists the dtypes of all variants.
    """
    torch = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}

    def word(spec: Any) -> str:
        return str(getattr(spec.dtype, "input", spec.dtype))

    return Varying(f"_wanted({argument}, _DTYPES)", lambda spec: torch[word(spec)], word, "dtype")


HEAD_DIM = Varying(
    "(q.shape[-1], v.shape[-1])",
    lambda spec: f"({spec.head_dim.qk}, {spec.head_dim.v})",
    lambda spec: "d" + "_".join(map(str, dict.fromkeys((spec.head_dim.qk, spec.head_dim.v)))),
    "heads of",
)
"""Dispatch on the head widths: of queries and keys, and of values."""


@dataclass(frozen=True)
class Family:
    """All parts of a kernel family.

    `model` parses its specs. It has the methods `expressions()` and `check()`, and the fields
    `kernel`, `name`, `summary`, `license`, `passes` and `targets`. `explain` builds the page of
    `kgen explain`. `verification` and `bench` are optional, so that a new family can render first.
    `tune` times tiles if the family has a table of tiles.
    """

    name: str
    model: Lazy
    explain: Lazy
    verification: Verification | None = None
    bench: Bench | None = None
    parts: Mapping[str, Verification] = field(default_factory=dict)
    tune: Lazy | None = None
    varies: Mapping[str, Varying] = field(default_factory=dict)
    """The fields that may hold a list, by name."""
    names_give_way: bool = False
    """True if files rename the user's buffers and params that clash with names of the kernels
    (`Loaded.called`).
    """
    adapters: Mapping[str, Lazy] = field(default_factory=dict)
    """Functions by adapter kind that build an `Adapter` (`kgen.render.adapters`) from the variants
    of a spec.
    """
    packages: Mapping[str, Lazy] = field(default_factory=dict)
    """Functions by adapter kind that build one `Adapter` for several specs, from their variants and
    the name of the package.
    """

    promises: Lazy | None = None
    """Names the buffers that kernels could search if the spec declared them sorted."""

    @property
    def targets(self) -> Mapping[str, Target]:
        """Targets by name; those that run without a GPU come first."""
        return targets_of(self.name)

    def verified_by(self, part: str | None) -> Verification | None:
        """Return the verification of the whole kernel (`part` is None) or of one part."""
        return self.verification if part is None else self.parts[part]


def family(name: str) -> Family:
    """Return the family `name`, without importing its parts."""
    return cast("Family", import_module(f"kgen.kernels.{name}").FAMILY)


def families() -> Iterator[Family]:
    """Yield all families."""
    return map(family, NAMES)


@cache
def chips() -> tuple[Chip, ...]:
    """Return the chips for which families have special kernels."""
    found = (one.verification.chips for one in families() if one.verification is not None)
    return tuple(chip for of in found if of is not None for chip in of.get())


@cache
def targets_of(name: str) -> Mapping[str, Target]:
    """Return the targets of a family by name."""
    folders = _packages(KERNELS / name / "targets")
    found = {
        target: import_module(f"kgen.kernels.{name}.targets.{target}").TARGET for target in folders
    }
    return dict(sorted(found.items(), key=lambda item: (not item[1].runtime.on_cpu, item[0])))


def known_targets() -> tuple[str, ...]:
    """Return the names of the targets of all families."""
    return tuple(dict.fromkeys(target for one in families() for target in one.targets))


def known_adapters() -> tuple[str, ...]:
    """Return the adapter kinds of all families."""
    return tuple(dict.fromkeys(kind for one in families() for kind in one.adapters))


def packaged_adapters() -> tuple[str, ...]:
    """Return the adapter kinds whose package may have the kernels of several specs."""
    return tuple(dict.fromkeys(kind for one in families() for kind in one.packages))
