"""Offsets of packed sequences that are wrong: what comes out is anything, but no kernel leaves its tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from apart import interpreted
from offsets import FAR, OFFSETS, TOKENS

from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parent.parent
MANY = [(7919 * i) % 400 - 150 for i in range(140)]
"""More than the search for a sequence looks at in one step."""


def test_attention_stays_in_its_tensors(tmp_path: Path, verdict: Any) -> None:
    path = _emitted("packed_learned", tmp_path)
    verdict(_problem("packed_learned"), path)
    assert not interpreted(_touched, "packed_learned", path, OFFSETS)


def test_attention_to_many_sequences_stays_in_its_tensors(tmp_path: Path, verdict: Any) -> None:
    path = _emitted("packed_narrow", tmp_path)
    verdict(_problem("packed_narrow"), path)
    assert not interpreted(_touched, "packed_narrow", path, {"many": MANY}, False)


@pytest.mark.parametrize(
    ("bounded", "value"),
    [
        ("tl.minimum(tl.maximum({}, 0), total)", "tl.load(cu_seqlens_ptr + b)"),
        ("tl.minimum({}, total)", "tl.load(cu_seqlens_ptr + after)"),
        ("tl.minimum(tl.maximum({}, 0), others)", "tl.load(cu_others_ptr + b)"),
        ("tl.minimum({}, others)", "tl.load(cu_others_ptr + after)"),
        ("tl.minimum({}, TQ)", "tl.load(cu_seqlens_q_ptr + B)"),
        ("tl.maximum({}, 1)", "tl.sum(((probe < count) & (starts <= slot)).to(tl.int32), 0)"),
        ("tl.maximum({}, 0)", "slot - begin // BLOCK - b"),
    ],
)
def test_each_bound_of_attention_is_needed(bounded: str, value: str, tmp_path: Path, verdict: Any) -> None:
    path = _emitted("varlen_causal", tmp_path)
    text = path.read_text()
    assert bounded.format(value) in text
    path.write_text(text.replace(bounded.format(value), value))
    verdict(_problem("varlen_causal"), path)
    assert interpreted(_touched, "varlen_causal", path, OFFSETS)


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
    text = render_spec(loaded)["triton.py"]
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
def test_each_bound_of_chunk_output_is_needed(bounded: str, value: str, tmp_path: Path, verdict: Any) -> None:
    loaded = loads(CHUNKED, "chunked.yaml")
    text = render_spec(loaded)["triton.py"]
    assert bounded.format(value) in text
    text = text.replace(bounded.format(value), value)
    verdict(problem_of(loaded), text)
    assert interpreted(_touched_by_chunks, _written(text, tmp_path))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_chunks_of_cute_are_of_tokens(arch: str) -> None:
    """What the kernels read and write are the rows of a chunk, where it says that there are some."""
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
        for indices in ([(s, c) for s in range(len(offsets) - 1) for c in range(3)], *INDICES.values()):
            places = {(n, i): pair[i] for n, pair in enumerate(indices) for i in (0, 1)}
            for n in range(len(indices)):
                _, _, start, rows = names["_chunk"](TOKENS, offsets, places, n)
                assert start >= 0
                assert rows <= 0 or start + rows <= TOKENS


def _written(text: str, folder: Path) -> Path:
    path = folder / "chunked.py"
    path.write_text(text)
    return path


def _touched_by_chunks(path: Path) -> Any:
    """As `_touched`, for three chunks of packed sequences."""
    from memory import watched

    from kgen.verify import interpreter

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


def _emitted(name: str, folder: Path) -> Path:
    path = folder / f"{name}.py"
    path.write_text(render_spec(load(_spec(name)))["triton.py"])
    return path


def _problem(name: str) -> Any:
    return problem_of(load(_spec(name)))


def _spec(name: str) -> Path:
    return next(p for p in (ROOT / f / f"{name}.yaml" for f in ("specs", "tests/specs")) if p.exists())


def _touched(name: str, path: Path, offsets: dict[str, list[int]], backward: bool = True) -> Any:
    """For which offsets kernels leave their tensors, and what they do there; None if they do not."""
    from memory import watched

    from kgen.kernels.attention.verify import inputs
    from kgen.verify import interpreter

    interpreter.mend()
    torch.set_num_threads(1)
    problem, function = _problem(name), getattr(import_file(path, name), name)
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    for what, numbers in offsets.items():
        drawn = inputs.draw(
            problem, inputs.Case("x", TOKENS, TOKENS, group=group, packed=((TOKENS, TOKENS),)), "cpu"
        )
        wrong = torch.tensor(numbers, dtype=torch.int32)
        plain = torch.linspace(0, TOKENS, len(numbers)).int()
        for sides in ((wrong, wrong), (wrong, plain), (plain, wrong)):
            buffers = {n: _repeated(b, t, len(numbers) - 1, problem) for n, (b, t) in _named(problem, drawn)}
            operands = [x.detach().requires_grad_(backward) for x in (drawn.q, drawn.k, drawn.v)]
            with watched() as outside:
                out = function(*operands, *sides, **buffers, **drawn.runtime)
                if backward:
                    out.backward(drawn.dout)
            if outside:
                return what, outside[0]
    return None


def _named(problem: Any, drawn: Any) -> list[Any]:
    return [(b.name, (b, drawn.buffers[b.name])) for b in problem.buffers]


def _repeated(buffer: Any, values: torch.Tensor, sequences: int, problem: Any) -> torch.Tensor:
    """A buffer of one sequence for several."""
    sizes = [sequences if s == "B" else n for s, n in zip(buffer.shape, values.shape, strict=True)]
    return values.detach().expand(sizes).contiguous()
