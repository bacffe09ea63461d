"""Interface of a kernel family to verification (`kgen.family.Verification`): a problem, cases and
calls.
"""

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
    """Properties of a spec for a worker process, as plain data that can be pickled."""

    @property
    def name(self) -> str:
        """Name of the spec and of the emitted function."""

    @property
    def kernel(self) -> str:
        """The family."""

    @property
    def part(self) -> str | None:
        """The separately verified part of the family's kernel; None for all of it."""

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of the emitted files."""


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
        """The emitted function, which has the spec's name."""
        return getattr(self.module, self.problem.name)

    @property
    def backward(self) -> bool:
        """True if the file has gradients."""
        return "backward" in self.problem.passes


@dataclass(frozen=True)
class Example:
    """One call of an emitted function. `wanted` has the inputs that need gradients, by name.

    `cotangents` are in the order of the outputs. None stands for an output without a gradient.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, Tensor] = field(default_factory=dict)
    cotangents: tuple[Any, ...] = ()

    def call(self, function: Any) -> tuple[Tensor, ...]:
        """Return the outputs of a function."""
        result = function(*self.args, **self.kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def run(self, function: Any, *, create_graph: bool = False) -> dict[str, Tensor]:
        """Return the outputs as `out0`, ..., and the gradients, as `dq` for the input `q`."""
        import torch

        outputs = self.call(function)
        found = {f"out{i}": value for i, value in enumerate(outputs)}
        if self.wanted:
            pairs = [
                (o, c) for o, c in zip(outputs, self.cotangents, strict=False) if c is not None
            ]
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
"""Default sizes, chosen by the family."""


class Cases(Protocol):
    """The module `cases` of a family or of a part of it. A group is a separately verified pass."""

    CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]]
    """Checks of this family. Each raises an error if it fails. The flag is true if it needs a
    GPU.
    """

    def groups(self, problem: Any) -> tuple[str, ...]:
        """The passes that can run separately. The first also runs the integration checks."""

    def case_names(self, problem: Any, group: str, quick: bool) -> tuple[str, ...]:
        """Return names in running order.

        `quick` cases are small enough for Triton's interpreter.
        """

    def run_case(self, subject: Subject, group: str, name: str) -> list[Check]:
        """Return the verdict on each output of a case."""

    def example(self, subject: Subject, name: str) -> Example:
        """Return a small call for an integration check. The name is the random seed."""

    def compile_calls(
        self, problem: Any, sizes: Mapping[str, Sequence[int]] = NO_SIZES
    ) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """Yield calls on CPU tensors that together launch every kernel in every specialization.

        Each has the name of a variant, and takes the emitted function. Sizes that a spec leaves
        open are a default, or come from `sizes`: `gqa`, `batch`, `width`, `heads`.
        """


class ChipCases(Protocol):
    """The module `cases` of `kgen.family.Chip`: small cases for the kernels of one chip."""

    def case_names(self, problem: Any) -> tuple[str, ...]:
        """Return names in running order, the same for each group.

        No case of the family or of another chip has one of these names.
        """

    def imported(self, path: Path, name: str) -> ModuleType:
        """Import the emitted file again, with calls that run the kernels in the interpreter."""

    def run_case(self, subject: Subject, group: str, name: str) -> list[Check] | None:
        """Return the verdict on each output of a case.

        Returns None if its call launched none of the kernels.
        """

    def unable(self, names: Mapping[str, Any]) -> str | None:
        """Return why the kernels of an imported file cannot be imported here; None if they can.

        `names` are the names of the imported file.
        """

    def unused(self, module: ModuleType) -> str | None:
        """Return why calls on this GPU do not run the kernels; None if they do."""


def problem_of(loaded: Any, target: str = "") -> Any:
    """Return the problem of a spec's files for a target.

    Raises `KgenError` for a family without verification.
    """
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
    """Return the cases module of a problem's family. Imports torch."""
    verification = family(problem.kernel).verified_by(problem.part)
    assert verification is not None, "it made the problem"
    return cast("Cases", verification.cases.get())


def chips_of(problem: Any) -> tuple[Chip, ...]:
    """Return the chips for which a problem has special kernels."""
    verification = family(problem.kernel).verified_by(problem.part)
    assert verification is not None, "it made the problem"
    return () if verification.chips is None else cast("tuple[Chip, ...]", verification.chips.get())


def chip_cases(chip: Chip) -> ChipCases:
    """Return the small cases of the kernels for one chip. Imports torch."""
    return cast("ChipCases", chip.cases.get())


NOT_NUMBERS: Mapping[str, Any] = {
    "a string": "1",
    "a bool": True,
    "inf in float32": 1e39,
    "NaN": float("nan"),
}
"""Invalid values for a numeric argument."""


def elsewhere(tensors: Mapping[str, Tensor], device: str) -> dict[str, dict[str, Tensor]]:
    """Return changes of a call that put one tensor on another device: the CPU, or meta if kernels
    run on the CPU.
    """
    other = "meta" if device == "cpu" else "cpu"
    return {
        f"{name} on another device": {name: x.detach().to(other)} for name, x in tensors.items()
    }


def must_refuse(
    calls: Mapping[str, Callable[[], object]],
    *,
    errors: tuple[type[Exception], ...] = (ValueError, TypeError),
) -> None:
    """Raise `AssertionError` unless each call raises one of `errors`.

    The key names the error in the call.
    """
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
