"""Checks that an emitted file behaves as a PyTorch operator.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kgen.family import family
from kgen.verify.compare import same_bits
from kgen.verify.emitted import parts
from kgen.verify.families import Cases, Example, Subject, family_of, must_refuse
from kgen.verify.toolchain import import_file


def imports_alone(subject: Subject) -> None:
    """Check that the file imports only the standard library, torch, the target's package and its
    own parts.
    """
    roots = set()
    own = [path for path in parts(subject.path) if path.suffix == ".py"]
    for node in (node for path in own for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            beside = [node.module] if node.module else [alias.name for alias in node.names]
            roots |= (
                {"."} if {f"{name}.py" for name in beside} - {path.name for path in own} else set()
            )
    allowed = family(subject.problem.kernel).targets[subject.target].runtime.imports
    foreign = sorted(roots - {*allowed} - set(sys.stdlib_module_names))
    assert not foreign, f"imports {', '.join(foreign)}"


def imports_twice(subject: Subject) -> None:
    """Check that two copies, and two imports of one copy, return the same results in one
    process.
    """
    example = family_of(subject.problem).example(subject, "twice")
    with tempfile.TemporaryDirectory() as folder:
        for path in parts(subject.path):
            shutil.copyfile(path, Path(folder) / path.name)
        copy = Path(folder) / subject.path.name
        modules = [import_file(copy, "a_second_copy"), import_file(copy, "a_second_import")]
        first, *others = (
            example.call(function)
            for function in (subject.function, *(getattr(m, subject.problem.name) for m in modules))
        )
        for other in others:
            same = all(same_bits(one, two) for one, two in zip(first, other, strict=True))
            assert same, "two copies disagree"


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Mode that records the arguments of every called custom operator."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names
        self.seen: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().split(".")[0]
        if name in self.names:
            self.seen.setdefault(name, (func, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def passes_opcheck(subject: Subject) -> None:
    """Run `torch.library.opcheck` on every operator that the file registers."""
    operators = {
        value.name()
        for value in vars(subject.module).values()
        if isinstance(value, torch._ops.OpOverload)
    }
    assert operators, "registers no torch.library operator"
    example = family_of(subject.problem).example(subject, "opcheck")
    with _Calls(operators) as calls:
        example.run(subject.function)
        with torch.no_grad():
            example.call(subject.function)
    for name, (func, args, kwargs) in calls.seen.items():
        trained = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")

        def fresh(value: Any, trained: bool = trained) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().clone().requires_grad_(trained and value.is_floating_point())

        torch.library.opcheck(
            func, tuple(fresh(a) for a in args), {n: fresh(a) for n, a in kwargs.items()}
        )


def compiles_whole(subject: Subject) -> None:
    """Check that `torch.compile(fullgraph=True)` returns the results and gradients of the plain
    call.
    """
    example = family_of(subject.problem).example(subject, "compile")
    torch._dynamo.reset()
    plain = example.run(subject.function)
    compiled = example.run(torch.compile(subject.function, fullgraph=True))
    for name, value in plain.items():
        torch.testing.assert_close(
            compiled[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )


def captures_graph(subject: Subject) -> None:
    """Check that a CUDA graph of the call replays with other inputs."""
    family = family_of(subject.problem)
    example, other = family.example(subject, "graph"), family.example(subject, "graph-replay")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                example.call(subject.function)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = example.call(subject.function)
        for value, new in zip(example.args, other.args, strict=True):
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = example.call(subject.function)
    same = all(same_bits(one, two) for one, two in zip(outputs, expected, strict=True))
    assert same, "the replayed graph differs from a call"


def refuses_derivatives(subject: Subject) -> None:
    """Check that a missing derivative raises `RuntimeError` instead of being zero.

    These are second derivatives, forward-mode derivatives, and gradients of tensors that have none.
    """
    example = family_of(subject.problem).example(subject, "derivatives")
    given: dict[Any, Any] = {**dict(enumerate(example.args)), **example.kwargs}
    real = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    wanted = {id(x) for x in example.wanted.values()}

    def called(change: Mapping[Any, Tensor]) -> Any:
        new = {**given, **change}
        args = [new.pop(i) for i in range(len(example.args))]
        return subject.function(*args, **new)

    def tangent(name: Any) -> None:
        with torch.autograd.forward_ad.dual_level():
            x = real[name].detach()
            called({name: torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))})

    wrong: dict[str, Callable[[], Any]] = {
        f"a tangent of argument {n}": partial(tangent, n) for n in real
    }
    learned = {n: x.detach().requires_grad_() for n, x in real.items()}
    for name, x in real.items():
        if id(x) not in wanted:
            wrong[f"a gradient of argument {name}"] = partial(called, {name: learned[name]})
    with torch.no_grad():
        called(learned)
    if example.wanted:
        leaves = list(example.wanted.values())
        first = example.run(subject.function, create_graph=True)
        for name in (f"d{n}" for n in example.wanted):
            wrong[f"a second derivative, of {name}"] = partial(
                torch.autograd.grad, first[name].sum(), leaves, retain_graph=True, allow_unused=True
            )
    must_refuse(wrong, errors=(RuntimeError,))


def casts_under_autocast(subject: Subject) -> None:
    """Check that autocast casts operands to the dtype of the kernels.

    Gradients have the dtype of the operands.
    """
    example = family_of(subject.problem).example(subject, "autocast")
    given: dict[Any, Any] = {**dict(enumerate(example.args)), **example.kwargs}
    names = {id(x): name for name, x in example.wanted.items()}
    casts: dict[Any, Tensor] = {}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
            casts[name] = x.detach().to(
                torch.bfloat16 if x.dtype == torch.float32 else torch.float32
            )

    def called(tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
        new = {**given, **tensors}
        wanted = {names[id(x)]: new[n].requires_grad_() for n, x in given.items() if id(x) in names}
        args = tuple(new.pop(i) for i in range(len(example.args)))
        return Example(args, new, wanted, example.cotangents).run(subject.function)

    plain = called({n: x.to(given[n].dtype) for n, x in casts.items()})
    with torch.autocast(subject.device, dtype=torch.bfloat16):
        cast = called(casts)
    dtypes = {f"d{names[id(x)]}": casts[n].dtype for n, x in given.items() if id(x) in names}
    for name, value in plain.items():
        got, dtype = cast[name], dtypes.get(name, value.dtype)
        assert got.dtype == dtype, f"{name} is {got.dtype}, and not {dtype}"
        # Round both results through both dtypes.
        pair = got.to(value.dtype).to(dtype), value.to(dtype)
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "imports-alone": (imports_alone, False),
    "imports-twice": (imports_twice, False),
    "derivatives": (refuses_derivatives, False),
    "autocast": (casts_under_autocast, False),
    "opcheck": (passes_opcheck, False),
    "compile-fullgraph": (compiles_whole, True),
    "cuda-graph": (captures_graph, True),
}
"""The checks by name. The flag is true if a check needs a GPU."""
OF_FILES = ("imports-alone", "imports-twice", "launches")
"""Checks that do not apply to packages: of the text, of copies, and of the lookup of kernels that
Triton compiled.
"""


def named(family: Cases) -> dict[str, Callable[[Subject], None]]:
    """Return every check by name, including the checks of the family."""
    return {name: check for name, (check, _) in {**CHECKS, **family.CHECKS}.items()}


def checks(family: Cases, device: str) -> tuple[str, ...]:
    """Return the names of the checks that a device can run."""
    every = {**CHECKS, **family.CHECKS}
    return tuple(name for name, (_, gpu) in every.items() if device != "cpu" or not gpu)
