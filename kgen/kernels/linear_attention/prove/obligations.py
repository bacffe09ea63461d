"""The obligations of a spec of linear attention: of each kernel that its launcher launches, for
each tile shape.

The text of the emitted file is run on z3 terms (`kgen.prove.running`): first the launcher, then the
kernels with the arguments of their launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, groupby
from typing import Any

import z3

from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.prove.claims import (
    ADDED,
    EACH,
    INSIDE,
    INT32,
    OF_TOKENS,
    OWNER,
    PARTS,
    POWERS,
    SUMS,
    TWICE,
)
from kgen.kernels.linear_attention.prove.exact import exact
from kgen.kernels.linear_attention.prove.packed import SEQUENCE, Packed
from kgen.kernels.linear_attention.prove.setting import TRACKED, Calls, Run, calls, functions, runs
from kgen.prove.covering import apart, applied, reached
from kgen.prove.functions import Beyond
from kgen.prove.lanes import constants, of_lanes
from kgen.prove.launching import same_shape, terms
from kgen.prove.obligations import Obligation
from kgen.prove.records import Access
from kgen.prove.world import Place
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded
from kgen.spec.names import named_apart

NO_TOKENS = frozenset({"dstates"})
"""Buffers of slots that backward fills only for chunks with tokens."""
Parts = Sequence[tuple[str, Any]]


def obligations(loaded: Loaded) -> Iterator[Obligation]:
    """Yield the obligations of the emitted file of a spec."""
    yield from of_text(loaded, rendered(loaded))
    yield from exact(loaded, rendered)


def of_pairs(loaded: Loaded) -> Iterator[Obligation]:
    """Yield the obligations to decide before a file is written: addresses and powers, for the tiles
    of chips without a row of their own.
    """
    return of_text(loaded, rendered(loaded), whole=False)


def rendered(loaded: Loaded) -> str:
    """Return the text of the emitted file of a spec."""
    return render_spec(loaded, ["triton"])["triton.py"]


def of_text(
    loaded: Loaded, text: str, *, whole: bool = True, only: str = ""
) -> Iterator[Obligation]:
    """Yield the obligations of the text of a file.

    `whole`: all of them, for all chips. `only`: those of the kernel of this name.
    """
    plan = plan_linear_attention(named_apart(loaded))
    try:
        of = calls(plan.spec, text, plan.learned, None if whole else (0,))
        ran = [*runs(of, functions(plan))]
    except Beyond as beyond:
        yield Obligation("launcher", INSIDE, beyond=str(beyond))
        return
    packed = None
    if plan.spec.varlen:
        packed = Packed(of.sizes, plan.spec.chunk_size, z3.Int("NT"))
        yield _owners(packed, of)
    yield from _gradients(of)
    kernels = [_Kernel(run, packed) for run in ran]
    for kernel in kernels:
        if only not in ("", kernel.run.name.split(" ")[0]):
            continue
        yield from kernel.before_written()
        if whole:
            yield from kernel.rest(kernels)


def _stated(
    kernel: str, what: str, parts: Parts, facts: Sequence[Any], beyond: str = ""
) -> Obligation:
    """Return an obligation whose counterexample shows all unknowns."""
    claims = [claim for _, claim in parts]
    known = [*facts, *of_lanes([*facts, *claims])]
    values: dict[str | Place, Any] = {
        name: term for name, term in constants([*known, *claims]).items() if "?" not in name
    }
    return Obligation(
        kernel, what, facts=known, values=values, parts=parts, beyond=beyond, linear=True
    )


class _Kernel:
    """The obligations of one kernel."""

    def __init__(self, run: Run, packed: Packed | None) -> None:
        self.run, self.kernel, self.packed = run, run.kernel, packed
        self.facts = run.kernel.facts

    def before_written(self) -> Iterator[Obligation]:
        """Yield the obligations to decide before a file is written."""
        inside = [
            (f"line {one.line}: {one.text}", z3.Implies(one.when, one.inside))
            for one in self.kernel.accesses
        ]
        yield _stated(self.run.name, INSIDE, inside, self.facts)
        yield from self._powers()

    def rest(self, others: Sequence[_Kernel]) -> Iterator[Obligation]:
        """Yield all other obligations. `others` are all kernels of the file."""
        if self.kernel.computed:
            parts = [(one.text, z3.Implies(one.when, one.claim)) for one in self.kernel.computed]
            yield _stated(self.run.name, INT32, parts, self.facts)
        stores = [one for one in self.kernel.accesses if one.stores]
        stores.sort(key=lambda one: one.tensor.name)
        for name, some in groupby(stores, key=lambda one: one.tensor.name):
            yield from self._once(name, list(some), others)
        yield from self._parts()

    def _powers(self) -> Iterator[Obligation]:
        """Yield that exponents are at most 0 and that stored sums of decays do not rise."""
        powers = self.kernel.powers
        if powers:
            beyond = next((one.text for one in powers if one.claim is None), "")
            parts = [
                (one.text, z3.Implies(z3.And(one.when, *falling([one.claim])), one.claim <= 0))
                for one in powers
                if one.claim is not None
            ]
            yield _stated(self.run.name, POWERS, parts, self.facts, beyond)
        sums = [one for one in self.kernel.accesses if one.stores and one.tensor.name in TRACKED]
        if sums:
            parts = [
                (f"line {one.line}: {one.text}", z3.BoolVal(False) if steps is None else steps <= 0)
                for one in sums
                for steps in [getattr(one.value, "steps", None)]
            ]
            yield _stated(self.run.name, SUMS, parts, self.facts)

    def _valid(self, claims: Sequence[Any]) -> list[Any]:
        return [] if self.packed is None else self.packed.valid(claims)

    def _once(
        self, name: str, stores: Sequence[Access], others: Sequence[_Kernel]
    ) -> Iterator[Obligation]:
        """Yield that the stores of a tensor cover each of its elements once."""
        claims = list(apart(self.kernel, stores))
        parts = [(text, z3.Implies(z3.And(*some), claim)) for text, claim, some in claims]
        facts = self._valid([claim for _, claim in parts])
        yield _stated(self.run.name, TWICE.format(name), parts, facts)
        there = [(self, one) for one in stores]
        for other in others:
            if other.run.launch.kernel != self.run.launch.kernel:
                there += [(other, one) for one in other.stores(name, stores[0].tensor.shape)]
        yield self._each((OF_TOKENS if self._partly(name) else EACH).format(name), there)

    def _partly(self, name: str) -> bool:
        """True if a tensor has no elements for slots without tokens, which nothing uses."""
        return self.packed is not None and name in NO_TOKENS

    def stores(self, name: str, shape: Sequence[Any]) -> list[Access]:
        """Return the stores of a tensor of a shape."""
        return [
            one
            for one in self.kernel.accesses
            if one.stores and one.tensor.name == name and same_shape(one.tensor.shape, shape)
        ]

    def _each(self, what: str, accesses: Sequence[tuple[_Kernel, Access]]) -> Obligation:
        """Return that accesses of kernels have all indices of their tensor."""
        first = accesses[0][1]
        wanted = [z3.Int(f"index{n}") for n in range(len(first.sizes))]
        facts: list[Any] = []
        for x, size in zip(wanted, first.sizes, strict=True):
            facts += [x >= 0, x < size]
        ways = []
        for of, access in accesses:
            if len(access.sizes) != len(wanted):
                continue
            chosen, about = self.packed.chosen(access, wanted) if self.packed else ({}, [])
            if self.packed is not None and self._partly(access.tensor.name):
                about = [*about, *self.packed.has_tokens(wanted[0])]
            claim, more = reached(of.kernel, access, wanted, chosen)
            ways.append(claim)
            facts += [*about, *more]
        facts += self._sizes()
        facts += self._valid([*ways, *facts])
        return _stated(self.run.name, what, [(first.text, z3.Or(*ways))], facts)

    def _sizes(self) -> list[Any]:
        """Return the facts about sizes alone."""
        moving = {str(of.term) for of in self.kernel.digits.values()}
        return [f for f in self.facts if not moving & constants([f]).keys()]

    def _parts(self) -> Iterator[Obligation]:
        """Yield that a kernel which adds parts of gradients reads all of them."""
        if self.run.launch.kernel != "_gates_back_kernel":
            return
        for name in ("dG", "dbetas"):
            loads = [one for one in self.kernel.accesses if one.tensor.name == name]
            if loads:
                yield self._each(PARTS.format(name), [(self, one) for one in loads])


def falling(claims: Sequence[Any]) -> list[Any]:
    """Return that sums of decays are at most 0, and do not rise along the rows of a chunk."""
    found = []
    for name in TRACKED:
        elements = applied(claims, name)
        found += [element <= 0 for element in elements]
        for one, other in combinations(elements, 2):
            a, b = one.children(), other.children()
            row = 2
            same = [x == y for n, (x, y) in enumerate(zip(a, b, strict=True)) if n != row]
            for first, later, i, j in ((one, other, a, b), (other, one, b, a)):
                order = z3.And(*same, i[row] >= 0, i[row] <= j[row])
                found.append(z3.Implies(order, later <= first))
    return found


def _owners(packed: Packed, of: Calls) -> Obligation:
    """Return that slots of sequences are disjoint, and that tokens are in slots of their own."""
    token, N = z3.Int("token"), of.sizes.N
    slot, following = packed.slot(token), packed.first(SEQUENCE + 1)
    parts = [
        ("the first slot of a sequence is after the last one before", slot < following),
        ("slots are inside of the buffers", z3.And(slot >= 0, slot < packed.slots)),
        ("sequence 0 begins at slot 0", packed.first(z3.IntVal(0)) == 0),
        ("slots ascend", z3.Implies(SEQUENCE < N, packed.first(SEQUENCE) < following)),
    ]
    facts = [*of.facts, *packed.of_token(token)]
    facts += packed.valid([*facts, *(claim for _, claim in parts)])
    return _stated("all", OWNER, parts, facts)


def _gradients(of: Calls) -> Iterator[Obligation]:
    """Yield that the sums of parts of gradients have the shapes of the inputs."""
    parts = [
        (f"the gradient of {name}", z3.And(*(x == y for x, y in terms(got.shape, want.shape))))
        if len(got.shape) == len(want.shape)
        else (f"the gradient of {name}", z3.BoolVal(False))
        for name, got in of.gradients.items()
        for want in [of.inputs[name]]
    ]
    if parts:
        yield _stated("backward", ADDED, parts, of.facts)
