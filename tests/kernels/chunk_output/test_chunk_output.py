"""chunk_output: its reference against a loop over tokens, its plan, and its launcher."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from support.interpreters.own_process import interpreted

from kgen.bench.options import BenchOptions
from kgen.bench.running import bench_specs
from kgen.diagnostics import KgenError
from kgen.expr.nodes import Const
from kgen.expr.unparse import show
from kgen.kernels.chunk_output.bench.shape import Shape
from kgen.kernels.chunk_output.explaining import explain_chunk_output
from kgen.kernels.chunk_output.plan.planning import bytes_per_token, plan_chunk_output
from kgen.kernels.chunk_output.verify.cases import reference
from kgen.kernels.chunk_output.verify.inputs import cases, draw
from kgen.kernels.chunk_output.verify.problem import problem_of
from kgen.kernels.chunk_output.verify.reference import (
    Call,
    chunk_indices_of,
    chunk_output,
    chunks_of,
)
from kgen.pages.text import text as printed
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load, loads
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]

H, HV, K, V, BT = 2, 4, 3, 5, 4
HEAD = "kernel: chunk_output\nname: sample\ndtype: bf16\nhead_dim: 128\n"


def spec(text: str = "") -> Loaded:
    return loads(HEAD + text, "sample.yaml")


def drawn(lengths: list[int], batch: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    T, NT = sum(lengths), len(chunk_indices_of(lengths, BT))
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, HV, V), "h": (NT, HV, K, V), "g": (T, HV)}
    inputs = {n: torch.randn(batch, *shape, dtype=torch.float64) for n, shape in shapes.items()}
    inputs["g"] = -inputs["g"].abs()
    return inputs | {"g_gamma": -torch.rand(HV, dtype=torch.float64)}


def by_token(t, lengths, scale, base, exponent):
    """Return the output by its definition.

    `exponent(b, t, i, h)` is c at token t, which has index i in its chunk.
    """
    o = torch.zeros_like(t["v"])
    starts = [0, *accumulate(lengths)]
    for b in range(o.shape[0]):
        for number, (n, chunk) in enumerate(chunk_indices_of(lengths, BT)):
            first = starts[n] + chunk * BT
            for now in range(first, min(first + BT, starts[n + 1])):
                for h in range(HV):
                    q, c = t["q"][b, now, h // (HV // H)], exponent(b, now, now - first, h)
                    row = base**c * (q @ t["h"][b, number, h])
                    for j in range(first, now + 1):
                        decay = base ** (c - exponent(b, j, j - first, h))
                        row = row + decay * (q @ t["k"][b, j, h // (HV // H)]) * t["v"][b, j, h]
                    o[b, now, h] = scale * row
    return o


@pytest.mark.parametrize(("lengths", "batch"), [([5, 0, 9, 1], 1), ([11], 2), ([4], 1), ([0], 1)])
@pytest.mark.parametrize("base", ["e", 2])
def test_reference_is_the_sum_over_tokens(lengths, batch, base):
    t = drawn(lengths, batch)
    decay = spec("decay: g[i] + (i + 1) * g_gamma[h] + h / HV\n").trees["decay"]
    got = chunk_output(
        t, chunks_of(lengths, BT, batch), Call(decay=decay, gate_base=base, scale=0.3)
    )
    want = by_token(
        t,
        lengths,
        0.3,
        math.e if base == "e" else 2.0,
        lambda b, now, i, h: float(t["g"][b, now, h] + (i + 1) * t["g_gamma"][h]) + h / HV,
    )
    torch.testing.assert_close(got.o, want)


def test_layouts_of_the_reference_agree():
    lengths = [5, 0, 9, 1]
    t, chunks = drawn(lengths, 1), chunks_of([5, 0, 9, 1], BT)
    want = chunk_output(t, chunks)
    padded = torch.full((1, chunks.live.numel(), HV, V), torch.nan, dtype=torch.float64)
    padded[0, chunks.live.reshape(-1)] = t["v"][0]
    other = t | {"v": padded, "h": t["h"].mT}
    do = torch.randn_like(want.o)
    got = chunk_output(
        other, chunks, Call(state_layout="vk", padded=True, do=do, wanted=("q", "k", "v", "h"))
    )
    again = chunk_output(t, chunks, Call(do=do, wanted=("q", "k", "v", "h")))
    torch.testing.assert_close(got.o, want.o)
    torch.testing.assert_close(got.grads["q"], again.grads["q"])
    torch.testing.assert_close(got.grads["h"].mT, again.grads["h"])
    torch.testing.assert_close(got.grads["v"][0, chunks.live.reshape(-1)], again.grads["v"][0])
    assert (got.grads["v"][0, ~chunks.live.reshape(-1)] == 0).all()


def test_a_steep_gate_of_a_chunk_that_is_not_full():
    """Rows past the end have no exponent to subtract, which could make infinities and then NaN."""
    t = drawn([BT - 1], 1)
    t["g"] = -torch.arange(1.0, BT, dtype=torch.float64)[None, :, None].expand(1, -1, HV) * 1e4
    do, decay = torch.randn_like(t["v"]), spec("decay: g[i]\n").trees["decay"]
    wanted = ("q", "k", "v", "h", "g")
    got, want = (
        chunk_output(t, chunks_of([BT - 1], size), Call(decay=decay, do=do, wanted=wanted))
        for size in (BT, BT - 1)
    )
    assert got.natural is not None
    assert torch.isfinite(got.natural).all()
    torch.testing.assert_close([got.o, *got.grads.values()], [want.o, *want.grads.values()])


def test_plan_of_a_gate():
    plan = plan_chunk_output(spec("decay: g[i]\ngate_base: 2\n"))
    assert plan.plain_gate
    assert plan.gates == ("g",)
    assert isinstance(plan.slope, Const)
    assert not plan.natural


def test_plan_of_an_expression():
    plan = plan_chunk_output(spec("decay: g[i] * 2 + (i + 1) * g_gamma[h]\n"))
    assert plan.gates == ("g", "g_gamma")
    assert plan.slope is not None
    assert show(plan.slope) == "2"
    assert not plan.plain_gate


@pytest.mark.parametrize("text", ["", "passes: [forward]\n"])
def test_plan_without_decay(text):
    plan = plan_chunk_output(spec(text))
    assert plan.exponent is None
    assert plan.slope is None
    assert plan.backward == (not text)


def test_bytes_of_the_shape_that_is_measured():
    plan = plan_chunk_output(spec("decay: g[i]\n"))
    assert bytes_per_token(plan, 16, 32) == 41_088
    assert bytes_per_token(plan, 16, 32, backward=True) == 2 * 41_088 - 8192


CHUNKED = [
    path
    for path in sorted((ROOT / "specs").glob("*.yaml"))
    if "kernel: chunk_output" in path.read_text()
]


CORNERS = sorted((ROOT / "tests" / "specs").glob("chunk_*.yaml"))


@pytest.mark.parametrize("path", CHUNKED + CORNERS, ids=lambda path: path.stem)
def test_what_is_expected_can_be_stored(path, verdict):
    """In every case, the float64 results are finite in the dtype of the result."""
    problem = problem_of(load(path))
    verdict(problem)
    names = {case.name for case in cases(problem, quick=True)} | {"large"}
    for case in cases(problem, quick=False):
        if case.name in names:
            inputs = draw(problem, case, "cpu")
            wanted = tuple(inputs.tensors) if "backward" in problem.passes else ()
            wanted = tuple(name for name in wanted if name != "g_gamma")
            truth = reference(problem, inputs, wanted, exact=True)
            for name, value in {"o": truth.o, **truth.grads}.items():
                stored = value.to(inputs.tensors.get(name, inputs.tensors["q"]).dtype)
                assert torch.isfinite(stored).all(), f"{case.name}: {name}"


@pytest.mark.parametrize("path", CHUNKED, ids=lambda path: path.stem)
def test_every_spec_is_explained(path):
    loaded = load(path)
    text = printed(explain_chunk_output(loaded))
    assert (
        f"c(i) = {loaded.spec.decay.written}" in text
        if loaded.spec.decay
        else "None: a pair" in text
    )
    assert ("41,088 bytes" in text) == (
        path.stem in ("gated_delta_output", "gated_delta_output_varlen")
    )
    assert "Call(" not in text


def test_chunk_indices_of_the_launcher(verdict):
    """Includes more sequences than a program sums at once, spare chunks without tokens, and both
    integer types.
    """
    emitted = ROOT / "generated/gated_delta_output_fla/triton.py"
    verdict(problem_of(load(ROOT / "specs/gated_delta_output_fla.yaml")), emitted)
    lengths = [0, 5, 64, 0, 65, 20_000, 0] + [3, 0, 129] * 100 + [0]
    want = chunk_indices_of(lengths, 64)
    for found in interpreted(_chunk_indices, lengths, len(want) + 2):
        assert [tuple(pair) for pair in found[: len(want)]] == want
        assert all(chunk * 64 >= lengths[n] for n, chunk in found[len(want) :])


def _chunk_indices(lengths: list[int], chunks: int) -> list[list[list[int]]]:
    module = import_file(
        ROOT / "generated/gated_delta_output_fla/triton.py", "emitted_for_its_indices"
    )
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    return [
        module._chunk_indices(cu_seqlens.to(bits), chunks).tolist()
        for bits in (torch.int32, torch.int64)
    ]


def test_benchmarks_run_dry(tmp_path):
    """Run one sequence and ragged ones, against eager and a copy. fla is skipped for a decay that
    it lacks.
    """
    spec_file = tmp_path / "small.yaml"
    decay = "decay: g[i] / 2 + g[i] / 2\n"
    text = HEAD.replace("128", "64").replace("sample", "small") + decay
    spec_file.write_text(text + "varlen: true\nchunk_size: 16\nv_layout: chunk_padded\n")
    folder = tmp_path / "generated" / "small"
    folder.mkdir(parents=True)
    for name, source in render_spec(load(spec_file)).items():
        (folder / name).write_text(source)
    out = tmp_path / "benchmarks"
    options = BenchOptions(("fla", "eager"), "1x40x1x2", out, device="cpu")
    rows = bench_specs([load(spec_file)], tmp_path / "generated", options)
    passes = [
        f"{pass_} 40{packed}" for packed in ("", " in 2") for pass_ in ("forward", "backward")
    ]
    found = [(row["pass"], row["peer"], row["error"]) for row in rows]
    assert [(pass_, peer) for pass_, peer, error in found if error is None] == [
        (pass_, peer) for pass_ in passes for peer in ("kgen", "eager", "copy")
    ]
    assert all(error is None for *_, error in found)
    assert (out / "interpreter" / "small.json").is_file()


def test_sizes_of_benchmarks():
    assert Shape.parse("4096") == Shape(tokens=(4096,))
    assert Shape.parse("2x4096x4x8") == Shape(2, (4096,), 4, 8)
    for wrong in ("4096x2", "1x64x3x4", "0"):
        with pytest.raises(KgenError, match="not a shape"):
            Shape.parse(wrong)


def test_tokens_too_far_apart_are_refused(tmp_path):
    """Offsets within a chunk have 32 bits. Tensors without memory are enough to test the check."""
    source = next(
        iter(
            render_spec(
                load(ROOT / "specs/linear_attention_output.yaml"), ["triton"], single=True
            ).values()
        )
    )
    (tmp_path / "emitted.py").write_text(source)
    function = import_file(
        tmp_path / "emitted.py", "emitted_for_its_strides"
    ).linear_attention_output

    def tensor(*shape, stride=None):
        strides = torch.empty(shape, device="meta").stride()
        strides = (strides[0], stride or strides[1], *strides[2:])
        return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")

    k, v, h = tensor(1, 64, 2, 128), tensor(1, 64, 2, 128), tensor(1, 1, 2, 128, 128)
    assert function(tensor(1, 64, 2, 128), k, v, h).shape == v.shape
    with pytest.raises(ValueError, match="strides between"):
        function(tensor(1, 64, 2, 128, stride=2**24), k, v, h)


def test_packing_that_is_no_tensor_of_integers_there_is_refused(tmp_path):
    source = next(
        iter(
            render_spec(
                load(ROOT / "specs/gated_delta_output_varlen.yaml"), ["triton"], single=True
            ).values()
        )
    )
    (tmp_path / "emitted.py").write_text(source)
    function = import_file(
        tmp_path / "emitted.py", "emitted_for_its_packing"
    ).gated_delta_output_varlen
    q, v, h = (
        torch.zeros(s).bfloat16()
        for s in ((1, 70, 16, 128), (1, 128, 32, 128), (1, 2, 32, 128, 128))
    )
    g, ends, chunks = torch.zeros(1, 70, 32), torch.tensor([0, 70]), torch.tensor([[0, 0], [0, 1]])

    def refused(error, words, cu_seqlens=ends, chunk_indices=chunks):
        with pytest.raises(error, match=words):
            function(q, q, v, h, g, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)

    for wrong in (chunks.float(), chunks.bool(), chunks.short(), chunks.tolist()):
        refused(TypeError, "chunk_indices must be a tensor of int32 or int64", chunk_indices=wrong)
    for wrong in (ends.float(), ends.tolist(), None):
        refused(TypeError, "cu_seqlens must be a tensor of int32 or int64", cu_seqlens=wrong)
    refused(ValueError, "chunk_indices must be on cpu, got meta", chunk_indices=chunks.to("meta"))
    refused(ValueError, "cu_seqlens must be on cpu, got meta", cu_seqlens=ends.to("meta"))
    refused(ValueError, r"cu_seqlens must be \[N \+ 1\], got \[1\]", cu_seqlens=ends[:1])
    refused(ValueError, r"chunk_indices must be \[2, 2\], got \[1, 2\]", chunk_indices=chunks[:1])
