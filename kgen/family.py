"""Kernel families, what `kernel:` of a spec says: what each brings to every stage, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

NAMES = ("attention", "chunk_output", "norm")
"""Each is a package in `kgen/kernels`, with the `Family` that it is as `FAMILY`."""


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
class Verification:
    """What it takes to verify files. `kgen.verify.families` says what the two offer.

    `problem` makes of a spec what worker processes need to know, without torch; `cases` is a module.
    """

    problem: Lazy
    cases: Lazy


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
class Target:
    """`sources` makes of a spec the files that a target emits for it (`kgen.targets.Source`).

    Where they do one part of the kernel alone, `part` says which, and how that is verified is in `Family.parts`.
    """

    sources: Lazy
    part: str | None = None


@dataclass(frozen=True)
class Family:
    """Everything that kgen knows of a family.

    `model` reads its specs: it offers `expressions()` and `check()`, and the fields `kernel name summary license passes
    targets`. `explain` says in words what becomes of a spec. `tune` times tiles, where the family has a table of them.
    """

    name: str
    model: Lazy
    targets: Mapping[str, Target]
    explain: Lazy
    verification: Verification
    bench: Bench
    parts: Mapping[str, Verification] = field(default_factory=dict)
    tune: Lazy | None = None

    def verified_by(self, part: str | None) -> Verification:
        """How files of the whole kernel, or of a part of it, are verified."""
        return self.verification if part is None else self.parts[part]


def family(name: str) -> Family:
    """The family of a name, alone; its parts are not imported."""
    return cast("Family", import_module(f"kgen.kernels.{name}").FAMILY)


def families() -> Iterator[Family]:
    """All of them."""
    return map(family, NAMES)


def known_targets() -> tuple[str, ...]:
    """Every target that a family has."""
    return tuple(dict.fromkeys(target for one in families() for target in one.targets))
