"""Kernel families, what `kernel:` of a spec says: what each brings to every stage, imported when it is asked for.

Families and their targets are found by their folders: a package of `kgen/kernels` has its `Family` as `FAMILY`, a
package of its `targets` its `Target` as `TARGET`.
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
"""The families."""


@dataclass(frozen=True)
class Lazy:
    """A module, or what it calls by a name, `module:name`. It is imported by asking for it, or by calling it."""

    place: str

    def get(self) -> Any:
        """What stands there."""
        module, _, name = self.place.partition(":")
        found = import_module(module)
        return getattr(found, name) if name else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get()(*args, **kwargs)


@dataclass(frozen=True)
class Chip:
    """Kernels for one chip, in a `file` beside the emitted one, which an `interpreter` runs on the CPU.

    `cases` is a module; `kgen.verify.families` says what it offers.
    """

    file: str
    arch: str
    """The architecture of the file, as sm_90a."""
    module: str
    """The function of the emitted file that gives the module of `file`, or None."""
    choice: str
    """The function of the emitted file that says whether these kernels serve some tensors."""
    interpreter: str
    cases: Lazy


@dataclass(frozen=True)
class Verification:
    """What it takes to verify files. `kgen.verify.families` says what the two offer.

    `problem` makes of a spec what worker processes need to know, without torch; `cases` is a module.
    """

    problem: Lazy
    cases: Lazy
    chip: Lazy | None = None
    """The `Chip` of which files have kernels of their own."""


@dataclass(frozen=True)
class Bench:
    """What it takes to time files against peers.

    `shape` is a module without torch: `Shape` reads a size, `PEERS` and `DEFAULT_PEERS` are names. `race` takes a
    `BenchJob` and the functions to time, and gives rows; `plot` draws the reports of several specs into a file.
    """

    shape: Lazy
    race: Lazy
    plot: Lazy


@dataclass(frozen=True)
class Runtime:
    """What it takes to compile and to run the files of a target, in whatever family."""

    imports: tuple[str, ...]
    """The packages that they import, beside Python's own modules."""
    tools: tuple[str, ...] = ()
    """What makes machine code of them, as packages are called: results are recorded under the versions of these."""
    needs: str | None = None
    """What must be installed to compile or run them, beside torch and triton."""
    extra: str = "verify"
    """The extra of kgen's own package that brings it."""
    compiler: str | None = None
    """The module that compiles a file where no GPU is, `python -m`; None where there is nothing to compile."""
    on_cpu: bool = False
    """Whether they run without a GPU."""


@dataclass(frozen=True)
class Target:
    """What a family brings to emit files of one kind, in a folder of that name.

    `sources` makes of a spec the files (`kgen.targets.Source`), which `emits` names for people. `options` is the model
    of what a spec may say under the target's name. Where files do one part of the kernel alone, `part` says which, and
    how that is verified is in `Family.parts`. `forward_only` files have no gradients, whatever the spec asks of others.
    `obligations` states what can be proved of the files of a spec (`kgen.prove`). `pairs` states the part of it that is
    proved before they are written, and `points` compares plan and spec at some numbers, without z3. `native` says how
    their kernels are called from C (`kgen.targets.native`).
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
    """A field of which a spec may list several values: a folder for each, and one function that tells them apart.

    `told` is Python over the arguments of the emitted function, and `literal` what that is for a checked spec. `word`
    is that spec's part of the folder's name, and `words` are for people.
    """

    told: str
    literal: Callable[[Any], str]
    word: Callable[[Any], str]
    words: str


def dtype_of(argument: str) -> Varying:
    """The dtype of an argument, and of the spec: that of its input, where it has several.

    `_wanted` is in `_wanted.j2`, and `_DTYPES` are those of all variants.
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
"""The widths of a head: of queries and keys, and of values."""


@dataclass(frozen=True)
class Family:
    """Everything that kgen knows of a family.

    `model` reads its specs: it offers `expressions()` and `check()`, and the fields `kernel name summary license passes
    targets`. `explain` says in words what becomes of a spec. `verification` and `bench` may come after the first kernel
    that renders. `tune` times tiles, where the family has a table of them.
    """

    name: str
    model: Lazy
    explain: Lazy
    verification: Verification | None = None
    bench: Bench | None = None
    parts: Mapping[str, Verification] = field(default_factory=dict)
    tune: Lazy | None = None
    varies: Mapping[str, Varying] = field(default_factory=dict)
    """By field of the spec, which may have a list for it."""
    names_give_way: bool = False
    """Whether files take what users named as the kernels name theirs under other names (`called` of `Loaded`)."""
    adapters: Mapping[str, Lazy] = field(default_factory=dict)
    """By whom kernels are to be called: what makes an `Adapter` (`kgen.render.adapters`) of the variants of a spec."""

    promises: Lazy | None = None
    """Which buffers of a spec kernels would search if it promised that their rows ascend."""

    @property
    def targets(self) -> Mapping[str, Target]:
        """By name; those that run anywhere come first."""
        return targets_of(self.name)

    def verified_by(self, part: str | None) -> Verification | None:
        """How files of the whole kernel, or of a part of it, are verified."""
        return self.verification if part is None else self.parts[part]


def family(name: str) -> Family:
    """The family of a name, alone; its parts are not imported."""
    return cast("Family", import_module(f"kgen.kernels.{name}").FAMILY)


def families() -> Iterator[Family]:
    """All of them."""
    return map(family, NAMES)


@cache
def chips() -> tuple[Chip, ...]:
    """The chips that families have kernels of their own for."""
    found = (one.verification.chip for one in families() if one.verification is not None)
    return tuple(chip.get() for chip in found if chip is not None)


@cache
def targets_of(name: str) -> Mapping[str, Target]:
    """The targets of a family."""
    folders = _packages(KERNELS / name / "targets")
    found = {target: import_module(f"kgen.kernels.{name}.targets.{target}").TARGET for target in folders}
    return dict(sorted(found.items(), key=lambda item: (not item[1].runtime.on_cpu, item[0])))


def known_targets() -> tuple[str, ...]:
    """Every target that a family has."""
    return tuple(dict.fromkeys(target for one in families() for target in one.targets))


def known_adapters() -> tuple[str, ...]:
    """Every adapter that a family has."""
    return tuple(dict.fromkeys(kind for one in families() for kind in one.adapters))
