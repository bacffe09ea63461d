"""Wrong offsets of packed sequences: results are arbitrary, but no kernel accesses memory outside
its tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.wrong_offsets import OFFSETS, TOKENS

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]
MANY = [(7919 * i) % 400 - 150 for i in range(140)]
"""More offsets than one step of the search for a sequence reads."""


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
def test_each_bound_of_attention_is_needed(
    bounded: str, value: str, tmp_path: Path, verdict: Any
) -> None:
    path = _emitted("varlen_causal", tmp_path)
    text = path.read_text()
    assert bounded.format(value) in text
    path.write_text(text.replace(bounded.format(value), value))
    verdict(_problem("varlen_causal"), path)
    assert interpreted(_touched, "varlen_causal", path, OFFSETS)


def _emitted(name: str, folder: Path) -> Path:
    path = folder / f"{name}.py"
    path.write_text(next(iter(render_spec(load(_spec(name)), single=True).values())))
    return path


def _problem(name: str) -> Any:
    return problem_of(load(_spec(name)))


def _spec(name: str) -> Path:
    return next(
        p for p in (ROOT / f / f"{name}.yaml" for f in ("specs", "tests/specs")) if p.exists()
    )


def _touched(name: str, path: Path, offsets: dict[str, list[int]], backward: bool = True) -> Any:
    """Return the offsets for which kernels leave their tensors, with the accesses, or None."""
    from kgen.kernels.attention.verify import inputs
    from kgen.verify import interpreter
    from kgen.verify.memory import watched

    interpreter.mend()
    torch.set_num_threads(1)
    problem, function = _problem(name), getattr(import_file(path, name), name)
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    for what, numbers in offsets.items():
        drawn = inputs.draw(
            problem,
            inputs.Case("x", TOKENS, TOKENS, group=group, packed=((TOKENS, TOKENS),)),
            "cpu",
        )
        wrong = torch.tensor(numbers, dtype=torch.int32)
        plain = torch.linspace(0, TOKENS, len(numbers)).int()
        for sides in ((wrong, wrong), (wrong, plain), (plain, wrong)):
            buffers = {
                n: _repeated(b, t, len(numbers) - 1, problem)
                for n, (b, t) in _named(problem, drawn)
            }
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
    """Repeat a buffer of one sequence for several sequences."""
    sizes = [sequences if s == "B" else n for s, n in zip(buffer.shape, values.shape, strict=True)]
    return values.detach().expand(sizes).contiguous()
