"""Order and bounds of integers: proofs from the source hold in Python, and a spec promises no
more.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.flex.ascending import facts
from kgen.flex.evaluating import Evaluator
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled

HEAD = """import numpy as np
import torch
lengths = torch.tensor([9, 20, 3, 32])
offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
tokens = torch.arange(128).reshape(2, 64) * 7 % 11
def count(n):
    return torch.arange(n)
"""
MOD = "\ndef mod(b, h, q, k):\n    return (doc[{0}q] == doc[{0}k]) & (q >= k)\n"
PROVED = (
    "torch.repeat_interleave(torch.arange(4), lengths)",
    "torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)",
    "torch.searchsorted(offsets, torch.arange(64), right=True) - 1",
    "torch.bucketize(torch.arange(64), offsets[1:], right=True, out_int32=True)",
    "(tokens == 2).cumsum(-1)",
    "(tokens == 2).int().cumsum(-1, dtype=torch.int32)",
    "torch.arange(64) // 16",
    "torch.repeat_interleave(torch.arange(4), lengths).unsqueeze(0).expand(2, -1)",
    "torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate([9, 20, 3, 32])])",
    "torch.sort(tokens, dim=-1).values",
    "torch.unique_consecutive(torch.arange(64) % 9, return_inverse=True)[1]",
)
OPEN = (
    "torch.repeat_interleave(torch.arange(4), lengths).flip(0)",
    "torch.repeat_interleave(lengths, lengths)",
    "torch.searchsorted(lengths, torch.arange(64))",
    "(tokens == 2).cumsum(0)",
    "(tokens - 9).cumsum(-1)",
    "(tokens == 2).cumsum(-1) - (tokens == 2).long()",
    "torch.tensor([0] * 30 + [1] * 34)",
    "torch.zeros(64, dtype=torch.int32)",
    "-torch.arange(64) // 16",
    "torch.sort(tokens, dim=-1, descending=True).values",
    "torch.repeat_interleave(torch.arange(4), lengths)\ndoc[3] = 9",
    "torch.repeat_interleave(torch.arange(4), lengths)\nview = doc.view(8, 8)\nview[3] = 9",
    "torch.repeat_interleave(torch.arange(4), lengths)\ndoc.neg_()",
    "torch.repeat_interleave(torch.arange(4), lengths)\ntorch.neg(doc, out=doc)",
    "torch.repeat_interleave(torch.arange(4), lengths)\ndoc.numpy()[3] = 9",
    "torch.repeat_interleave(torch.arange(4), lengths)\nnp.negative(doc.numpy(), out=doc.numpy())",
    "torch.repeat_interleave(torch.arange(4), lengths)\nfor row in doc.view(8, 8):\n    row.neg_()",
    "torch.arange(64, 0, step=-1)",
    "torch.arange(64, end=0, step=-1)",
    "torch.cat([torch.arange(32).clamp(min=50), torch.arange(32, 64)])",
    "torch.arange(64).add(torch.arange(64), alpha=-2)",
    "torch.arange(64)\ntorch.sort(doc, descending=True, out=(doc, torch.empty_like(doc)))",
    "torch.arange(64)\ndoc.__setitem__(0, 99)",
    "torch.arange(64)\ndoc.__iadd__(doc.flip(0) * 5)",
    "torch.arange(64)\ntorch._foreach_neg_([doc])",
    "torch.arange(64)\ntorch.from_dlpack(doc)[0] = 99",
)
PARTS = ("doc[5]", "doc.unbind()[5]", "list(doc)[5]", "doc.view(8, 8)[2]", "doc.view(8, 8)[2, 1]")
PART_CHANGES = (
    "part += 99",
    "part.fill_(99)",
    "part[...] = 99",
    "torch.neg_(part)",
    "torch.neg(part, out=part)",
)


def written(doc: str, folder: Path) -> str:
    scope: dict[str, Any] = {}
    exec(HEAD + f"doc = {doc}\n", scope)
    path = folder / "mods.py"
    path.write_text(HEAD + f"doc = {doc}\n" + MOD.format("b, " if scope["doc"].dim() == 2 else ""))
    return settled(imported(str(path), {"mask_mod": "mod"}, Options(name="one")), "one.yaml")[0]


@pytest.mark.parametrize("doc", PROVED)
def test_documents_that_the_source_puts_in_order_are_sorted(doc: str, tmp_path: Path) -> None:
    text = written(doc, tmp_path)
    assert text.count("sorted: true") == 1
    assert "lets kernels skip" not in text
    scope: dict[str, Any] = {}
    exec(HEAD + f"doc = {doc}\n", scope)
    assert (scope["doc"].diff(dim=-1) >= 0).all()
    dtype = str(scope["doc"].dtype).removeprefix("torch.")
    assert f"dtype: {dtype}, sorted: true" in text


@pytest.mark.parametrize("change", PART_CHANGES)
@pytest.mark.parametrize("part", PARTS)
def test_a_change_of_a_row_or_an_element_is_one_of_the_tensor(
    part: str, change: str, tmp_path: Path
) -> None:
    text = written(f"torch.arange(64)\npart = {part}\n{change}", tmp_path)
    assert "sorted: true}" not in text


@pytest.mark.parametrize("doc", OPEN)
def test_for_others_a_line_states_the_gain(doc: str, tmp_path: Path) -> None:
    text = written(doc, tmp_path)
    assert "# if each row of doc ascends, `sorted: true` lets kernels skip tiles\n" in text
    assert "sorted: true}" not in text


def test_an_expr_proves_nothing(tmp_path: Path) -> None:
    """The numbers in an EXPR are placeholders for a shape, so they prove nothing."""
    path = tmp_path / "mods.py"
    path.write_text(
        "import torch\ndef make(doc):\n    return lambda b, h, q, k: doc[q] == doc[k]\n"
    )
    asked = {"mask_mod": "make(docs := torch.arange(64, dtype=torch.int32) // 4)"}
    text, _ = settled(imported(str(path), asked, Options(name="one")), "one.yaml")
    assert "# if each row of docs ascends" in text
    assert "sorted: true}" not in text


STEPS = (
    *(
        "{0}.flip(0)",
        "{0} // 3",
        "{0} * 2",
        "{0} * -1",
        "{0} - 5",
        "5 - {0}",
        "{0} % 7",
        "{0}.to(torch.int32)",
    ),
    *(
        "{0}.sort().values",
        "{0}.sort(descending=True)[0]",
        "{0}.cumsum(0)",
        "{0}.clamp(min=2)",
        "{0} + {1}",
    ),
    *(
        "torch.cat([{0}[:32], {0}[32:]])",
        "torch.cat([{0}[32:], {1}[:32]])",
        "{0}.roll(1)",
        "{0}.abs()",
        "{0} >> 1",
    ),
    *(
        "torch.searchsorted(offsets, {0})",
        "torch.bucketize({0}, {1})",
        "torch.minimum({0}, {1})",
        "{0} - {1}",
    ),
    *(
        "torch.repeat_interleave({0}, 2)[:64]",
        "torch.where({0} > 9, {0}, {1})",
        "{0}[{1} % 64]",
        "{0}.max() - {0}",
    ),
    *(
        "torch.stack([{0}, {1}])[0]",
        "torch.stack([{0}, {1}], 1).view(-1)[:64]",
        "{0}[None].expand(2, -1)[1]",
    ),
    *(
        "({0} > {1}).cumsum(0)",
        "torch.unique({0}.abs() % 64)[{1} % 1]",
        "{0}.view(8, 8).t().reshape(-1)",
    ),
    *(
        "{0}.contiguous()",
        "{0}.clone()",
        "{0}.to(torch.int8).long()",
        "torch.full_like({0}, 3)",
        "{0} * {1}",
    ),
)
CHANGES = (
    "{0}[3] = 50",
    "{0}.neg_()",
    "{0} += {1}",
    "torch.neg({0}, out={0})",
    "{0}.view(8, 8)[2].fill_(7)",
)
STARTS = (
    "torch.arange(64)",
    "count(64)",
    "torch.repeat_interleave(torch.arange(4), lengths)",
    "tokens[0]",
)


def source(seed: int) -> str:
    """Return a source of tensors with 64 integers, each made from others."""
    draw = random.Random(seed)
    lines = [f"x{i} = {draw.choice(STARTS)}" for i in range(2)]
    for i in range(2, 8):
        names = [f"x{draw.randrange(i)}" for _ in range(2)]
        lines.append(f"x{i} = {draw.choice(STEPS).format(*names)}")
        if draw.random() < 0.15:
            lines.append(
                draw.choice(CHANGES).format(f"x{draw.randint(0, i)}", f"x{draw.randint(0, i)}")
            )
    return HEAD + "\n".join(lines) + "\n"


def test_what_is_proved_holds_in_python(tmp_path: Path) -> None:
    """In random sources, no value exceeds its proved bound, and each row that is proved to ascend
    does.
    """
    proved = 0
    for seed in range(80):
        text = source(seed)
        scope: dict[str, Any] = {"print": print}
        try:
            exec(text, scope)
        except RuntimeError:
            continue
        path = tmp_path / f"mods_{seed}.py"
        path.write_text(text)
        module = Evaluator().module(path)
        for i in range(8):
            found, value = facts(module.names[f"x{i}"]), scope[f"x{i}"]
            if found is None:
                continue
            assert found.least <= value.min(), (text, i)
            assert value.max() <= found.most, (text, i)
            assert not found.ascends or (value.diff(dim=-1) >= 0).all(), (text, i)
            proved += found.ascends and found.ordered
    assert proved > 90, torch.__version__
