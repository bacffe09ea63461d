"""Wrong offsets and chunks of packed sequences: no kernel accesses memory outside its tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.wrong_offsets import FAR, OFFSETS, TOKENS

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

CHUNKED = """kernel: chunk_output
name: chunked
dtype: fp16
head_dim: 64
chunk_size: 64
decay: g[i]
varlen: true
targets: {triton: {}, cute: {}}
"""
INDICES = {"right": [[0, 0], [0, 1], [1, 0]], "wrong": [[0, -1], [-3, 5], [FAR, FAR]]}


def test_chunk_output_stays_in_its_tensors(tmp_path: Path, verdict: Any) -> None:
    loaded = loads(CHUNKED, "chunked.yaml")
    text = next(iter(render_spec(loaded, single=True).values()))
    verdict(problem_of(loaded), text)
    assert not interpreted(_touched_by_chunks, _written(text, tmp_path))


@pytest.mark.parametrize(
    ("bounded", "value"),
    [
        ("tl.minimum(tl.maximum({}, 0), N - 1)", "tl.load(chunk_indices_ptr + 2 * chunk)"),
        ("tl.minimum(tl.maximum({}, 0), T)", "tl.load(chunk_indices_ptr + 2 * chunk + 1)"),
        ("tl.minimum(tl.maximum({}, 0), T)", "tl.load(cu_seqlens_ptr + seq)"),
        ("tl.minimum({}, T)", "tl.load(cu_seqlens_ptr + seq + 1)"),
    ],
)
def test_each_bound_of_chunk_output_is_needed(
    bounded: str, value: str, tmp_path: Path, verdict: Any
) -> None:
    loaded = loads(CHUNKED, "chunked.yaml")
    text = next(iter(render_spec(loaded, single=True).values()))
    assert bounded.format(value) in text
    text = text.replace(bounded.format(value), value)
    verdict(problem_of(loaded), text)
    assert interpreted(_touched_by_chunks, _written(text, tmp_path))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_chunks_of_cute_are_of_tokens(arch: str) -> None:
    """The kernels access the rows of a chunk only if the chunk has tokens."""
    text = render_spec(loads(CHUNKED, "chunked.yaml"))[f"cute_{arch}.py"]
    functions = [f for f in ast.parse(text).body if getattr(f, "name", "") in ("_within", "_chunk")]
    cute = SimpleNamespace(jit=lambda f: f, size=len, Tensor=object)
    names: dict[str, Any] = {
        "cute": cute,
        "cutlass": SimpleNamespace(max=max, min=min),
        "Int32": int,
        "BT": 64,
    }
    exec(compile(ast.Module(functions, []), "chunks", "exec"), names)
    for offsets in OFFSETS.values():
        for indices in (
            [(s, c) for s in range(len(offsets) - 1) for c in range(3)],
            *INDICES.values(),
        ):
            places = {(n, i): pair[i] for n, pair in enumerate(indices) for i in (0, 1)}
            for n in range(len(indices)):
                _, _, start, rows = names["_chunk"](TOKENS, offsets, places, n)
                assert start >= 0
                assert rows <= 0 or start + rows <= TOKENS


@pytest.mark.parametrize("end", [-7, 0, 5, TOKENS, TOKENS + 9])
def test_tokens_after_the_last_sequence_are_cleared(end: int) -> None:
    """The threads of all CTAs together write each element of these tokens once, and nothing
    else.
    """
    text = render_spec(loads(CHUNKED, "chunked.yaml"))["cute_sm90.py"]
    functions = [
        f
        for f in ast.parse(text).body
        if getattr(f, "name", "") in ("_within", "_clear_after_sequences")
    ]
    written: list[tuple[int, int, int]] = []
    cute = SimpleNamespace(jit=lambda f: f, size=len, Tensor=object)
    cute.make_rmem_tensor = lambda *_: SimpleNamespace(fill=lambda _: None)
    cute.local_tile = lambda place, _, column: (place[0], place[2], *column)
    cute.autovec_copy = lambda _, place: written.append(place)
    names: dict[str, Any] = {
        "cute": cute,
        "cutlass": SimpleNamespace(
            max=max, min=min, range=lambda *run, unroll: range(*run), Constexpr=int, Float16=None
        ),
        "Float16": None,
        "Int32": int,
        "V": 64,
    }
    exec(compile(ast.Module(functions, []), "tail", "exec"), names)
    places = type("Places", (), {"__getitem__": lambda self, place: place})()
    threads, heads = 2 * 288, 3
    for first in range(threads):
        names["_clear_after_sequences"](places, TOKENS, [0, end], first, threads, heads)
    rest = range(min(max(end, 0), TOKENS), TOKENS)
    assert sorted(written) == [
        (t, h, part) for t in rest for h in range(heads) for part in range(8)
    ]


def _written(text: str, folder: Path) -> Path:
    path = folder / "chunked.py"
    path.write_text(text)
    return path


def _touched_by_chunks(path: Path) -> Any:
    """Return the accesses outside the tensors for three chunks of packed sequences, or None."""
    from kgen.verify import interpreter
    from kgen.verify.memory import watched

    interpreter.mend()
    function = import_file(path, "chunked").chunked
    for what, numbers in OFFSETS.items():
        for indices in (None, *INDICES.values()):
            q, k, v = (torch.randn(1, TOKENS, 1, 64).half().requires_grad_() for _ in "qkv")
            h, g = torch.randn(1, 3, 1, 64, 64).half(), torch.randn(1, TOKENS, 1)
            chosen = None if indices is None else torch.tensor(indices, dtype=torch.int32)
            offsets = torch.tensor(numbers, dtype=torch.int32)
            with watched() as outside:
                function(q, k, v, h, g, cu_seqlens=offsets, chunk_indices=chosen).sum().backward()
            if outside:
                return what, indices, outside[0]
    return None
