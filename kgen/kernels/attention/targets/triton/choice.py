"""The choice of kernels: the branches of the forward pass, and the function that names the kernels
of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.targets.triton.made import Answer, Branch, Choice, Made, Planned
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
    """The branches of a file, each with the module that has its function; `layouts` makes those of
    a call's tensors.
    """
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
    """The function that returns the kernels of a call."""

    template: ClassVar[str] = "attention/triton/_which_kernels.j2"

    name: str
    asked: list[str]
    """The tensors on which it depends."""
    words: list[str]
    """The answers, and the kernels that they stand for."""
    lines: list[Template]
    """The lines that find answers."""
    passes: list[tuple[str, str]]


def which_kernels(planned: Planned, made: Sequence[Made]) -> WhichKernels:
    """Build the function that returns the kernels of a call, by the tensors that it depends on."""
    choices = [of.choice for of in made if of.choice.words]
    names = ["forward", *(["backward"] if planned.plan.backward else [])]
    answers = {name: _answer(name, choices) for name in names}
    given = {kind for answer in answers.values() for kind in answer.given}
    shown = [
        choice
        for choice in sorted(choices, key=lambda choice: bool(choice.few))
        if choice.kind in given
    ]
    ends = [";"] * (len(shown) - 1) + ["."]
    return WhichKernels(
        name=planned.plan.spec.name,
        asked=["q", "k", "v", *(name for choice in choices for name in choice.streamed)],
        words=[choice.words + end for choice, end in zip(shown, ends, strict=True)],
        lines=[line for choice in choices for line in choice.lines],
        passes=[(name, answer.text) for name, answer in answers.items()],
    )


def _answer(name: str, choices: Sequence[Choice]) -> Answer:
    """The answer for a pass: that of the first schedule whose kernels it takes."""
    found = Answer('"portable"', ("portable",))
    for choice in reversed(choices):
        found = choice.passes.get(name, found)
        if name != "forward" or not choice.few:
            continue
        if not choice.takes_rest:
            text = f"{choice.own} if {choice.few} else {found.text}"
            found = Answer(text, (choice.kind, *found.given), by_call=True)
        elif found.by_call:
            text = f"{choice.own} if {choice.few} or why else {found.text}"
            found = Answer(text, (choice.kind, *_of_chips(found)), by_call=True)
        else:
            found = Answer(choice.own, (choice.kind,))
    return found


def _of_chips(answer: Answer) -> list[str]:
    """The kinds of kernels that an answer may name, but for portable ones."""
    return [kind for kind in answer.given if kind != "portable"]
