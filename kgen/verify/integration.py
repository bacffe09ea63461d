"""Does an emitted file behave as a PyTorch operator should, beside being right.

Each check is a function of a `Subject` that raises `AssertionError` (or whatever went wrong) with a message.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kgen.verify.compare import same_bits
from kgen.verify.inputs import Inputs, cases, draw
from kgen.verify.problem import Problem
from kgen.verify.toolchain import import_file


@dataclass(frozen=True)
class Subject:
    """An emitted file under test."""

    problem: Problem
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

    def inputs(self, name: str, sq: int, sk: int) -> Inputs:
        """Inputs of about that shape (the spec's promises about lengths are kept)."""
        template = cases(self.problem, quick=True)[0]
        q_step, kv_step = self.problem.q_multiple, self.problem.kv_multiple
        if self.problem.tied_lengths:
            sq = sk = max(sq, sk)
        sq, sk = -(-sq // q_step) * q_step, -(-sk // kv_step) * kv_step
        return draw(self.problem, replace(template, name=name, sq=sq, sk=sk), self.device)


def call(function: Any, inputs: Inputs, **more: Any) -> Any:
    """The emitted function on inputs, as a user calls it."""
    keywords = {**inputs.buffers, **inputs.runtime, **more}
    return function(inputs.q, inputs.k, inputs.v, scale=inputs.case.scale, **keywords)


def differentiable(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """What gradients are asked for, by name, switched to require them."""
    names = [b.name for b in problem.buffers if b.grad]
    wanted = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {name: inputs.buffers[name] for name in names}
    return {name: tensor.requires_grad_() for name, tensor in wanted.items()}


def imports_alone(subject: Subject) -> None:
    """The file needs Python, torch and triton, nothing else."""
    roots = set()
    for node in ast.walk(ast.parse(subject.path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." if node.level else (node.module or "").split(".")[0])
    foreign = sorted(roots - {"torch", "triton"} - set(sys.stdlib_module_names))
    assert not foreign, f"imports {', '.join(foreign)}"


def imports_twice(subject: Subject) -> None:
    """Two copies of the file live in one process, and give the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a_second_copy.py"
        shutil.copyfile(subject.path, path)
        second = import_file(path, "a_second_copy")
        inputs = subject.inputs("twice", 40, 40)
        first = call(subject.function, inputs)
        assert same_bits(first, call(getattr(second, subject.problem.name), inputs)), "two copies disagree"


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Remembers the arguments of every custom operator that is called."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names
        self.seen: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name().split(".")[0]
        if name in self.names:
            self.seen.setdefault(name, (func, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def passes_opcheck(subject: Subject) -> None:
    """`torch.library.opcheck` on every operator that the file registers."""
    definitions = {}
    for value in vars(subject.module).values():
        if isinstance(value, torch._library.custom_ops.CustomOpDef):
            definitions[value._qualname] = value
    assert definitions, "registers no torch.library operator"
    inputs = subject.inputs("opcheck", 24, 40)
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}
    with _Calls(set(definitions)) as calls:
        out = call(subject.function, inputs)
        if wanted:
            torch.autograd.grad(out, list(wanted.values()), inputs.dout)
    for name, definition in definitions.items():
        if name not in calls.seen:
            continue
        func, args, kwargs = calls.seen[name]
        trained = getattr(definition, "_backward_fn", None) is not None

        def fresh(value: Any, trained: bool = trained) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().clone().requires_grad_(trained and value.is_floating_point())

        torch.library.opcheck(func, tuple(fresh(a) for a in args), {n: fresh(a) for n, a in kwargs.items()})


def compiles_whole(subject: Subject) -> None:
    """`torch.compile(fullgraph=True)` gives what the plain call gives, gradients too."""
    inputs = subject.inputs("compile", 129, 129)
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}

    def run(function: Any) -> dict[str, Tensor]:
        out = call(function, inputs)
        if not wanted:
            return {"out": out}
        grads = torch.autograd.grad(out, list(wanted.values()), inputs.dout)
        return {"out": out, **{f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}}

    torch._dynamo.reset()
    plain, compiled = run(subject.function), run(torch.compile(subject.function, fullgraph=True))
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, msg=lambda text, name=name: f"{name}: {text}")


def captures_graph(subject: Subject) -> None:
    """A CUDA graph of the call replays with new inputs."""
    inputs = subject.inputs("graph", 129, 129)
    other = subject.inputs("graph-replay", 129, 129)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(subject.function, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(subject.function, inputs)
    for name in ("q", "k", "v"):
        getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, call(subject.function, inputs)), "the replayed graph differs from a call"


def reaches_far(subject: Subject) -> None:
    """Rows whose elements lie more than 2**31 apart give what they give side by side, gradients too.

    All tensors share one storage of some 2.8e9 elements: 5.5 GB in 16-bit dtypes, 11 GB in fp32.
    """
    near = subject.inputs("far", 129, 129)
    tensors = {"q": near.q, "k": near.k, "v": near.v, "dout": near.dout}
    rows = max(t.shape[2] for t in tensors.values())
    step = (2**31 // 100) // 16 * 16  # the last of 129 rows starts at 1.28 * 2**31
    storage = torch.empty(rows * step, dtype=near.q.dtype, device=subject.device)
    offset, views = 0, {}
    for name, t in tensors.items():
        batch, heads, _, width = t.shape
        views[name] = storage.as_strided(t.shape, (heads * width, width, step, 1), offset).copy_(t)
        offset += batch * heads * width
    far = replace(near, **views)

    def run(inputs: Inputs) -> list[Tensor]:
        inputs = replace(inputs, **{n: getattr(inputs, n).detach() for n in ("q", "k", "v")})
        wanted = differentiable(subject.problem, inputs) if subject.backward else {}
        out = call(subject.function, inputs)
        return [out, *(torch.autograd.grad(out, list(wanted.values()), inputs.dout) if wanted else ())]

    for got, want in zip(run(far), run(near), strict=True):
        torch.testing.assert_close(got, want)


def refuses_misuse(subject: Subject) -> None:
    """Wrong shapes, dtypes and devices are a `ValueError` or a `TypeError`."""
    inputs = subject.inputs("misuse", 48, 48)
    accepted = []
    for what, wrong in _misuses(subject, inputs).items():
        arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.buffers, **inputs.runtime, **wrong}
        q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
        try:
            subject.function(q, k, v, **arguments)
        except (ValueError, TypeError):
            continue
        except Exception as error:
            accepted.append(f"{what} ends in {type(error).__name__}")
        else:
            accepted.append(f"{what} is accepted")
    assert not accepted, "; ".join(accepted)


def _misuses(subject: Subject, inputs: Inputs) -> dict[str, dict[str, Any]]:
    problem, q, k, v = subject.problem, inputs.q, inputs.k, inputs.v
    found: dict[str, dict[str, Any]] = {
        "q with three dimensions": {"q": q[0]},
        "k with another head size": {"k": k[..., :-1]},
        "q and k with another head size": {"q": q[..., :-1], "k": k[..., :-1]},
        "v with another head size": {"v": v[..., :-1]},
        "k and v of different lengths": {"v": v[:, :, :-1]},
        "another batch size in k and v": {"k": torch.cat([k, k]), "v": torch.cat([v, v])},
        "k in float64": {"k": k.double()},
        "all in float64": {"q": q.double(), "k": k.double(), "v": v.double()},
        "an argument that does not exist": {"no_such_argument": 1},
    }
    if problem.gqa == "any":
        found["heads that do not divide"] = {
            "q": q[:, :1].repeat(1, 3, 1, 1),
            "k": k[:, :1].repeat(1, 2, 1, 1),
        }
        found["heads that do not divide"]["v"] = v[:, :1].repeat(1, 2, 1, 1)
    else:
        found["a query head too many"] = {"q": torch.cat([q, q[:, :1]], 1)}
    if problem.q_multiple > 1:
        found["a q length that breaks its promise"] = {"q": q[:, :, :-1]}
    if problem.kv_multiple > 1:
        found["a kv length that breaks its promise"] = {"k": k[:, :, :-1], "v": v[:, :, :-1]}
    for buffer in problem.buffers:
        value = inputs.buffers[buffer.name]
        if buffer.shape:
            found[f"{buffer.name} of another shape"] = {buffer.name: torch.cat([value, value])}
        found[f"{buffer.name} of another dtype"] = {buffer.name: value.to(torch.complex64)}
    if subject.device != "cpu":
        found["k on another device"] = {"k": k.cpu()}
    return found


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "imports-alone": (imports_alone, False),
    "imports-twice": (imports_twice, False),
    "opcheck": (passes_opcheck, False),
    "misuse": (refuses_misuse, False),
    "compile-fullgraph": (compiles_whole, True),
    "cuda-graph": (captures_graph, True),
    "far-rows": (reaches_far, True),
}
"""By name: the check, and whether it needs a GPU."""


def checks(device: str) -> tuple[str, ...]:
    """The names of the checks that a device can run."""
    return tuple(name for name, (_, gpu) in CHECKS.items() if device != "cpu" or not gpu)
