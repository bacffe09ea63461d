"""Checks that the launchers of all targets share: numbers, and derivatives that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kgen.expr.nodes import (
    Call,
    Const,
    Node,
    Var,
    distinct,
    length_of,
    measured,
    substitute,
    variables,
)
from kgen.expr.unparse import show

if TYPE_CHECKING:
    from kgen.spec.common import ParamSpec

NO_BACKWARD = "but there is no backward pass:"
IN_ANOTHER_FILE = "but this file has no backward pass: use triton.py, or"
NOT_ASKED_FOR = "but the spec has no backward pass: add `backward` to its `passes`, or"
NOT_LEARNED = "but the spec gives it no gradient: set `grad: true` in the spec, or"
NO_DERIVATIVE = "but there is no derivative with respect to it:"


@dataclass(frozen=True)
class Refused:
    """Tensors that get no gradient for one reason."""

    given: str
    """The tensors as keyword arguments of the check."""
    words: str
    """The reason."""


@dataclass(frozen=True)
class Derivatives:
    """The derivatives of a function, for `_operators.j2` and `_derivatives.j2`."""

    tensors: str
    """The floating-point tensors, separated by commas."""
    refused: tuple[Refused, ...]
    derived: bool
    """True if a tensor gets a gradient."""
    words: str
    """The sentence of the docstring on derivatives, after the other errors."""
    transformed: bool
    """True if the file checks for active transforms of torch.func."""

    def launch_functions(self) -> Iterator[str]:
        """Yield the names of `_launch.py` that `_derivatives.j2` uses."""
        yield "_no_tangents"
        if self.refused:
            yield "_no_gradients"


@dataclass(frozen=True)
class Numbers:
    """The numbers among the arguments of a function, for `_operators.j2`."""

    there: bool = False
    integers: bool = False
    """True if one of the numbers is an integer."""
    lines: tuple[str, ...] = ()
    """The checks of run-time parameters."""

    def launch_functions(self) -> Iterator[str]:
        """Yield the names of `_launch.py` by which a function checks its numbers."""
        if self.there:
            yield "_real"
        if self.integers:
            yield "_integer"


NO_NUMBERS = Numbers()
"""The numbers of a function that takes only tensors."""


def derivatives_of(
    tensors: Iterable[str],
    refused: Mapping[str, str],
    *,
    derived: bool,
    called: Mapping[str, str] = {},
) -> Derivatives:
    """Return the derivatives of a function.

    `tensors` are the floating-point tensors. `refused` maps each tensor without a gradient to the
    reason, the words before "pass x.detach()" in the message. `derived` is True if any tensor gets
    a gradient. `called` maps names in kernels to the names of arguments, where they differ.
    """
    groups: dict[str, list[str]] = {}
    for name, words in refused.items():
        groups.setdefault(words, []).append(f"{called.get(name, name)}={name}")
    reasons = tuple(Refused(", ".join(given), words) for words, given in groups.items())
    words, transformed = _words(groups, derived), bool(groups) or derived
    return Derivatives(", ".join(tensors), reasons, derived, words, transformed)


def cast_lines(dtypes: Mapping[str, str]) -> list[str]:
    """Return the lines that cast each floating-point tensor to its dtype under autocast."""
    groups: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        groups.setdefault(dtype, []).append(name)
    return [_cast_line(names, dtype) for dtype, names in groups.items()]


def _cast_line(names: Sequence[str], dtype: str) -> str:
    listed = ", ".join(names)
    return f"{listed}{',' if len(names) == 1 else ''} = _cast({dtype}, {listed})"


def numbers_of(
    name: str,
    params: Mapping[str, ParamSpec],
    called: Mapping[str, str] = {},
    names: Iterable[str] = (),
    divisors: Iterable[str] = (),
) -> Numbers:
    """Return the numbers of a function with `scale` or `eps`, and the lines that check run-time
    parameters.
    """
    lines = (*number_lines(name, params, called, names), *divisors)
    return Numbers(True, any(p.type == "int" for p in params.values()), lines)


def number_lines(
    name: str,
    params: Mapping[str, ParamSpec],
    called: Mapping[str, str] = {},
    names: Iterable[str] = (),
) -> list[str]:
    """Return the checks of run-time parameters.

    Lines before them assign arguments whose name differs (`called`) to the names in this file.
    """
    kinds = {"float": "_real", "int": "_integer"}
    taken = [f"{n} = {called[n]}" for n in names if n in called and n not in params]
    given = {n: called.get(n, n) for n in params}
    return taken + [
        f'{n} = {kinds[p.type]}("{name}", "{given[n]}", {given[n]})' for n, p in params.items()
    ]


DIVISIONS = ("div", "floordiv", "mod")
"""Functions whose second argument is a divisor."""
_IN_PYTHON = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "neg": "(-{0})",
    "float": "float({0})",
}


def divisor_lines(
    name: str, trees: Iterable[Node | None], params: Iterable[str], called: Mapping[str, str] = {}
) -> list[str]:
    """Return checks that no divisor made of run-time parameters and numbers is zero."""
    known = {param: param for param in params}
    return [
        f'if {spelled} == 0:\n    raise ValueError("{name}: {message}")'
        for _, spelled, message in divisors(trees, known, called)
    ]


def divisors(
    trees: Iterable[Node | None], known: Mapping[str, str], called: Mapping[str, str]
) -> Iterator[tuple[Node, str, str]]:
    """Yield each divisor made of `known` names and numbers, the same in Python, and the message if
    it is zero.

    `known` maps names to their spelling.
    """
    found = {
        node.args[1]: None
        for tree in trees
        if tree is not None
        for node in distinct(tree)
        if isinstance(node, Call)
        and node.fn in DIVISIONS
        and variables(node.args[1]) & known.keys()
    }
    for divisor in found:
        if (spelled := _in_python(divisor, known)) is not None:
            words = show(substitute(divisor, {v: _said(v, called) for v in _variables(divisor)}))
            yield divisor, spelled, f"{words} is a divisor in the spec and must not be 0"


def _variables(node: Node) -> list[Var]:
    return [one for one in distinct(node) if isinstance(one, Var)]


def _said(var: Var, called: Mapping[str, str]) -> Var:
    """Return a variable with the name that callers use."""
    if length := measured(var.name):
        return length_of(called.get(length[0], length[0]), length[1])
    return Var(called.get(var.name, var.name), var.type)


def _in_python(node: Node, known: Mapping[str, str]) -> str | None:
    """Return the node in Python, or None if it contains more than `known` names and numbers."""
    if isinstance(node, Const):
        return repr(node.value)
    if isinstance(node, Var):
        return known.get(node.name)
    if not isinstance(node, Call) or node.fn not in _IN_PYTHON:
        return None
    operands = [_in_python(one, known) for one in node.args]
    return None if None in operands else _IN_PYTHON[node.fn].format(*operands)


def dense(name: str, tensors: Iterable[str]) -> str:
    """Return the check that no tensor is sparse or nested; empty without tensors."""
    names = list(tensors)
    return f'_dense("{name}", "{" ".join(names)}", {", ".join(names)})' if names else ""


def _words(refused: Iterable[str], derived: bool) -> str:
    """Return the sentence of a docstring on errors of derivatives."""
    if not derived:
        return "Raises RuntimeError if a gradient is required: there is no backward pass."
    without = ", or if a tensor without a gradient requires grad" if refused else ""
    return f"Raises RuntimeError for second-order and forward-mode derivatives{without}."
