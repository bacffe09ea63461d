"""The kernels that calls take: the branches of the forward pass, and the function that answers for a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.targets.triton.made import Answer, Branch, Made, Planned
from kgen.targets.template import Template


@dataclass(frozen=True)
class Way:
    """A branch of the forward pass."""

    when: str
    function: str
    layouts: list[str]
    """The argument for the layouts of tensors; none where the function makes them."""


@dataclass(frozen=True)
class Ways:
    """The branches of the forward pass, in the order in which calls look for one."""

    first: list[Way]
    """The branches that need no layouts."""
    laid_out: list[Way]
    """The branches behind the layouts of the tensors."""
    last: Way | None
    """The branch for all other calls; None where the launcher spells it out."""


def ways_of(branches: Sequence[tuple[Branch, str]], layouts: str) -> Ways:
    """The branches of a file, each with the module that has its function; `layouts` makes those of a call's tensors."""
    rest = next((branch for branch, _ in branches if branch.takes_rest), None)
    first, laid_out, last = [], [], None
    for branch, prefix in branches:
        function = f"{prefix}{branch.function}"
        if branch is rest:
            last = Way("", function, [layouts] if branch.laid_out else [])
        elif rest is not None:
            when = f"{rest.leaves} and {branch.when}" if rest.leaves else branch.when
            first.append(Way(when, function, [layouts] if branch.laid_out else []))
        elif branch.laid_out:
            laid_out.append(Way(branch.when, function, ["layouts"]))
        else:
            first.append(Way(branch.when, function, []))
    return Ways(first, laid_out, last)


@dataclass(frozen=True)
class WhichKernels(Template):
    """The function that says which kernels a call takes."""

    template: ClassVar[str] = "attention/triton/_which_kernels.j2"

    name: str
    asked: list[str]
    """The tensors on which it depends."""
    words: list[str]
    """The answers, and when they are given."""
    lines: list[Template]
    """The lines that find answers."""
    passes: list[tuple[str, str]]


def which_kernels(planned: Planned, made: Sequence[Made]) -> WhichKernels:
    """The function that says which kernels a call takes, by the tensors that it depends on."""
    choices = [of.choice for of in made if of.choice.words]
    passes = ["forward", *(["backward"] if planned.plan.backward else [])]
    return WhichKernels(
        name=planned.plan.spec.name,
        asked=["q", "k", "v", *(name for choice in choices for name in choice.streamed)],
        words=[choice.words for choice in sorted(choices, key=lambda choice: bool(choice.few))],
        lines=[line for choice in choices for line in choice.lines],
        passes=[(name, _answer(name, made).text) for name in passes],
    )


def _answer(name: str, made: Sequence[Made]) -> Answer:
    """The answer for a pass: that of the first schedule whose kernels it takes."""
    found = Answer('"portable"')
    for of in reversed(made):
        choice = of.choice
        found = choice.passes.get(name, found)
        if name != "forward" or not choice.few:
            continue
        if not choice.takes_rest:
            found = Answer(f"{choice.own} if {choice.few} else {found.text}", by_call=True)
        elif found.by_call:
            found = Answer(f"{choice.own} if {choice.few} or why else {found.text}", by_call=True)
        else:
            found = Answer(choice.own)
    return found
