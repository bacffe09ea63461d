"""What verification and benchmarks need to know of a spec, as plain frozen data.

A `Problem` travels to worker processes by pickle, whatever the spec's own model is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.nodes import Call, Node, variables
from kgen.plan.attention import ties_lengths


@dataclass(frozen=True)
class Buffer:
    """A declared tensor. `shape` holds numbers and the names `B HQ HKV SQ SK`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    grad: bool = False
    sorted: bool = False


@dataclass(frozen=True)
class Param:
    """A scalar: a compile-time constant with a `value`, or one that the caller passes at run time."""

    name: str
    type: str
    value: int | float | None = None
    runtime: bool = False


@dataclass(frozen=True)
class Problem:
    """An attention spec: what is computed, with the trees as the user wrote them."""

    name: str
    dtype: str
    head_qk: int
    head_v: int
    gqa: int | str = 1
    precision: str | None = None
    q_multiple: int = 1
    kv_multiple: int = 1
    buffers: tuple[Buffer, ...] = ()
    params: tuple[Param, ...] = ()
    passes: tuple[str, ...] = ("forward", "backward")
    fast_math: bool = False
    score_mod: Node | None = None
    mask_mod: Node | None = None

    @property
    def runtime_params(self) -> tuple[Param, ...]:
        """The params that the emitted function takes by keyword."""
        return tuple(p for p in self.params if p.runtime)

    @property
    def trees(self) -> tuple[Node, ...]:
        """The modifications that there are."""
        return tuple(t for t in (self.score_mod, self.mask_mod) if t is not None)

    @property
    def tied_lengths(self) -> bool:
        """Whether the spec only makes sense for SQ == SK: the emitted launcher requires it."""
        return ties_lengths(self.trees, {b.name: b.shape for b in self.buffers})

    @property
    def key_conjuncts(self) -> tuple[Node, ...]:
        """The parts of the mask, joined by `and`, that depend on the key but not on the query."""
        if self.mask_mod is None:
            return ()
        names = [(part, variables(part)) for part in _conjuncts(self.mask_mod)]
        return tuple(part for part, used in names if "kv_idx" in used and "q_idx" not in used)


def _conjuncts(node: Node) -> Iterator[Node]:
    if isinstance(node, Call) and node.fn == "and":
        for arg in node.args:
            yield from _conjuncts(arg)
    else:
        yield node


def _multiple(length: Any) -> int:
    return int(getattr(length, "multiple_of", None) or 1)


def problem_of(loaded: Any) -> Problem:
    """The `Problem` of a `kgen.spec.load.Loaded`. Raises `KgenError` for a kernel that is not attention."""
    spec = loaded.spec
    kernel = getattr(spec, "kernel", "attention")
    if kernel != "attention":
        raise KgenError(
            Diagnostic(
                "verify-kernel", f"there is no reference for kernel `{kernel}` yet", file=str(loaded.path)
            )
        )
    return Problem(
        name=spec.name,
        dtype=spec.dtype,
        head_qk=int(spec.head_dim.qk),
        head_v=int(spec.head_dim.v),
        gqa=spec.gqa,
        precision=getattr(spec, "precision", None),
        q_multiple=_multiple(spec.lengths.q),
        kv_multiple=_multiple(spec.lengths.kv),
        buffers=tuple(
            Buffer(name, tuple(b.shape), b.dtype, bool(b.grad), bool(b.sorted))
            for name, b in spec.buffers.items()
        ),
        params=tuple(
            Param(name, p.type, None if p.runtime else p.value, bool(p.runtime))
            for name, p in spec.params.items()
        ),
        passes=tuple(spec.passes),
        fast_math=bool(getattr(spec, "fast_math", False)),
        score_mod=loaded.score_mod,
        mask_mod=loaded.mask_mod,
    )


def emitted_path(generated: Path, name: str) -> Path:
    """Where the Triton file of a spec is written."""
    return Path(generated) / name / "triton.py"


def require_emitted(generated: Path, loaded: Any) -> Path:
    """The emitted file of a spec. Raises `KgenError` where it was not rendered."""
    path = emitted_path(generated, loaded.spec.name)
    if not path.is_file():
        raise KgenError(
            Diagnostic(
                "not-rendered",
                f"`{path}` does not exist: spec `{loaded.spec.name}` is not rendered",
                file=str(loaded.path),
                hint=f"kgen render {loaded.path}",
            )
        )
    return path
