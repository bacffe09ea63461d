"""Packages of linear attention: machine code for every contiguous call, and calls from C."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.packages.c_calls import Case, differences
from support.packages.c_layers import LAYER_CASES, layer_launches, layer_tensors
from support.packages.c_on_paper import Library, Paper, loaded_package, packages_of, run_example
from support.packages.loading import package_of

from kgen.build.runtime import triton as runtime
from kgen.kernels.linear_attention.verify import cases as cases_of
from kgen.spec.load import load
from kgen.verify import compare
from kgen.verify.families import Subject, problem_of

INVALID, WORKSPACE, NO_KERNEL = 1, 2, 3
ROWS = """kernel: linear_attention
name: rows
dtype: fp16
head_dim: 64
heads: {qk: 2, v: 4}
chunk_size: 16
buffers:
  a: {shape: [T, HV], dtype: fp16, grad: true}
  a_log: {shape: [HV], dtype: fp32, grad: true}
  b: {shape: [T, HV], dtype: fp16, grad: true}
  z: {shape: [T, HV, V], dtype: fp16, grad: true}
  w: {shape: [V], dtype: fp32, grad: true}
decay: -exp(a_log[h]) * softplus(a[t, h])
rule: delta
beta: sigmoid(b[t, h])
qk_norm: l2
output_norm: rms
output: w[c] * o * silu(z[t, h, c])
passes: [forward, backward, decode]
"""
"""Forward keeps tensors for backward, and gradients of a buffer of all heads are sums of parts."""
PACKED = {
    "name: rows": "name: layer\nvarlen: true",
    "decay: -exp(a_log[h]) * softplus(a[t, h])": "decay: exp(a_log[h]) * a[t, h]",
    "beta: sigmoid(b[t, h])": "beta: b[t, h]",
}
LAYER = functools.reduce(lambda text, change: text.replace(*change), PACKED.items(), ROWS)
"""Packed sequences, and a decay and a beta that need bounded buffers."""
SCAN = """kernel: linear_attention
name: scan
dtype: fp16
head_dim: {qk: 128, v: 64}
heads: {group: 2}
chunk_size: 16
buffers:
  dt: {shape: [T, HV], dtype: fp16, grad: true}
  a_log: {shape: [HV], dtype: fp32, grad: true}
  double: {shape: [HV, V], dtype: fp32, grad: true}
  gate: {shape: [T, HV, V], dtype: fp16, grad: true}
decay: -exp(a_log[h]) * softplus(dt[t, h])
beta: softplus(dt[t, h])
skip: double[h, c] * v + dt[t, h]
output_gate: silu(gate[t, h, c]) * (1 + 0.1 * double[h, c])
output_norm: rms
output: o * (2 + double[h, c]) * (1 + 0.25 * gate[t, h, c])
gate_base: 2
scale: 0.25
save: recompute
state_dtype: bf16
passes: [forward, backward, decode]
"""
"""Backward computes the output again, and gradients of buffers have several terms. One buffer has
the name of a type in C.
"""
COLUMNS = """kernel: linear_attention
name: columns
dtype: fp16
head_dim: 64
heads: any
chunk_size: 16
buffers:
  g: {shape: [T, HV, K], dtype: fp16, grad: true}
  bias: {shape: [HV, K], dtype: fp32, grad: true}
  b: {shape: [T, HV], dtype: fp16, grad: true}
decay: log_sigmoid(g[t, h, c] + bias[h, c])
rule: delta
beta: sigmoid(b[t, h])
q_map: elu(x) + 1
qk_norm: l2
varlen: true
save: recompute
passes: [forward, backward, decode]
"""
"""A decay of each column, and packed sequences."""
PLAIN = """kernel: linear_attention
name: plain
dtype: bf16
head_dim: 64
heads: {group: 1}
chunk_size: 16
k_map: elu(x) + 1
passes: [forward]
"""
"""One pass, without buffers."""
ODD = """kernel: linear_attention
name: odd
dtype: fp16
head_dim: 64
heads: {qk: 1, v: 1}
chunk_size: 16
buffers: {b: {shape: [T, HV], dtype: fp16, grad: true}}
beta: sigmoid(b[t, h])
varlen: true
"""
"""One head, so that the gradient of a buffer may have an odd number of elements."""
SPECS = {"rows": ROWS, "layer": LAYER, "scan": SCAN, "columns": COLUMNS}
SPECS |= {"plain": PLAIN, "odd": ODD}
RESULTS = {"rows": 14, "layer": 14, "scan": 13, "columns": 12}
"""The number of results that an example compares."""


class _Called(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with fake machine code."""
    return packages_of(SPECS, tmp_path_factory.mktemp("layers"))


# --- machine code ------------------------


@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("name", ["rows", "layer"])
def test_every_contiguous_call_finds_its_machine_code(folder: Path, name: str, chip: int) -> None:
    """The cases of `kgen verify` have every combination of states, and offsets of both dtypes.

    Strides of tokens are constants of the machine code.
    """
    lacking, launches = _lacking(folder, name, chip)
    assert launches > 400
    assert {case for case, of in _cases(folder, name).items() if _contiguous(case, of)} > {
        ("forward", "kept-states"),
        ("backward", "short"),
        ("backward", "one-chunk"),
        ("decode", "hard-steps"),
    }
    assert [
        (case, lacking[case])
        for case, of in _cases(folder, name).items()
        if lacking[case] and _contiguous(case, of)
    ] == []


def _contiguous(case: tuple[str, str], of: Any) -> bool:
    pass_, _ = case
    return of.layout in ("contiguous", "offset") and (pass_ != "backward" or of.do == "contiguous")


def _cases(folder: Path, name: str) -> dict[tuple[str, str], Any]:
    problem = problem_of(load(folder / f"{name}.yaml"))
    return {
        (group, case.name): case
        for group in cases_of.groups(problem)
        for case in cases_of._cases(problem, group, quick=False)
    }


def _lacking(folder: Path, name: str, chip: int) -> tuple[dict[tuple[str, str], list[str]], int]:
    """Return the kernels without machine code by pass and case, and the number of launches."""
    package = package_of(f"called_{name}_{chip}", folder / name)
    launcher, problem = package.load("triton"), problem_of(load(folder / f"{name}.yaml"))
    found: list[str | None] = []

    def launch(kernel: Any, grid: Any, *args: Any, enable_fp_fusion: bool = True, **meta: Any):
        there = kernel._found(*kernel._told(args, meta), args)
        found.append(None if there else kernel.__name__)

    def called(call: Any, *args: Any, **kwargs: Any) -> None:
        call()
        raise _Called

    subject = Subject(problem, "triton", folder / name / "triton.py", launcher, "cpu")
    lacking, count = {}, 0
    with contextlib.ExitStack() as stack:
        for patch in _as_on_a_chip(launcher, chip, launch, called):
            stack.enter_context(patch)
        for group, case in _cases(folder, name):
            found.clear()
            with contextlib.suppress(_Called):
                cases_of.run_case(subject, group, case)
            count += len(found)
            lacking[group, case] = [one for one in found if one is not None]
    return lacking, count


def _as_on_a_chip(launcher: Any, chip: int, launch: Any, called: Any) -> Iterator[Any]:
    yield mock.patch.object(runtime.Kernel, "_launch", launch)
    yield mock.patch.object(runtime, "_arch", return_value=chip)
    yield mock.patch.object(compare, "careful", called)
    yield mock.patch("torch.cuda.current_device", return_value=0)
    yield mock.patch("torch.cuda.device_of", return_value=contextlib.nullcontext())
    yield mock.patch.object(launcher, "_arch", return_value=chip)
    # Only a step reads a result of the reference: the shape of its states.
    yield mock.patch.object(cases_of, "linear_attention", _shapes)
    for name in ("eager", "eager_steps", "_terms"):
        yield mock.patch.object(cases_of, name)


def _shapes(problem: Any, tensors: Any, options: Any) -> Any:
    v = tensors["v"]
    shape = (*v.shape[:3], problem.head_qk, problem.head_v)
    return mock.Mock(states=torch.empty(shape) if options.every else None)


def test_other_sizes_and_strides_name_their_options(folder: Path) -> None:
    """Without Triton, a call that the package has no machine code for ends with an error."""
    launcher = loaded_package(folder / "columns", "columns_of_other_sizes")
    given = layer_tensors(load(folder / "columns.yaml"), Case(heads=3, sq=20, sk=5))
    names = [one.name for one in launcher._forward_op._schema.arguments]
    asked = {"final": False, "within": False}
    words = "no machine code of _gates_kernel for these arguments, and KGEN_NO_COMPILER is set: "
    words += r"make tensors contiguous, or pass the sizes of the call to `kgen build` \(--gqa"
    with (
        Paper(folder / "columns").under_python(launcher, 80, 4),
        mock.patch.dict("os.environ", {"KGEN_NO_COMPILER": "1"}),
        pytest.raises(RuntimeError, match=words),
    ):
        launcher._forward_op(*[(given | asked)[name] for name in names])


# --- calls from C ------------------------


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "name",
    ["rows", "columns", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("layer", "scan"))],
)
def test_c_launches_what_python_does(folder: Path, name: str, arch: int) -> None:
    loaded = load(folder / f"{name}.yaml")
    paper, library = Paper(folder / name), Library(folder / name, name)
    launcher = loaded_package(folder / name, f"{name}_on_paper")
    for case in LAYER_CASES:
        want, got = layer_launches(paper, library, launcher, loaded, case, arch)
        assert want.keys() == got.keys()
        assert any(want.values())
        assert differences(want, got) == []


@pytest.mark.parametrize(
    "name",
    ["layer", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("rows", "scan", "columns"))],
)
def test_the_example_is_right_on_paper(folder: Path, name: str) -> None:
    """The example makes the calls of a user's program in memory with garbage, and checks the
    results itself.
    """
    done = run_example(folder / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == RESULTS[name]


def test_one_pass_has_one_call(folder: Path) -> None:
    paper, library = Paper(folder / "plain"), Library(folder / "plain", "plain", cpp=True)
    paper.device(90, 4)
    paper.begin({})
    given = _arguments(folder, "plain", library)
    assert library.call("forward", given) == 0, library.error()
    assert [one["kernel"] for one in paper.launched] == [
        *("_k_map_kernel", "_states_kernel", "_output_kernel")
    ]
    for function in ("plain_backward", "plain_decode", "plain_saved"):
        assert not hasattr(library.library, function)
    assert not hasattr(library.arguments, "saved")


def test_the_caller_learns_what_is_wrong(folder: Path) -> None:
    paper, library = Paper(folder / "layer"), Library(folder / "layer", "layer")
    paper.device(80, 4)
    given = _arguments(folder, "layer", library)

    def said(pass_: str = "forward", **more: Any) -> tuple[int, str]:
        paper.begin({})
        room = torch.zeros(1 << 24, dtype=torch.uint8)
        return library.call(pass_, given | more, room), library.error().removeprefix("layer: ")

    def refused(words: str, pass_: str = "forward", **more: Any) -> None:
        assert said(pass_, **more) == (INVALID, words)
        assert library.query(pass_, given | more) == -1

    for pass_ in ("forward", "backward", "decode"):
        assert said(pass_) == (0, "")
    q, v, ends = given["q"], given["v"], given["cu_seqlens"]
    refused("packed sequences need B = 1, got 2", q=q.expand(2, -1, -1, -1))
    refused("q must have 2 heads and v 4, got 2 and 3", v=v[:, :, 1:])
    refused("k must be [1, 39, 2, 64], got [1, 40, 2, 64]", q=q[:, 1:])
    refused("cu_seqlens must be [N + 1] for N sequences, got [0]", cu_seqlens=None)
    refused("cu_seqlens must be contiguous", cu_seqlens=ends.repeat(2)[::2])
    refused("w must be [64], got [0]", w=None)
    refused("o must be [1, 40, 4, 64], got [0, 0, 0, 0]", o=None)
    refused("o must be contiguous", "decode", o=v.repeat_interleave(2, -1)[..., ::2])
    state = given["initial_state"]
    for name in ("initial_state", "final_state"):
        refused(f"{name} must be [3, 4, 64, 64], got [2, 4, 64, 64]", **{name: state[1:]})
    chunks = given["chunk_states"]
    refused("chunk_states must be [5, 4, 64, 64], got [4, 4, 64, 64]", chunk_states=chunks[1:])
    refused("state must be [3, 4, 64, 64], got [0, 0, 0, 0]", "decode", state=None)
    refused(
        "token_states must be [1, 40, 4, 64, 64], got [1, 40, 4, 64, 63]",
        "decode",
        token_states=given["token_states"][..., 1:],
    )
    refused("do must be [1, 40, 4, 64], got [0, 0, 0, 0]", "backward", do_=None)
    refused("dq must be contiguous", "backward", dq=q.repeat_interleave(2, -1)[..., ::2])
    refused("da_log must be [5, 4], got [4, 4]", "backward", da_log=given["da_log"][1:])
    refused("dw must be [1, 4, 64], got [0, 0, 0]", "backward", dw=None)
    bytes_ = len(given["saved"])
    words = f"saved must have {bytes_} bytes, got"
    refused(f"{words} 0", "backward", saved=None)
    refused(f"{words} {bytes_ - 1}", saved=given["saved"][1:])
    odd = torch.zeros(bytes_ + 17, dtype=torch.uint8)
    odd = odd[1 - odd.data_ptr() % 16 :][:bytes_]
    refused("saved must be aligned to 16 bytes", "backward", saved=odd)
    refused("scale must be finite and must not underflow in float32, got nan", scale=math.nan)
    needed = library.query("backward", given)
    small = torch.zeros(needed - 1, dtype=torch.uint8)
    assert library.call("backward", given, small) == WORKSPACE
    paper.device(86, 4)
    for pass_ in ("forward", "backward", "decode"):
        assert said(pass_) == (
            NO_KERNEL,
            "no machine code for sm_86. Build it with `kgen build --arch`",
        )


@pytest.mark.parametrize(
    ("pass_", "name", "axis", "power", "words"),
    [
        *(("forward", x, 1, 24, f"tokens of {x}") for x in ("q", "k", "v", "a", "z")),
        ("backward", "do_", 1, 23, "tokens of do"),
        ("decode", "state", 2, 23, "rows of state"),
        ("decode", "token_states", 3, 23, "rows of token_states"),
    ],
)
def test_strides_are_those_that_kernels_multiply_in_32_bits(
    folder: Path, pass_: str, name: str, axis: int, power: int, words: str
) -> None:
    paper, library = Paper(folder / "rows"), Library(folder / "rows", "rows")
    paper.device(80, 4)
    paper.begin({})
    made = library.made(_arguments(folder, "rows", library))
    function = getattr(library.library, f"rows_{pass_}")
    room = torch.zeros(1 << 24, dtype=torch.uint8)
    passed = (ctypes.c_void_p(room.data_ptr()), ctypes.c_size_t(len(room)), None)
    assert function(ctypes.byref(made), *passed) == 0, library.error()
    getattr(made, name).strides[axis] = 1 << power
    assert function(ctypes.byref(made), *passed) == INVALID
    below = f"must be less than 2**{power} elements apart: make it contiguous"
    assert library.error() == f"rows: {words} {below}"
    getattr(made, name).strides[axis] -= 1
    assert function(ctypes.byref(made), *passed) == NO_KERNEL
    hint = "make tensors contiguous, or name heads to `kgen build`, as `--heads` or `--gqa`"
    assert library.error().endswith(f"for sm_80 and these arguments: {hint}")


def test_gradients_of_any_number_of_tokens_are_filled_with_zeros(folder: Path) -> None:
    """The driver fills words of 4 bytes. A gradient may have a multiple of 2, at any address."""
    paper, library = Paper(folder / "odd"), Library(folder / "odd", "odd")
    paper.device(80, 4)
    paper.begin({})
    given = _arguments(folder, "odd", library, Case(batch=1, sk=4, spare=3))
    count = given["db"].numel()
    assert count == 7
    for first in (0, 1):
        memory = torch.full((count + 2,), 7.0, dtype=torch.float16)
        own = memory[first : first + count].view(given["db"].shape)
        assert library.call("backward", given | {"db": own}) == 0, library.error()
        assert [int(x) for x in memory] == [7] * first + [0] * count + [7] * (2 - first)


def _arguments(
    folder: Path, name: str, library: Library, case: Case | None = None
) -> dict[str, Any]:
    """Return all arguments of C, with memory for the results."""
    loaded = load(folder / f"{name}.yaml")
    found = layer_tensors(loaded, case or Case(batch=3, heads=8, sq=16, sk=8))
    q, v, state = found["q"], found["v"], found["initial_state"]
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    chunk, packed = loaded.spec.chunk_size, loaded.spec.varlen
    count = T // chunk + len(state) if packed else -(-T // chunk)
    slots = count if packed else B * count
    found["do_"] = found.pop("do")
    found |= {"o": torch.zeros_like(v), "final_state": state.clone(), "state": state.clone()}
    within = (slots,) if packed else (B, count)
    found["chunk_states"] = state.new_zeros(*within, HV, K, V)
    found["token_states"] = torch.zeros(B, T, HV, K, V)
    found |= {f"d{n}": torch.zeros_like(found[n]) for n in ("q", "k", "v", "initial_state")}
    parts = {"a_log": (slots, HV), "bias": (slots, HV, K), "w": (B * -(-T // 64), HV, V)}
    for buffer in loaded.spec.buffers:
        shape = parts.get(buffer, found[buffer].shape)
        found[f"d{buffer}"] = torch.zeros(shape, dtype=found[buffer].dtype)
    found = {n: x for n, x in found.items() if hasattr(library.arguments, n)}
    if hasattr(library.arguments, "saved"):
        bytes_ = int(getattr(library.library, f"{name}_saved")(ctypes.byref(library.made(found))))
        memory = torch.zeros(bytes_ + 16, dtype=torch.uint8)
        found["saved"] = memory[-memory.data_ptr() % 16 :][:bytes_]
    return found
