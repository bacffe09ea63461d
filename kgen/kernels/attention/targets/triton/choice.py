"""The choice of kernels: the branches of the forward pass, and the function that names the kernels
of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.targets.triton.launches import Launch
from kgen.kernels.attention.targets.triton.made import (
    Answer,
    BackwardBranch,
    Branch,
    Choice,
    Made,
    Planned,
    follower_of,
)
from kgen.targets.code import If, Run, Statement, text
from kgen.targets.template import Template


@dataclass(frozen=True)
class Way:
    """A branch of the forward pass."""

    when: str
    function: str
    layouts: list[str]
    """The argument for the layouts of tensors. Empty if the function computes them."""


@dataclass(frozen=True)
class Ways:
    """The branches of the forward pass, in the order in which the launcher tests them."""

    first: list[Way]
    """The branches that need no layouts."""
    laid_out: list[Way]
    """The branches that need the layouts of the tensors."""
    last: list[Way]
    """The branch for all other calls, if the launcher does not contain it."""

    def launch_functions(self) -> Iterable[str]:
        """Return the names of `_launch.py` that the branches use before the launcher has
        layouts.
        """
        ways = [*self.first, *self.last]
        return ("_layouts",) if any(way.layouts for way in ways) else ()


def ways_of(branches: Sequence[tuple[Branch, str]], layouts: str) -> Ways:
    """Return the branches of a file, each with the module of its function. `layouts` computes the
    layouts of a call's tensors.
    """
    rest = next((branch for branch, _ in branches if branch.takes_rest), None)
    first, laid_out, last = list[Way](), list[Way](), list[Way]()
    for branch, prefix in branches:
        function = f"{prefix}{branch.function}"
        if branch is rest:
            last.append(Way("", function, [layouts] if branch.laid_out else []))
        elif rest is not None:
            when = f"{rest.leaves} and {branch.when}" if rest.leaves else branch.when
            first.append(Way(when, function, [layouts] if branch.laid_out else []))
        elif branch.laid_out:
            laid_out.append(Way(branch.when, function, ["layouts"]))
        else:
            first.append(Way(branch.when, function, []))
    return Ways(first, laid_out, last)


@dataclass(frozen=True)
class BackwardWay:
    """A branch of the backward pass."""

    test: str
    """The keyword of its condition: `if` or `elif`."""
    variable: str
    before: list[Launch]
    """The portable launches before its call."""
    call: str
    ends: str
    """The function that writes dq from sums that several calls share. Empty without one."""

    @property
    def ended(self) -> list[Statement]:
        """The statement that writes dq from these sums, if the call shares them with no other."""
        if not self.ends:
            return []
        call = Run(text(f"{self.ends}(layouts, dq_sum, dq, scale)"))
        return [If(text("dq_sum is not None and shared is None"), (call,))]


def portable_first(branches: Sequence[BackwardBranch]) -> int:
    """Return the number of portable launches that every call makes. The dq launch precedes dk and
    dv.
    """
    if not branches:
        return 2
    return 0 if any(branch.dq for branch in branches) else 1


def backward_ways(
    branches: Sequence[BackwardBranch],
    shares: BackwardBranch | None,
    names: Sequence[str],
    dq: Launch,
) -> list[BackwardWay]:
    """Return the branches of the backward pass, for the arguments of the operators and the portable
    launch of dq.

    With `shares`, several calls may share the sums of this branch.
    """
    given = ["layouts", *names, "dout", "lse", "delta"]
    dq_is_first = portable_first(branches) > 0
    return [
        BackwardWay(
            test="elif" if at else "if",
            variable=branch.variable,
            before=[] if branch.dq or dq_is_first else [dq],
            call=f"{branch.function}({', '.join([*given, *branch.operands])})",
            ends=branch.ends if branch == shares else "",
        )
        for at, branch in enumerate(branches)
    ]


def workspace_lines(branches: Sequence[BackwardBranch], shares: BackwardBranch | None) -> list[str]:
    """Return the lines that allocate the counters and sums of branches.

    With `shares`, several calls may share the sums of this branch.
    """
    found = []
    follower = follower_of(branches)
    if follower is not None and follower.counts:
        # Only the kernel of delta resets counters, and a call with shared tensors does not launch
        # it.
        new = (
            "(q.new_empty if shared is None else q.new_zeros)"
            if shares is not None
            else "q.new_empty"
        )
        found.append(f"counters = {new}(2, dtype=torch.int32) if {follower.when} else None")
    sums = [f"{_sums(branch, shares)} if {branch.variable}" for branch in branches if branch.sums]
    return [*found, f"dq_sum = {' else '.join([*sums, 'None'])}"] if sums else found


def _sums(branch: BackwardBranch, shares: BackwardBranch | None) -> str:
    call = f"{branch.sums}(q, k)"
    return f"({call} if shared is None else shared.dq_sum)" if branch == shares else call


@dataclass(frozen=True)
class FewQueries:
    """The early return for calls with few queries: condition, and kernels by pass."""

    when: str
    passes: list[tuple[str, str]]


@dataclass(frozen=True)
class WhichKernels(Template):
    """The function that returns the kernels of a call."""

    template: ClassVar[str] = "attention/triton/_which_kernels.j2"

    name: str
    asked: list[str]
    """The tensors that determine the result."""
    words: list[str]
    """The possible results, and the kernels that they name."""
    few: list[FewQueries]
    """The early return, if there is one."""
    lines: list[Template]
    """The statements that compute results."""
    naming: list[str]
    """The statement that assigns the names of kernels, if the result does not contain them."""
    passes: list[tuple[str, str]]

    @property
    def keys(self) -> str:
        """The keys of the result, for a docstring."""
        keys = " and ".join(f'"{name}"' for name, _ in self.passes)
        return f"the keys {keys}" if len(self.passes) > 1 else f"the key {keys}"


def which_kernels(planned: Planned, made: Sequence[Made]) -> WhichKernels:
    """Build the function that returns the kernels of a call, by the tensors that it depends on."""
    choices = [of.choice for of in made if of.choice.words]
    names = ["forward", *(["backward"] if planned.plan.backward else [])]
    answers = {name: _answer(name, choices) for name in names}
    given = {kind for answer in answers.values() for kind in answer.given}
    first = next((choice for choice in choices if choice.few), None)
    few = list[FewQueries]()
    if first is not None and names == ["forward"] and answers["forward"].by_call:
        few.append(FewQueries(first.few, [("forward", first.own)]))
        answers["forward"] = _answer_for_many(first, choices)
    shown = [
        choice
        for choice in sorted(choices, key=lambda choice: bool(choice.few))
        if choice.kind in given
    ]
    named = any(answer.named for answer in answers.values())
    ends = [";"] * (len(shown) - 1) + ["."]
    return WhichKernels(
        name=planned.plan.spec.name,
        asked=["q", "k", "v", *(name for choice in choices for name in choice.streamed)],
        words=[choice.words + end for choice, end in zip(shown, ends, strict=True)],
        few=few,
        lines=[line for choice in choices for line in choice.lines],
        naming=[choice.naming for choice in choices if choice.naming and named],
        passes=[(name, answer.text) for name, answer in answers.items()],
    )


def _answer(name: str, choices: Sequence[Choice]) -> Answer:
    """Return the result for a pass, from the first schedule that serves the pass."""
    found = Answer('"portable"', ("portable",))
    for choice in reversed(choices):
        found = choice.passes.get(name, found)
        if name not in choice.few_in or not choice.few:
            continue
        if not choice.takes_rest:
            text = f"{choice.own} if {choice.few} else {found.text}"
            found = Answer(text, (choice.kind, *found.given), by_call=True, named=found.named)
        elif found.by_call:
            text = f"{choice.own} if {choice.few} or why else {found.text}"
            found = Answer(text, (choice.kind, *_of_chips(found)), by_call=True, named=found.named)
        else:
            found = Answer(choice.own, (choice.kind,))
    return found


def _of_chips(answer: Answer) -> list[str]:
    """Return the kinds of kernels in a result, except portable ones."""
    return [kind for kind in answer.given if kind != "portable"]


def _answer_for_many(few: Choice, choices: Sequence[Choice]) -> Answer:
    """Return the result for forward calls with more queries than the few-query schedule accepts."""
    rest = _answer("forward", [choice for choice in choices if choice is not few])
    if few.takes_rest:
        (own,) = (choice.own for choice in choices if choice.kind in _of_chips(rest))
        return Answer(f"{few.own} if why else {own}", (few.kind, *_of_chips(rest)), by_call=True)
    return rest
