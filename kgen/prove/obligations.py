"""Obligations and their decision: proved, refuted by a counterexample, or unknown for a reason."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import z3

from kgen.prove.evaluating import apart, refutes
from kgen.prove.world import Place, shown

NOT_ONE = "the counterexample of z3 does not hold with the real functions"

MOST_CONDITIONS = 16
"""Maximum number of conditions by which a real term is split into cases."""
MOST_CASES = 64
"""Maximum number of these cases."""
CASE_SECONDS = 0.5
RECIPROCAL = z3.Function("reciprocal", z3.RealSort(), z3.RealSort())
ROUNDED = 1e-12
"""Relative size of terms that count as zero, because literals are rounded."""


class Verdict(str, Enum):
    """The result of deciding an obligation."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Obligation:
    """The statement that `claim` follows from `facts`.

    `equal` or `parts` can replace the claim: two real numbers, or several claims, each with its
    code as text. If a term has no encoding, `beyond` names it, and there is no claim. `linear`:
    z3 first takes products of unknowns as unknowns, which suffices for most claims.
    """

    kernel: str
    what: str
    claim: Any = None
    facts: Sequence[Any] = ()
    values: Mapping[str | Place, Any] = field(default_factory=dict)
    equal: tuple[Any, Any] | None = None
    parts: Sequence[tuple[str, Any]] = ()
    beyond: str = ""
    linear: bool = False


@dataclass(frozen=True)
class Decision:
    """A verdict.

    `counterexample` has the values of a refutation, and `why` the reason or the refuted part.
    """

    verdict: Verdict
    counterexample: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def message(self) -> str:
        """The reason and the counterexample as text."""
        numbers = ", ".join(f"{name} = {value}" for name, value in self.counterexample.items())
        return f"{self.why}: {numbers}" if self.why and numbers else self.why or numbers


_PROVED: dict[int, Any] = {}
"""Proved claims that need no facts, by id, so they hold for every spec. Stored terms keep their
ids.
"""


def decide(obligation: Obligation, timeout: float) -> Decision:
    """Decide an obligation within `timeout` seconds."""
    if obligation.beyond:
        return Decision(Verdict.UNKNOWN, why=f"beyond the encoding: {obligation.beyond}")
    if obligation.equal is not None:
        return _of_reals(obligation, timeout)
    claim = obligation.claim
    if claim is None:
        claim = z3.And([part for _, part in obligation.parts])
    if claim.get_id() in _PROVED:
        return Decision(Verdict.PROVED)
    if obligation.linear and _without_products(timeout, *obligation.facts, z3.Not(claim)):
        return Decision(Verdict.PROVED)
    solver = _solver(timeout, *obligation.facts, z3.Not(claim))
    found = solver.check()
    if found == z3.unsat:
        if not obligation.facts:
            _PROVED[claim.get_id()] = claim
        return Decision(Verdict.PROVED)
    if found == z3.unknown:
        return _given_up(solver, claim)
    if refutes(solver.model(), obligation.facts, claim):
        return _refuted(solver.model(), obligation)
    return Decision(Verdict.UNKNOWN, why=f"{NOT_ONE}: {shown(claim)[:300]}")


def _solver(timeout: float, *claims: Any) -> Any:
    solver = z3.SimpleSolver()
    solver.set("timeout", max(1, int(1000 * timeout)))
    solver.add(*claims)
    return solver


def _without_products(timeout: float, *claims: Any) -> bool:
    """True if claims contradict each other even if products of unknowns are unknowns."""
    solver = _solver(timeout, *(z3.simplify(claim, som=True) for claim in claims))
    solver.set("arith.nl", False)
    return bool(solver.check() == z3.unsat)


def _given_up(solver: Any, claim: Any) -> Decision:
    why = f"z3 gave up ({solver.reason_unknown()}): {shown(claim)[:300]}"
    return Decision(Verdict.UNKNOWN, why=why)


def _of_reals(obligation: Obligation, timeout: float) -> Decision:
    """Decide if two reals are equal: compare polynomials case by case, then let z3 search for a
    difference.
    """
    assert obligation.equal is not None
    a, b = obligation.equal
    begun = time.monotonic()
    if any(_equal(*pair, obligation.facts, begun + timeout) for pair in _spelled(a, b)):
        return Decision(Verdict.PROVED)
    divisors = [part.arg(1) != 0 for part in _parts(a - b) if _is_quotient(part)]
    solver = _solver(timeout - (time.monotonic() - begun), *obligation.facts, *divisors, a != b)
    found = solver.check()
    if found == z3.unsat:
        return Decision(Verdict.PROVED)
    if found == z3.unknown:
        return _given_up(solver, a == b)
    if apart(solver.model(), obligation.facts, a, b):
        return _refuted(solver.model(), obligation)
    return Decision(Verdict.UNKNOWN, why=f"{NOT_ONE}: {shown(a == b)[:300]}")


def _refuted(model: Any, obligation: Obligation) -> Decision:
    """Return the counterexample, and for several parts the first one that fails."""
    wrong = (
        part for part in obligation.parts if z3.is_false(model.eval(part[1], model_completion=True))
    )
    if (first := next(wrong, None)) is None:
        return Decision(Verdict.REFUTED, _values(model, obligation.values))
    text, claim = first
    known = _constants([*obligation.facts, claim])
    values = {name: term for name, term in obligation.values.items() if _constants([term]) <= known}
    return Decision(Verdict.REFUTED, _values(model, values), text)


def _constants(terms: Sequence[Any]) -> set[str]:
    """Return the names of the unknowns in terms."""
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


def _values(model: Any, terms: Mapping[str | Place, Any]) -> dict[str, str]:
    found = {name: model.eval(term) for name, term in terms.items()}
    return {
        str(name): shown(v)
        for name, v in found.items()
        if z3.is_int_value(v) or z3.is_rational_value(v) or z3.is_true(v) or z3.is_false(v)
    }


def _equal(a: Any, b: Any, facts: Sequence[Any], until: float) -> bool:
    """True if two reals are the same polynomial in each case of their conditions.

    False if time is up.
    """
    if _is_zero(z3.simplify(a - b, som=True)):  # often the conditions do not matter
        return True
    conditions = list(dict.fromkeys(_conditions(a - b)))
    if len(conditions) > MOST_CONDITIONS:
        return False
    cases = islice(_cases(conditions, facts), MOST_CASES + 1)
    return all(
        number <= MOST_CASES
        and time.monotonic() < until
        and _vanishes(z3.substitute(a, *case), z3.substitute(b, *case))
        for number, case in enumerate(cases, 1)
    )


def _spelled(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Yield two reals unchanged, then with quotients replaced by products with reciprocals.

    z3 leaves x / 0 undefined, so `(a * b) / x` and `a * (b / x)` may differ there. A score divided
    by zero is undefined, so one reciprocal can stand for both.
    """
    yield a, b
    if quotients := [part for part in _parts(a - b) if _is_quotient(part)]:
        found: list[tuple[Any, Any]] = []
        for quotient in reversed(quotients):  # the inner ones first
            above, below = (z3.substitute(part, *found) for part in quotient.children())
            found.append((quotient, above * RECIPROCAL(below)))
        yield z3.substitute(a, *found), z3.substitute(b, *found)


def _is_quotient(term: Any) -> bool:
    return bool(z3.is_app_of(term, z3.Z3_OP_DIV)) and not z3.is_rational_value(term.arg(1))


def _vanishes(a: Any, b: Any) -> bool:
    """True if all terms of a difference are within the rounding of literals."""
    difference = a - b
    # the first pass may make arguments of functions equal, whose values then cancel
    for _ in range(2):
        difference = z3.simplify(difference, som=True)
    if _is_zero(difference):
        return True
    least = ROUNDED * max(map(_factor, _summands(z3.simplify(a, som=True))))
    return all(_factor(part) <= least for part in _summands(difference))


def _is_zero(term: Any) -> bool:
    return bool(z3.is_rational_value(term) and term.as_fraction() == 0)


def _summands(term: Any) -> list[Any]:
    return list(term.children()) if z3.is_add(term) else [term]


def _factor(product: Any) -> float:
    """Return the magnitude of the leading number of a product."""
    first = product.arg(0) if z3.is_mul(product) else product
    return abs(float(first.as_fraction())) if z3.is_rational_value(first) else 1.0


def _cases(conditions: list[Any], facts: Sequence[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield all truth values of the conditions that the facts allow."""
    solver = _solver(CASE_SECONDS, *facts)

    def choose(left: list[Any], chosen: list[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
        if not left:
            yield chosen
            return
        for true in (True, False):
            solver.push()
            solver.add(left[0] if true else z3.Not(left[0]))
            if solver.check() != z3.unsat:
                yield from choose(left[1:], [*chosen, (left[0], z3.BoolVal(true))])
            solver.pop()

    return choose(conditions, [])


def _conditions(term: Any) -> Iterator[Any]:
    """Yield the conditions of choices between numbers."""
    for part in _parts(term):
        if z3.is_app_of(part, z3.Z3_OP_ITE) and not z3.is_bool(part):
            yield part.arg(0)


def _parts(term: Any) -> Iterator[Any]:
    """Yield a term and all of its parts, once each, and each part before its own parts."""
    above: dict[int, int] = {}
    known = [term]
    seen = {term.get_id()}
    for part in known:
        for child in part.children():
            above[child.get_id()] = above.get(child.get_id(), 0) + 1
            if child.get_id() not in seen:
                seen.add(child.get_id())
                known.append(child)
    ready = [term]
    while ready:
        part = ready.pop()
        yield part
        for child in part.children():
            above[child.get_id()] -= 1
            if not above[child.get_id()]:
                ready.append(child)
