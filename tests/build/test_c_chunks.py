"""chunk_output from C: its example on a simulated driver, and its error messages."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages.c_calls import Case, chunk_tensors
from support.packages.c_on_paper import Library, Paper, packages_of, run_example

from kgen.spec.load import load

INVALID, WORKSPACE, NO_KERNEL = 1, 2, 3
CHUNKS = """kernel: chunk_output
name: chunks
dtype: fp16
state_dtype: fp32
gate_dtype: bf16
head_dim: {qk: 128, v: 64}
chunk_size: 16
heads: {qk: 2, v: 4}
decay: g[i] + 0.5 * (i + 1) * g_gamma[h] * (h + 1) / HV
"""
"""Gradients of a gate in two parts, and decays that depend on every allowed index."""
PACKED = """kernel: chunk_output
name: packed
dtype: fp16
head_dim: 64
chunk_size: 16
heads: any
decay: g[i]
gate_base: 2
state_layout: vk
v_layout: chunk_padded
varlen: true
"""
"""Packed sequences with padded values."""
GROUPED = """kernel: chunk_output
name: grouped
dtype: bf16
head_dim: 64
heads: {group: 2}
passes: [forward]
"""
"""One pass, without a decay."""
SPECS = {"chunks": CHUNKS, "packed": PACKED, "grouped": GROUPED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with fake machine code."""
    return packages_of(SPECS, tmp_path_factory.mktemp("chunks"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["chunks", "packed"])
def test_the_example_is_right_on_paper(folder: Path, name: str) -> None:
    """The example makes the calls of a user's program in memory with garbage, and checks the
    results itself.
    """
    done = run_example(folder / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith(": right")] == [
        *("o", "dq", "dk", "dv", "dh", "dg")
    ]


def test_what_is_wrong_with_chunks_is_said(folder: Path) -> None:
    paper, library = Paper(folder / "packed"), Library(folder / "packed", "packed")
    paper.device(80, 4)
    given = _chunks(folder, "packed", Case(heads=8, group=2, sq=40, sk=9))

    def said(pass_: str = "backward", **more: Any) -> tuple[int, str]:
        paper.begin({})
        room = torch.zeros(64, dtype=torch.uint8)
        return library.call(pass_, given | more, room), library.error().removeprefix("packed: ")

    def refused(words: str, pass_: str = "backward", **more: Any) -> None:
        assert said(pass_, **more) == (INVALID, words)
        assert library.query(pass_, given | more) == -1

    assert said() == said("forward") == (0, "")
    q, h, ends = given["q"], given["h"], given["cu_seqlens"]
    refused("k must be [1, 48, 8, 64], got [1, 49, 8, 64]", q=q[:, 1:])
    refused("packed sequences need B = 1, got 2", q=q.expand(2, -1, -1, -1))
    refused("the number of heads of v must be a multiple of that of q, got 15 and 8", h=h[:, :, 1:])
    refused("the number of heads of v must be a multiple of that of q, got 16 and 0", q=None)
    refused("v must be [1, 48, 16, 64], got [1, 64, 16, 64]", h=h[:, 1:])
    refused("h must be [1, 4, 16, 64, 64], got [1, 4, 16, 64, 32]", h=h[..., :32])
    refused("g must be [1, 49, 16], got [1, 48, 16]", g=given["g"][:, 1:])
    refused("cu_seqlens must be [N + 1] for N sequences, got [0]", cu_seqlens=None)
    refused("cu_seqlens must be contiguous", cu_seqlens=ends.repeat(2)[::2])
    refused(
        "chunk_indices must be [4, 2], got [5, 2]",
        chunk_indices=torch.zeros(5, 2, dtype=torch.int32),
    )
    refused(
        "chunk_indices must be contiguous",
        chunk_indices=torch.zeros(4, 3, dtype=torch.int32)[:, :2],
    )
    refused("o must be [1, 49, 16, 64], got [0, 0, 0, 0]", "forward", o=None)
    refused("do must be [1, 49, 16, 64], got [0, 0, 0, 0]", do_=None)
    for name in ("dq", "dk", "dv", "dh", "dg"):
        wide = given[name].repeat_interleave(2, -1)[..., ::2]
        refused(f"{name} must be contiguous", **{name: wide})
    refused("o must be contiguous", "forward", o=given["o"].repeat_interleave(2, -1)[..., ::2])
    refused("dg must be [1, 1, 49, 16], got [2, 1, 49, 16]", dg=given["dg"].repeat(2, 1, 1, 1))
    refused("scale must be finite and must not underflow in float32, got nan", scale=math.nan)
    # If the caller passes no chunk indices, the workspace holds them.
    assert library.query("forward", given) == library.query("backward", given) == 0
    assert library.query("backward", given | {"chunk_indices": None}) == 8 * 4
    none = torch.zeros(31, dtype=torch.uint8)
    assert library.call("backward", given | {"chunk_indices": None}, none) == WORKSPACE
    # Token strides and numbers of heads are constants of the machine code.
    hint = (
        "and these arguments: make tensors contiguous, or name heads to `kgen build`, as "
        "`--heads` or `--gqa`"
    )
    for other in (
        {"q": torch.zeros(1, 49, 8, 72, dtype=torch.float16)[..., :64]},
        _chunks(folder, "packed", Case(heads=2, group=2, sq=40, sk=9)),
    ):
        assert said("forward", **other) == (
            NO_KERNEL,
            f"no machine code of _forward_kernel for sm_80 {hint}",
        )
    paper.device(86, 4)
    assert said() == (NO_KERNEL, "no machine code for sm_86. Build it with `kgen build --arch`")


BELOW, CONTIGUOUS = "must be less than 2**", " elements apart: make it contiguous"
TOO_LARGE = "is too large, got 8388608: make the tensor contiguous"


@pytest.mark.parametrize(
    ("name", "axis", "power", "words"),
    [
        *((x, 1, 24, f"tokens of {x} {BELOW}24{CONTIGUOUS}") for x in ("q", "k", "v", "g")),
        *((x, 3, 23, f"the last stride of {x} {TOO_LARGE}") for x in ("q", "k", "v")),
        ("h", 3, 23, f"rows of h {BELOW}23{CONTIGUOUS}"),
        ("h", 4, 23, f"the last stride of h {TOO_LARGE}"),
        ("do_", 1, 23, f"tokens of do {BELOW}23{CONTIGUOUS}"),
        ("do_", 3, 23, f"the last stride of do {TOO_LARGE}"),
        ("g_gamma", 0, 23, f"the last stride of g_gamma {TOO_LARGE}"),
    ],
)
def test_strides_are_those_that_kernels_reckon_with(
    folder: Path, name: str, axis: int, power: int, words: str
) -> None:
    paper, library = Paper(folder / "chunks"), Library(folder / "chunks", "chunks")
    paper.device(80, 4)
    paper.begin({})
    made = library.made(_chunks(folder, "chunks", Case(sq=40)))
    backward = library.library.chunks_backward
    assert backward(ctypes.byref(made), None, 0, None) == 0
    getattr(made, name).strides[axis] = 1 << power
    assert backward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error() == f"chunks: {words}"
    getattr(made, name).strides[axis] -= 1
    assert backward(ctypes.byref(made), None, 0, None) == NO_KERNEL


def test_heads_and_states_of_chunks_are_those_of_the_spec(folder: Path) -> None:
    paper, library = Paper(folder / "chunks"), Library(folder / "chunks", "chunks")
    paper.device(80, 4)
    given = _chunks(folder, "chunks", Case(sq=40))
    assert library.query("backward", given) == 0
    assert library.query("backward", given | {"h": given["h"][:, 1:]}) == -1
    assert library.error() == "chunks: h must have a state for each of 3 chunks, got 2"
    assert library.query("backward", given | {"h": given["h"][:, :, 1:]}) == -1
    assert library.error() == "chunks: q must have 2 heads and v 4, got 2 and 3"
    assert library.query("backward", given | {"q": given["q"][:, :, 1:]}) == -1
    assert library.error() == "chunks: q must have 2 heads and v 4, got 1 and 4"


def test_one_pass_of_chunks_has_one_call(folder: Path) -> None:
    paper, library = Paper(folder / "grouped"), Library(folder / "grouped", "grouped", cpp=True)
    paper.device(90, 4)
    paper.begin({})
    given = _chunks(folder, "grouped", Case(heads=8, sq=100))
    assert library.call("forward", given) == 0, library.error()
    assert [one["kernel"] for one in paper.launched] == ["_forward_kernel"]
    assert library.query("forward", given | {"h": given["h"][:, :, 1:]}) == -1
    assert library.error() == "grouped: v must have 2 heads for each head of q, got 15 and 8"
    assert not hasattr(library.library, "grouped_backward")
    assert "backward" not in (folder / "grouped/c/grouped.h").read_text()
    assert not hasattr(library.arguments, "do_")


def _chunks(folder: Path, name: str, case: Case) -> dict[str, Any]:
    """Return the arguments of C, including the outputs."""
    loaded = load(folder / f"{name}.yaml")
    found = chunk_tensors(loaded, case)
    found["do_"] = found.pop("do")
    gradients = {f"d{x}": torch.zeros(found[x].shape, dtype=found[x].dtype) for x in "qkvh"}
    if "g" in found:
        gradients["dg"] = torch.zeros(found["q"].shape[-1] // 64, *found["g"].shape)
    found |= gradients | {"o": torch.zeros_like(found["do_"])}
    if "backward" not in loaded.spec.passes:
        found = {n: x for n, x in found.items() if n not in ("do_", *gradients)}
    return found
