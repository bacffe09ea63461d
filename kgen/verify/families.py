"""What a kernel family brings to verification (`kgen.family.Verification`): a problem, hard cases, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import NAMES, Chip, family

if TYPE_CHECKING:
    from torch import Tensor

    from kgen.verify.compare import Check


class Problem(Protocol):
    """What a worker process needs to know of a spec: plain data that can be pickled."""

    @property
    def name(self) -> str:
        """Of the spec, and of the emitted function."""

    @property
    def kernel(self) -> str:
        """The family."""

    @property
    def part(self) -> str | None:
        """The part of the family's kernel that is verified by itself; None for all of it."""

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that the emitted files have."""


@dataclass(frozen=True)
class Subject:
    """An emitted file under test, imported."""

    problem: Any
    target: str
    path: Path
    module: ModuleType
    device: str

    @property
    def function(self) -> Any:
        """The function that bears the spec's name."""
        return getattr(self.module, self.problem.name)

    @property
    def backward(self) -> bool:
        """Whether the file offers gradients."""
        return "backward" in self.problem.passes


@dataclass(frozen=True)
class Example:
    """One call of an emitted function. `wanted` are the inputs that gradients are asked for, by name.

    `cotangents` belong to the outputs in order; None for one that no gradient flows from.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, Tensor] = field(default_factory=dict)
    cotangents: tuple[Any, ...] = ()

    def call(self, function: Any) -> tuple[Tensor, ...]:
        """The outputs."""
        result = function(*self.args, **self.kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def run(self, function: Any, *, create_graph: bool = False) -> dict[str, Tensor]:
        """The outputs, called `out0`, ..., and the gradients, called `dq` for the input `q`."""
        import torch

        outputs = self.call(function)
        found = {f"out{i}": value for i, value in enumerate(outputs)}
        if self.wanted:
            pairs = [(o, c) for o, c in zip(outputs, self.cotangents, strict=False) if c is not None]
            grads = torch.autograd.grad(
                [o for o, _ in pairs],
                list(self.wanted.values()),
                [c for _, c in pairs],
                materialize_grads=True,
                create_graph=create_graph,
            )
            found |= {f"d{name}": grad for name, grad in zip(self.wanted, grads, strict=True)}
        return found


NO_SIZES: Mapping[str, Sequence[int]] = MappingProxyType({})
"""Those of a family's choice."""


class Cases(Protocol):
    """The module `cases` of a family, or of a part of it. A group is a pass that is verified by itself."""

    CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]]
    """Checks of this family alone: each raises when it fails; the flag says whether it needs a GPU."""

    def groups(self, problem: Any) -> tuple[str, ...]:
        """The passes that can be called by themselves; the first also runs the integration checks."""

    def case_names(self, problem: Any, group: str, quick: bool) -> tuple[str, ...]:
        """In running order; `quick` ones are small enough for Triton's interpreter on a CPU."""

    def run_case(self, subject: Subject, group: str, name: str) -> list[Check]:
        """The verdicts on each output of a case."""

    def example(self, subject: Subject, name: str) -> Example:
        """A small call for the integration check of that name; another name gives other numbers."""

    def compile_calls(
        self, problem: Any, sizes: Mapping[str, Sequence[int]] = NO_SIZES
    ) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """Calls on CPU tensors that between them launch every kernel in every specialisation.

        Each is the name of a variant and a function of the emitted function. What a spec leaves open has a size or two
        of ours, or those of `sizes`: `gqa`, `batch`, `width`, `heads`.
        """


class ChipCases(Protocol):
    """The module `cases` of `kgen.family.Chip`: small cases of kernels for one chip."""

    def case_names(self, problem: Any) -> tuple[str, ...]:
        """In running order. They are the same for each group, and no case of the family has one of these names."""

    def imported(self, path: Path, name: str) -> ModuleType:
        """Import the emitted file anew, so that its calls run the kernels in the interpreter."""

    def run_case(self, subject: Subject, group: str, name: str) -> list[Check] | None:
        """The verdicts on each output of a case; None where its call launched none of the kernels."""

    def unable(self, module: ModuleType) -> str | None:
        """Why the interpreter cannot run the kernels of an imported file; None where it can."""

    def unused(self, module: ModuleType) -> str | None:
        """Why calls on this GPU do not run the kernels; None where they do."""


def problem_of(loaded: Any, target: str = "") -> Any:
    """The problem of a spec's files of a target. Raises `KgenError` for a family that cannot be verified yet."""
    kernel = loaded.spec.kernel
    own = family(kernel) if kernel in NAMES else None
    of = own.targets.get(target) if own else None
    verification = own.verified_by(of.part if of else None) if own else None
    if verification is None:
        message = f"there is no reference for kernel `{kernel}` yet"
        raise KgenError(Diagnostic("verify-kernel", message, file=str(loaded.path)))
    problem = verification.problem(loaded)
    return replace(problem, passes=("forward",)) if of and of.forward_only else problem


def family_of(problem: Any) -> Cases:
    """What the family of a problem has to verify it with. Imports torch."""
    verification = family(problem.kernel).verified_by(problem.part)
    assert verification is not None, "it made the problem"
    return cast("Cases", verification.cases.get())


def chip_of(problem: Any) -> Chip | None:
    """The kernels for one chip that files of a problem may have beside them."""
    verification = family(problem.kernel).verified_by(problem.part)
    assert verification is not None, "it made the problem"
    return cast("Chip", verification.chip.get()) if verification.chip is not None else None


def chip_cases(chip: Chip) -> ChipCases:
    """The small cases of such kernels. Imports torch."""
    return cast("ChipCases", chip.cases.get())


NOT_NUMBERS: Mapping[str, Any] = {
    "a string": "1",
    "a bool": True,
    "inf in float32": 1e39,
    "NaN": float("nan"),
}
"""What a number that kernels compute with may not be."""


def elsewhere(tensors: Mapping[str, Tensor], device: str) -> dict[str, dict[str, Tensor]]:
    """The same call with one of the tensors on another device: the CPU, or where kernels run there, without data."""
    other = "meta" if device == "cpu" else "cpu"
    return {f"{name} on another device": {name: x.detach().to(other)} for name, x in tensors.items()}


def must_refuse(
    calls: Mapping[str, Callable[[], object]],
    *,
    errors: tuple[type[Exception], ...] = (ValueError, TypeError),
) -> None:
    """Raise `AssertionError` unless each call, named by what is wrong with it, ends in one of `errors`."""
    accepted = []
    for what, call in calls.items():
        try:
            call()
        except errors:
            continue
        except Exception as error:
            accepted.append(f"{what} ends in {type(error).__name__}")
        else:
            accepted.append(f"{what} is accepted")
    assert not accepted, "; ".join(accepted)
