"""What the launchers of all targets check alike: numbers, and derivatives that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kgen.spec.common import ParamSpec

NO_BACKWARD = "but there is no backward pass:"
IN_ANOTHER_FILE = "but this file has no backward pass: take triton.py, or"
NOT_ASKED_FOR = "but the spec has no backward pass: add `backward` to its `passes`, or"
NOT_LEARNED = "but the spec gives it no gradient: write `grad: true` there, or"
NO_DERIVATIVE = "but there is no derivative with respect to it:"


def derivative_fields(
    tensors: Iterable[str], refused: Mapping[str, str], *, derived: bool, called: Mapping[str, str] = {}
) -> dict[str, object]:
    """What `_operators.j2` and `_derivatives.j2` use.

    `tensors` are the floating-point ones. Those that get no gradient are `refused`, each for its reason, which goes
    before "pass x.detach()"; `derived` says whether any gets one, `called` what callers say for a
    name, if it is another.
    """
    groups: dict[str, list[str]] = {}
    for name, words in refused.items():
        groups.setdefault(words, []).append(f"{called.get(name, name)}={name}")
    return {
        "real_tensors": ", ".join(tensors),
        "underived": [{"given": ", ".join(given), "words": words} for words, given in groups.items()],
        "derived": derived,
        "derivative_words": _words(groups, derived),
    }


def cast_lines(dtypes: Mapping[str, str]) -> list[str]:
    """The lines that cast arguments under autocast: each floating-point tensor to its dtype of torch."""
    groups: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        groups.setdefault(dtype, []).append(name)
    return [_cast_line(names, dtype) for dtype, names in groups.items()]


def _cast_line(names: Sequence[str], dtype: str) -> str:
    if len(names) == 1:
        return f"{names[0]} = _cast({names[0]}, {dtype})"
    listed = ", ".join(names)
    return f"{listed} = (_cast(x, {dtype}) for x in ({listed}))"


def number_fields(
    params: Mapping[str, ParamSpec], called: Mapping[str, str] = {}, names: Iterable[str] = ()
) -> dict[str, object]:
    """What `_operators.j2` uses for `scale` or `eps` and run-time parameters, and the lines that check the latter."""
    return {
        "numbers": {
            "there": True,
            "integers": any(p.type == "int" for p in params.values()),
            "lines": number_lines(params, called, names),
        }
    }


def number_lines(
    params: Mapping[str, ParamSpec], called: Mapping[str, str] = {}, names: Iterable[str] = ()
) -> list[str]:
    """The checks of run-time parameters, after lines that take what is `called` otherwise under its name here."""
    kinds = {"float": "_real", "int": "_integer"}
    taken = [f"{n} = {called[n]}" for n in names if n in called and n not in params]
    given = {n: called.get(n, n) for n in params}
    return taken + [f'{n} = {kinds[p.type]}("{given[n]}", {given[n]})' for n, p in params.items()]


NO_NUMBERS = {"numbers": {"there": False, "integers": False, "lines": []}}
"""Of a launcher that takes tensors alone."""


def _words(refused: Iterable[str], derived: bool) -> str:
    """What a docstring says of derivatives, after the other errors."""
    if not derived:
        return "and RuntimeError where a gradient is asked for: there is only the forward pass."
    without = ", or if another tensor than those with a gradient requires grad" if refused else ""
    return f"and RuntimeError for derivatives of second order and in forward mode{without}."
