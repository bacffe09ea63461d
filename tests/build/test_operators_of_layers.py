"""Operators of linear attention in C++: launches and results of the operators in Python, and calls
that C++ refuses.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages.c_calls import Case
from support.packages.c_layers import layer_tensors
from support.packages.c_on_paper import python
from support.packages.operators_on_paper import Loaded, compiled, loaded_operators, sources_of

from kgen.spec.load import load

ROWS = """kernel: linear_attention
name: rows
dtype: fp16
head_dim: 64
heads: {qk: 1, v: 2}
chunk_size: 16
buffers:
  a: {shape: [T, HV], dtype: fp16, grad: true}
  double: {shape: [HV], dtype: fp32, grad: true}
  fixed: {shape: [HV], dtype: fp32}
  b: {shape: [T, HV], dtype: fp16, grad: true}
  z: {shape: [T, HV, V], dtype: fp16, grad: true}
  w: {shape: [V], dtype: fp32, grad: true}
decay: -exp(double[h]) * softplus(a[t, h] + fixed[h])
rule: delta
beta: sigmoid(b[t, h])
qk_norm: l2
output_norm: rms
output: w[c] * o * silu(z[t, h, c])
passes: [forward, backward, decode]
"""
"""All kinds of tensors: forward keeps them, sums of parts, a buffer without a gradient, and a name
that means something else in C++.
"""
KEPT = ROWS.replace("name: rows", "name: kept").replace("chunk_size: 16", "chunk_size: 64")
"""Chunks of 64 tokens have kernels for Hopper, so forward keeps tensors only on request."""
PACKED = """kernel: linear_attention
name: packed
dtype: fp16
head_dim: 64
heads: {qk: 1, v: 2}
chunk_size: 16
buffers:
  g: {shape: [T, HV, K], dtype: fp16, grad: true}
  bias: {shape: [HV, K], dtype: fp32, grad: true}
  skip: {shape: [HV, V], dtype: fp32, grad: true}
decay: log_sigmoid(g[t, h, c] + bias[h, c])
skip: skip[h, c] * v
output_norm: rms
output: o * (2 + skip[h, c])
gate_base: 2
q_map: elu(x) + 1
varlen: true
state_dtype: bf16
save: recompute
passes: [forward, backward, decode]
"""
"""Packed sequences, states in bfloat16, a gradient with two terms. Forward keeps nothing."""
ALONE = """kernel: linear_attention
name: alone
dtype: fp16
head_dim: 64
heads: {group: 1}
chunk_size: 16
k_map: elu(x) + 1
passes: [forward]
"""
"""No backward pass, and no buffers."""
SPECS = {"rows": ROWS, "kept": KEPT, "packed": PACKED, "alone": ALONE}
LENGTH = 20
THOROUGH = [
    "kept",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("rows", "packed", "alone")),
]
"""The compiler takes half a minute for each package."""


Packages = Callable[[str], Path]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Packages:
    """A function that builds a package with fake machine code and operators, and returns its
    folder.
    """

    @functools.cache
    def built(name: str) -> Path:
        out = sources_of({name: SPECS[name]}, tmp_path_factory.mktemp(f"operators_of_{name}"))
        return compiled(out, name, pytestconfig.cache)

    return built


# --- launches ------------------------


@pytest.mark.parametrize("name", THOROUGH)
@pytest.mark.parametrize("arch", [80, 90])
def test_operators_launch_what_python_does(packages: Packages, name: str, arch: int) -> None:
    command = [
        "tests/support/packages/operators_of_layers.py",
        str(packages(name)),
        name,
        str(arch),
    ]
    done = python(command, {"TRITON_INTERPRET": None})
    assert done.returncode == 0, done.stderr
    number, differing = json.loads(done.stdout)
    assert differing == []
    assert number > 40


# --- results ------------------------


def _drawn() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return q, k and v, and the buffers of `kept`: few tokens, for the interpreter."""
    torch.manual_seed(0)
    sizes = ((1, 64), (1, 64), (2, 64), (2,), (2,), (2, 64))
    q, k, v, a, b, z = (torch.randn(1, LENGTH, *size, dtype=torch.half) for size in sizes)
    own = {"a": a, "double": torch.randn(2), "b": b, "z": z, "w": torch.rand(64) + 0.5}
    for x in (q, k, v, *own.values()):
        x.requires_grad_()
    return [q, k, v], {**own, "fixed": torch.randn(2)}


def _results(loaded: Loaded) -> tuple[list[torch.Tensor], list[str]]:
    """Return results and gradients of `kept`, states after steps, and the launches."""
    tensors, own = _drawn()
    state = torch.randn(1, 2, 64, 64).requires_grad_()
    asked = {"initial_state": state, "output_final_state": True, "return_states": True}
    o, final, chunks = loaded.function(*tensors, **own, **asked)
    learned = [*tensors, *(x for x in own.values() if x.requires_grad), state]
    gradients = torch.autograd.grad((o * o).float().sum() + (final * final).sum(), learned)
    alone = torch.autograd.grad(loaded.function(*tensors, **own).float().sum(), tensors)
    stepped, each = state.detach().clone(), torch.zeros(1, LENGTH, 2, 64, 64)
    with torch.no_grad():
        step = loaded.module.kept_decode(*tensors, stepped, **own, states=each)
        plain = loaded.function(*tensors, **own, scale=0.5)
    found = [o, final, chunks, *gradients, *alone, stepped, each, step, plain]
    return [x.detach() for x in found], loaded.kernels()


def test_results_are_those_of_python(packages: Packages) -> None:
    """The interpreter runs the launches of C++ and the operators in Python."""
    differing, launched = interpreted(_differing, packages("kept"))
    assert differing == []
    assert [name for name in launched if "back" not in name][-1] == "_finish_kernel"
    assert launched.count("_output_kernel") == 3
    assert launched.count("_decode_kernel") == 1
    assert launched.count("_states_back_kernel") == 2


def _differing(folder: Path) -> tuple[list[int], list[str]]:
    """Return the results of C++ that differ from those of Python, and the launches of C++."""
    loaded = loaded_operators(folder, "kept", fast=True)
    got, launched = _results(loaded)
    loaded.paper.device(75, 4)
    want, others = _results(loaded)
    assert others == []
    assert all(x.isfinite().all() and x.any() for x in want)
    pairs = zip(want, got, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)], launched


@pytest.mark.thorough
def test_results_of_packed_sequences_are_those_of_python(packages: Packages) -> None:
    folder = packages("packed")
    differing, launched = interpreted(_packed, folder)
    assert differing == []
    assert launched.count("_output_kernel") == 2, "once in forward, once in backward"
    assert launched.count("_states_back_kernel") == 1


def _packed(folder: Path) -> tuple[list[str], list[str]]:
    """Return the results of C++ that differ from those of Python, and the launches of C++."""
    loaded = loaded_operators(folder, "packed", fast=True)
    given = layer_tensors(load(folder / "packed.yaml"), Case(batch=2, sq=20, sk=7))
    del given["scale"]
    weights, of_final = given.pop("do"), given.pop("dfinal_state")
    learned = {n: x.requires_grad_() for n, x in given.items() if n != "cu_seqlens"}

    def called() -> dict[str, torch.Tensor]:
        o, final = loaded.function(**given, output_final_state=True)
        loss = (o * weights).float().sum() + (final.float() * of_final.float()).sum()
        gradients = torch.autograd.grad(loss, list(learned.values()))
        return {"o": o, "final": final, **dict(zip(learned, gradients, strict=True))}

    got, launched = called(), loaded.kernels()
    loaded.paper.device(75, 4)
    want = called()
    assert loaded.kernels() == []
    assert all(x.isfinite().all() and x.any() for x in want.values())
    return [n for n, x in want.items() if not torch.equal(x, got[n])], launched


def test_operators_of_layers_suit_pytorch(packages: Packages) -> None:
    """`opcheck` compares schemas, autograd, and shapes of fake tensors, also of dynamic shapes."""
    folder = packages("kept")
    assert interpreted(_checked, folder) == {"SUCCESS"}


def _checked(folder: Path) -> set[str]:
    loaded = loaded_operators(folder, "kept")
    (q, k, v), own = _drawn()
    module, found = loaded.module, set()
    order = [n.name for n in module._forward_op._schema.arguments if n.name in own]
    tensors, state = (q, k, v, *(own[name] for name in order)), torch.randn(1, 2, 64, 64)
    for more in (
        (None, 0.25, False, False, True),
        (state.requires_grad_(), 0.25, True, True, True),
    ):
        found |= set(torch.library.opcheck(module._forward_op, (*tensors, *more)).values())
    plain = [x.detach() for x in tensors]
    steps = (state.detach(), torch.zeros(1, LENGTH, 2, 64, 64), 0.25)
    found |= set(torch.library.opcheck(module._decode_op, (*plain, *steps)).values())
    return found


def test_graphs_call_the_operators(packages: Packages) -> None:
    """`torch.compile` in one graph with gradients, and `torch.export`."""
    folder = packages("kept")
    assert interpreted(_graphs, folder, False) == []


@pytest.mark.thorough
def test_a_program_compiled_ahead_calls_the_operators(packages: Packages) -> None:
    """Run a program of AOTInductor from Python."""
    folder = packages("kept")
    assert interpreted(_graphs, folder, True) == []


def _graphs(folder: Path, ahead: bool) -> list[str]:
    """Return the programs whose results or launches differ from those of calls."""
    loaded = loaded_operators(folder, "kept")
    tensors, own = _drawn()
    learned, wrong = [*tensors, *(x for x in own.values() if x.requires_grad)], []

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return 2 * loaded.function(*tensors, **own)

    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        o = function(*tensors)
        return [o, *torch.autograd.grad(o.float().sum(), learned)]

    want, launches = gradients(model), loaded.kernels()
    got = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    if loaded.kernels() != launches or not all(map(torch.equal, want, got)):
        wrong.append("torch.compile")

    class Layer(torch.nn.Module):
        """A call, and a step that updates its final state."""

        def forward(self, tensors: Any, own: Any, state: Any) -> tuple[torch.Tensor, ...]:
            wanted = {"initial_state": state, "output_final_state": True}
            o, final = loaded.function(*tensors, **own, **wanted)
            stepped = final.clone()
            return o, final, loaded.module.kept_decode(*tensors, stepped, **own), stepped

    given = [x.detach() for x in tensors], {n: x.detach() for n, x in own.items()}
    state = torch.randn(1, 2, 64, 64)
    want, launches = [*Layer()(*given, state)], loaded.kernels()
    program = torch.export.export(Layer(), (*given, state))
    programs: dict[str, Callable[..., Any]] = {"torch.export": program.module()}
    if ahead:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2")
        )
        programs["AOTInductor"] = torch._inductor.aoti_load_package(path)
    for name, called in programs.items():
        got = called(*given, state)
        if loaded.kernels() != launches or not all(map(torch.equal, want, got)):
            wrong.append(name)
    return wrong


# --- calls that C++ refuses ------------------------


def test_python_serves_other_calls(packages: Packages) -> None:
    folder = packages("kept")
    assert interpreted(_in_python, folder) == []


def _in_python(folder: Path) -> list[str]:
    """Return the cases in which the fallback to operators in Python is wrong."""
    loaded = loaded_operators(folder, "kept", fast=True)
    (q, k, v), own = _drawn()
    wrong = []

    def loss(q: torch.Tensor) -> torch.Tensor:
        return loaded.function(q, k, v, **own).float().sum()

    want = torch.autograd.grad(loss(q), q)[0]
    if "_states_back_kernel" not in loaded.kernels():
        wrong.append("C++ does not launch")
    if not torch.equal(torch.func.grad(loss)(q), want) or loaded.kernels():
        wrong.append("torch.func")
    if loaded.function(q, k, v, **own, scale=0.0).any() or loaded.kernels():
        wrong.append("a scale of 0")
    apart = q.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    if not torch.equal(torch.autograd.grad(loss(apart), apart)[0], want):
        wrong.append("strides without machine code")
    if "_output_kernel" in loaded.kernels():
        wrong.append("strides launch")
    states = [torch.zeros(1, 2, 64, 64) for _ in range(2)]
    plain = {n: x.detach() for n, x in own.items()}
    spread = {**plain, "z": plain["z"].repeat_interleave(2, 1)[:, ::2]}
    steps = [
        loaded.module.kept_decode(q.detach(), k.detach(), v.detach(), state, **given)
        for state, given in zip(states, (plain, spread), strict=True)
    ]
    if loaded.kernels() != ["_decode_kernel", "_finish_kernel"]:
        wrong.append("a step launches before the last kernel is found")
    if not torch.equal(*steps) or not torch.equal(*states):
        wrong.append("a step without machine code")
    first = torch.autograd.grad(loss(q), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="kept: second derivatives are not supported"):
        torch.autograd.grad(first.sum(), q)
    own["a"].requires_grad_(False)
    module = loaded.module
    order = [n.name for n in module._forward_op._schema.arguments if n.name in own]
    tensors = (q, k, v, *(own[name] for name in order))
    o, *_ = module._forward_op(*tensors, None, 0.25, False, False, False)
    with pytest.raises(RuntimeError, match="kept: forward ran without gradients, so it kept"):
        o.sum().backward()
    return wrong


def test_mistakes_have_the_errors_of_python(packages: Packages) -> None:
    """C++ checks the arguments, and the emitted functions name mistakes."""
    folder = packages("kept")
    launched, differing = interpreted(_mistaken, folder)
    assert differing == []
    assert launched == ["_output_kernel", "_decode_kernel"]


def _mistaken(folder: Path) -> tuple[list[str], list[Any]]:
    """Return kernels that right calls launch, and the wrong calls whose errors differ."""
    loaded = loaded_operators(folder, "kept", fast=True)
    (q, k, v), own = _drawn()
    (q, k, v), own = [x.detach() for x in (q, k, v)], {n: x.detach() for n, x in own.items()}
    state, each = torch.zeros(1, 2, 64, 64), torch.zeros(1, LENGTH, 2, 64, 64)
    whole, step = loaded.function, loaded.module.kept_decode
    whole(q, k, v, **own, initial_state=state)
    step(q, k, v, state, **own, states=each)
    launched = [n for n in loaded.kernels() if n in ("_output_kernel", "_decode_kernel")]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for function, given in ((whole, (q, k, v)), (step, (q, k, v, state))):
        rest = given[3:]
        calls += [
            (function, (q.float(), k, v, *rest), {}),
            (function, (q[0], k, v, *rest), {}),
            (function, (None, k, v, *rest), {}),
            (function, (q, k[:, 1:], v, *rest), {}),
            (function, (q, k, v[:, :, 1:], *rest), {}),
            (function, (q.to_sparse(), k, v, *rest), {}),
            (function, (q, k, v.to("meta"), *rest), {}),
            (function, given, {"w": own["w"][1:]}),
            (function, given, {"double": own["double"].half()}),
            (function, given, {"scale": float("inf")}),
            (function, given, {"scale": 1e-40}),
            (function, given, {"scale": "1"}),
            (function, given, {"scale": True}),
            (function, given, {"fixed": own["fixed"].clone().requires_grad_()}),
        ]
    calls += [
        (whole, (q, k, v), {"initial_state": state[1:]}),
        (whole, (q, k, v), {"initial_state": state[:0]}),
        (whole, (q, k, v), {"initial_state": state.half()}),
        (step, (q, k, v, state[1:]), {}),
        (step, (q, k, v, None), {}),
        (step, (q, k, v, state), {"states": each[:, 1:]}),
        (step, (q, k, v, state), {"states": each[:, :0]}),
        (step, (q, k, v, state), {"states": each.half()}),
        (step, (q, k, v, state.clone().requires_grad_()), {}),
    ]
    module = whole.__globals__
    emitted = {whole: module["_emitted"], step: module["_emitted_decode"]}
    differing = []
    for number, (function, arguments, more) in enumerate(calls):
        said = []
        for one in (emitted[function], function):
            try:
                one(*arguments, **{**own, **more})
                said.append("nothing")
            except (TypeError, ValueError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        if said[0] != said[1] or said[0] == "nothing":
            differing.append((number, *said))
    return launched, differing + ([] if not loaded.kernels() else ["a wrong call launches"])


@pytest.mark.thorough
def test_a_layer_without_backward_refuses_gradients(packages: Packages) -> None:
    folder = packages("alone")
    launched, said = interpreted(_alone, folder)
    assert launched == ["_k_map_kernel", "_states_kernel", "_output_kernel"] * 2
    assert said[0] == said[1]
    assert said[0].startswith("alone: q requires grad, but the spec has no backward pass")
    assert said[2] == "alone: a tensor requires grad, but the spec has no backward pass"


def _alone(folder: Path) -> tuple[list[str], list[str]]:
    """Return the launches of right calls, and messages of calls that need a gradient."""
    loaded = loaded_operators(folder, "alone", fast=True)
    q, k, v = (torch.randn(2, 20, 8, 64, dtype=torch.half) for _ in range(3))
    got = loaded.function(q, k, v)
    want = loaded.function.__globals__["_emitted"](q, k, v)
    assert torch.equal(got, want)
    kernels, said = loaded.kernels(), list[str]()
    q.requires_grad_()
    calls: list[Callable[[], Any]] = [
        lambda: loaded.function(q, k, v),
        lambda: loaded.function.__globals__["_emitted"](q, k, v),
        lambda: loaded.module._forward_op(q, k, v, None, 0.25, False, False),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(str(error.value).partition("\n")[0])
    return kernels, said
