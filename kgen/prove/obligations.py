"""An obligation, and how it is decided: proved, refuted by a counterexample, or unknown for a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import z3

from kgen.prove.world import shown

MOST_CASES = 7
"""Conditions that a real number is split by."""


class Verdict(str, Enum):
    """What came of an obligation."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Obligation:
    """That `claim` follows from `facts`. `beyond` says which term has no encoding, in which case there is no claim.

    `equal` are two real numbers instead, which is shown by bringing their difference into a normal form first. `parts`
    are claims by the texts that they are of, instead.
    """

    kernel: str
    what: str
    claim: Any = None
    facts: Sequence[Any] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    equal: tuple[Any, Any] | None = None
    parts: Sequence[tuple[str, Any]] = ()
    beyond: str = ""


@dataclass(frozen=True)
class Decision:
    """`counterexample` has the values that refute it; `why` names what is beyond the proof, or what is refuted."""

    verdict: Verdict
    counterexample: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def message(self) -> str:
        """What there is to say of it."""
        numbers = ", ".join(f"{name} = {value}" for name, value in self.counterexample.items())
        return f"{self.why}: {numbers}" if self.why and numbers else self.why or numbers


def decide(obligation: Obligation, timeout: float) -> Decision:
    """Decide an obligation within so many seconds."""
    if obligation.beyond:
        return Decision(Verdict.UNKNOWN, why=f"beyond the encoding: {obligation.beyond}")
    claim = obligation.claim
    if obligation.equal is not None:
        if _equal(*obligation.equal, obligation.facts):
            return Decision(Verdict.PROVED)
        claim = obligation.equal[0] == obligation.equal[1]
    if claim is None:
        claim = z3.And([part for _, part in obligation.parts])
    solver = z3.Solver()
    solver.set("timeout", max(1, int(1000 * timeout)))
    solver.add(*obligation.facts, z3.Not(claim))
    found = solver.check()
    if found == z3.unsat:
        return Decision(Verdict.PROVED)
    if found == z3.sat:
        return _refuted(solver.model(), obligation)
    return Decision(
        Verdict.UNKNOWN, why=f"z3 gave up ({solver.reason_unknown()}): {shown(z3.simplify(claim))[:300]}"
    )


def _refuted(model: Any, obligation: Obligation) -> Decision:
    """The numbers of a counterexample; of several parts the one that does not hold, and what it is about."""
    wrong = (part for part in obligation.parts if z3.is_false(model.eval(part[1], model_completion=True)))
    if (first := next(wrong, None)) is None:
        return Decision(Verdict.REFUTED, _values(model, obligation.values))
    text, claim = first
    known = _constants([*obligation.facts, claim])
    values = {name: term for name, term in obligation.values.items() if _constants([term]) <= known}
    return Decision(Verdict.REFUTED, _values(model, values), text)


def _constants(terms: Sequence[Any]) -> set[str]:
    """The names of the unknowns in terms."""
    seen: dict[int, Any] = {}
    waiting = list(terms)
    while waiting:
        part = waiting.pop()
        if part.get_id() not in seen:
            seen[part.get_id()] = part
            waiting += part.children()
    return {
        str(part)
        for part in seen.values()
        if z3.is_const(part) and part.decl().kind() == z3.Z3_OP_UNINTERPRETED
    }


def _values(model: Any, terms: Mapping[str, Any]) -> dict[str, str]:
    found = {name: model.eval(term) for name, term in terms.items()}
    return {
        name: shown(v)
        for name, v in found.items()
        if z3.is_int_value(v) or z3.is_rational_value(v) or z3.is_true(v) or z3.is_false(v)
    }


def _equal(a: Any, b: Any, facts: Sequence[Any]) -> bool:
    """Whether two reals are the same polynomial, in each case of the conditions in them."""
    conditions = list(dict.fromkeys(_conditions(a - b)))
    if len(conditions) > MOST_CASES:
        return False
    return all(_vanishes(z3.substitute(a - b, *case), facts) for case in _cases(conditions, facts))


def _vanishes(difference: Any, facts: Sequence[Any]) -> bool:
    for _ in range(2):  # what is simplified may let functions of equal arguments meet
        difference = z3.simplify(difference, som=True)
    return bool(z3.is_rational_value(difference) and difference.as_fraction() == 0)


def _cases(conditions: list[Any], facts: Sequence[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Every choice of truth values that the facts allow."""

    def choose(left: list[Any], chosen: list[tuple[Any, bool]]) -> Iterator[list[tuple[Any, Any]]]:
        solver = z3.Solver()
        solver.set("timeout", 500)
        solver.add(*facts, *(c if true else z3.Not(c) for c, true in chosen))
        if solver.check() == z3.unsat:
            return
        if not left:
            yield [(c, z3.BoolVal(true)) for c, true in chosen]
            return
        for true in (True, False):
            yield from choose(left[1:], [*chosen, (left[0], true)])

    return choose(conditions, [])


def _conditions(term: Any) -> Iterator[Any]:
    """What choices between numbers depend on."""
    seen: set[int] = set()
    waiting = [term]
    while waiting:
        part = waiting.pop()
        if part.get_id() in seen:
            continue
        seen.add(part.get_id())
        if z3.is_app_of(part, z3.Z3_OP_ITE) and not z3.is_bool(part):
            yield part.arg(0)
        waiting += part.children()
