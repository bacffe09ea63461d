"""Loads by TMA and searches of ranges of emitted files, in Triton's interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted, verified
from support.interpreters.tma import by_tma

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify import interpreter
from kgen.verify.families import family_of, problem_of
from kgen.verify.toolchain import import_file
from kgen.verify.worker import case_names

ROOT = Path(__file__).resolve().parents[3]


def emitted(name: str, folder: Path) -> Path:
    """Write a stock spec with tiles that use TMA for all tensors that allow it.

    Return the output folder.
    """
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    (folder / name).mkdir(parents=True)
    for file, text in render_spec(loaded).items():
        (folder / name / file).write_text(by_tma(text))
    return folder


# In order: a mask with a bias, searched ranges, keys with NaN that only the mask hides. Then
# grouped queries, a head dim in two blocks, and packed sequences.
STOCK = ["causal_alibi", "document_causal", "padding", "llama3_gqa", "mla_prefill", "varlen_causal"]


@pytest.mark.parametrize("name", STOCK)
def test_verified(name: str, tmp_path: Path, verdict: Any) -> None:
    folder = emitted(name, tmp_path)
    assert (
        len(re.findall(r"\(\(\), dict\(.*TMA=True\)", (folder / name / "triton.py").read_text()))
        == 3
    )
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    # Half of the cases is enough, because all of them also run with loads by pointers.
    cases = case_names(problem_of(loaded), "forward", "cpu", True)[::2]
    verdict(problem_of(loaded), folder)
    rows = verified([loaded], folder, device="cpu", timeout=200.0, cases=cases)
    wrong = [f"{row['pass']} {row['case']}: {row['message']}" for row in rows if not row["ok"]]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def causal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreter.mend()
    return import_file(emitted("causal", tmp_path) / "causal" / "triton.py", "kgen_test_tma")


TILE = {"TMA": True}


def test_descriptors(causal: Any) -> None:
    x = torch.zeros(2, 3, 40, 128, dtype=torch.bfloat16)
    (found,) = causal._descriptors(TILE, (x, 64, 128))
    assert (found.shape, found.strides, found.block_shape) == (
        [2, 3, 40, 128],
        list(x.stride()),
        [1, 1, 64, 128],
    )
    assert causal._descriptors({"TMA": False}, (x, 64, 128), (x, 64, 128)) == [None, None]


def test_sequences_do_not_see_their_neighbours(tmp_path: Path, verdict: Any) -> None:
    """With TMA, a sequence of NaN between two others does not change a bit of their results."""
    path = emitted("varlen_causal", tmp_path) / "varlen_causal" / "triton.py"
    verdict(problem_of(load(ROOT / "specs/varlen_causal.yaml")), path)
    interpreted(_neighbours, path)


def _neighbours(path: Path) -> None:
    interpreter.mend()
    module: Any = import_file(path, "kgen_test_neighbours")
    lengths = (70, 33, 45)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sum(lengths), 2, 128).bfloat16() for _ in range(4))
    middle = slice(lengths[0], lengths[0] + lengths[1])
    for x in (q, k, v, dout):
        x[middle] = float("nan")

    def run(rows: slice, *ends: int) -> list[torch.Tensor]:
        inputs = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        offsets = torch.tensor([0, *ends], dtype=torch.int32)
        out = module.varlen_causal(*inputs, offsets, offsets)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout[rows])]

    together = run(slice(0, sum(lengths)), 70, 103, 148)
    for rows in (slice(0, 70), slice(103, 148)):
        alone = run(rows, rows.stop - rows.start)
        for got, want in zip(together, alone, strict=True):
            assert torch.equal(got[rows], want)
    assert all(x[middle].isnan().all() for x in together)


@pytest.mark.parametrize(
    "x",
    [
        # rows begin at odd multiples of 2 bytes
        torch.zeros(1, 2, 9, 129, dtype=torch.bfloat16)[..., :128],
        torch.zeros(1, 2, 9, 136, dtype=torch.bfloat16)[
            ..., 1:129
        ],  # the first row begins at an odd multiple of 2 bytes
        torch.zeros(1, 2, 128, 9, dtype=torch.bfloat16).mT,  # elements of a row are not adjacent
        # all rows share memory
        torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16).expand(1, 2, 9, 128),
        torch.zeros(1, 2, 0, 128, dtype=torch.bfloat16),  # nothing to load
    ],
    ids=["rows", "start", "elements", "broadcast", "empty"],
)
def test_tile_without_descriptors(x: torch.Tensor, causal: Any) -> None:
    good = torch.zeros(1, 2, 9, 128, dtype=torch.bfloat16)
    table = [((100, 90), {"TMA": True}), ((90,), {"TMA": False}), ((), {})]
    assert causal._tile(table, 90, good, good) == {"TMA": True}
    assert causal._tile(table, 90, good, x) == {"TMA": False}
    assert causal._tile(table, 80, good, x) == {}


def test_searches_of_sorted_buffers(tmp_path: Path, verdict: Any) -> None:
    """Compare with `torch.searchsorted`: lengths around powers of 256, runs, and values beyond both
    ends.
    """
    folder = emitted("document_causal", tmp_path) / "document_causal"
    path = folder / "searching.py"
    path.write_text(
        (folder / "triton.py").read_text()
        + """

@triton.jit
def _search_kernel(ptr, stride, size, a, b, found_ptr):
    first_a, first_b = _first_at_least(ptr, stride, size, a, b)
    tl.store(found_ptr, first_a)
    tl.store(found_ptr + 1, first_b)
"""
    )
    verdict(problem_of(load(ROOT / "specs/document_causal.yaml")), path)
    # Triton was imported for compiling, so its library cannot be interpreted in this process.
    interpreted(_search, path)


def _search(path: Path) -> None:
    interpreter.mend()
    module: Any = import_file(path, "kgen_test_searching")
    found = torch.zeros(2, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 255, 256, 257, 511, 513, 4000, 65535, 65536, 65537, 66000):
        for step in (1, 40):
            row = (torch.rand(max(size, 1), generator=generator) * size / step).int().sort().values
            spaced = torch.stack([row, -row], 1)[:, 0]  # a stride of two elements
            values = [-1, 0, 1, size // (2 * step), size // step + 1]
            for a, b in zip(values, values[1:] + values[:1], strict=True):
                module._search_kernel[(1,)](spaced, spaced.stride(0), size, a, b, found)
                wanted = torch.searchsorted(row[:size], torch.tensor([a, b], dtype=torch.int32))
                assert found.tolist() == wanted.tolist(), (size, step, a, b)


def test_narrow_values_are_copied_where_they_are_not_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of 32 columns with keys of 64 are copied.

    With 32 columns for both, nothing is copied.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreter.mend()
    texts = {
        n: render_spec(load(ROOT / "tests" / "specs" / f"{n}.yaml"), single=True)[f"{n}.py"]
        for n in ("clusters", "sunk")
    }
    assert "_aligned" not in texts["sunk"]
    path = tmp_path / "triton.py"
    path.write_text(texts["clusters"])
    module: Any = import_file(path, "kgen_test_narrow")
    good = torch.randn(2, 3, 9, 32)
    assert module._aligned(good) is good
    rows, start = (
        torch.zeros(2, 3, 9, 40)[..., :32],
        torch.zeros(2 * 3 * 9 * 32 + 1)[1:].view(2, 3, 9, 32),
    )
    for x in (rows, start):
        copy = module._aligned(x.copy_(good))
        assert copy.data_ptr() != x.data_ptr()
        assert copy.data_ptr() % 16 == 0
        assert all(step % 16 == 0 for step in copy.stride()[:-1])
        assert torch.equal(copy, good)
    assert texts["clusters"].count("_aligned(v)") == 2


def test_calls_to_compile_have_all_that_tma_loads_and_what_it_does_not(tmp_path: Path) -> None:
    """Portable kernels run on Hopper too, with TMA tiles and a bias whose rows TMA cannot load."""
    loaded = load(ROOT / "specs/pair_bias.yaml")
    module: Any = import_file(
        emitted("pair_bias", tmp_path) / "pair_bias/triton.py", "kgen_test_bias"
    )
    problem = problem_of(loaded)
    found = set()

    def called(q: Any, k: Any, v: Any, *, bias: Any, **keywords: Any) -> Any:
        found.add(tuple(module._by_tma(x) for x in (q, k, v, bias[None])))
        raise StopIteration

    for _, call in family_of(problem).compile_calls(problem):
        with pytest.raises(StopIteration):
            call(called)
    assert found == {(True,) * 4, (True, True, True, False), (False,) * 4}
