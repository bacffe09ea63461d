"""Lengths and negative indices of tensors whose extents the source does not say, from source and of
live functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import captured, expected, got, same
from torch.nn.attention.flex_attention import create_mask

from kgen.diagnostics import KgenError
from kgen.expr.nodes import measured, variables
from kgen.flex import spec
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled
from kgen.spec.load import Loaded, loads
from kgen.verify.evaluate import evaluate
from kgen.verify.toolchain import import_file

SETUP = """import torch
found = torch.tensor([3, 9, 20, 40, 50])
cu = found[found > 0]
rows = torch.arange(24).reshape(2, 12)
rows = rows[rows[:, 0] >= 0]
"""
RIGHT = {
    "the last": ("", "(q < cu[-1]) & (k < cu[-1])"),
    "the last but one": ("", "k < cu[-2]"),
    "the last by its position": ("", "k < cu[cu.size(0) - 1]"),
    "ahead of the mod": ("n = cu.shape[0] - 1\n", "(k < cu[n]) & (q - k < 2 * n)"),
    "of a row": ("", "k < rows[b, -1] + rows[-1, 0] - rows[b, ..., -3]"),
    "of all but one axis": ("", "k < rows[..., 1, -1]"),
    "len": ("", "(q - k < len(cu)) & (k < cu[len(cu) - 1])"),
    "a length as a divisor": ("", "(k % len(cu) < 3) | (cu[q % cu.numel()] == k)"),
    "lengths of rows": ("", "rows[b, k % rows.shape[1]] < rows.size(-1) * len(rows)"),
    "in functions": (
        "",
        "k < torch.clamp(q, max=len(cu)) + torch.where(q < 9, cu[0], len(cu)) + min(k, len(cu))",
    ),
    "through names": ("w = {'n': len(cu), 'm': (cu[-1], 4)}\n", "k < w['n'] + w['m'][0] // 2"),
    "by default": (
        "def near(q, k, n=len(cu)):\n    return (q - k < n) & (cu[0] < 4)\n",
        "near(q, k)",
    ),
    "comparisons": ("long = len(cu) > 4\n", "long & (k < cu[0])"),
    "the end of sequences": ("", "(k >= cu[b]) & (k < cu[b + 1]) & (q < cu[-1])"),
}


def written(setup: str, value: str) -> str:
    return f"{SETUP}{setup}def mod(b, h, q, k):\n    return {value}\n"


def loaded(path: Path) -> Loaded:
    return settled(imported(str(path), {"mask_mod": "mod"}, Options(name="one")), "one.yaml")[1]


@pytest.mark.parametrize("name", RIGHT)
def test_a_mod_gives_what_python_gives(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text(written(*RIGHT[name]))
    module: Any = import_file(path, "kgen_test_lengths")
    tensors = captured(module.mod) | {n: v for n, v in vars(module).items() if hasattr(v, "dim")}
    own = loaded(path)
    assert any(measured(variable) for variable in variables(own.trees["mask_mod"]))
    same(got(own, "mask_mod", tensors), expected(module.mod, "mask_mod"))


REFUSED = {
    "a loop": ("", "sum(k == cu[i] for i in range(len(cu))) > 0", "cannot be determined"),
    "a function ahead of the mod": (
        "n = min(len(cu), 9)\n",
        "k < cu[0] + n",
        "cannot be determined",
    ),
    "a reduction ahead of the mod": (
        "n = max((len(cu), 9))\n",
        "k < cu[0] + n",
        "cannot be determined",
    ),
    "a sum ahead of the mod": ("n = sum([len(cu), 9])\n", "k < cu[0] + n", "cannot be determined"),
    "a conversion ahead of the mod": (
        "n = abs(len(cu) - 9)\n",
        "k < cu[0] + n",
        "cannot be determined",
    ),
    "a branch": ("n = 3 if len(cu) > 4 else 5\n", "k < cu[0] + n", "cannot be determined"),
    "a test of what it is": ("n = len(cu) is None\n", "(k < cu[0]) & n", "cannot be determined"),
    "an axis": ("", "k < cu[0] + cu.size(1)", "got dimension 1"),
    "a length of no element": (
        "x = torch.load('x.pt')\n",
        "k < x.shape[0]",
        "cannot be determined",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str, tmp_path: Path) -> None:
    setup, value, words = REFUSED[name]
    path = tmp_path / "mods.py"
    path.write_text(written(setup, value))
    with pytest.raises(KgenError) as caught:
        loaded(path)
    assert words in caught.value.diagnostics[0].message


def test_an_index_that_is_no_literal_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text(written("", "k < cu[torch.where(q < 5, -1, 0)]"))
    text, _ = settled(imported(str(path), {"mask_mod": "mod"}, Options(name="one")), "one.yaml")
    assert (
        "# a negative index of cu reads zero in kernels, and counts from the end in torch" in text
    )
    path.write_text(written("", "k < cu[cu.shape[0] - 1]"))
    text, _ = settled(imported(str(path), {"mask_mod": "mod"}, Options(name="one")), "one.yaml")
    assert "below zero" not in text


CU = torch.tensor([0, 5, 12, 30])


def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (
        (q < CU[-1])
        & (k < CU[CU.shape[0] - 2])
        & (q - k < len(CU) * 4)
        & (k >= CU[1 - CU.numel()] - 3)
    )


def test_a_live_function_has_the_lengths_of_its_tensors() -> None:
    own = loads(spec(mask_mod=packed, name="one"), "one.yaml")
    same(got(own, "mask_mod", {"CU": CU}), expected(packed, "mask_mod"))


def test_a_mask_is_that_of_flex_attention(tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text(written("", "(q < cu[-1]) & (k < cu[-2]) & (q - k < len(cu) * 3)"))
    module: Any = import_file(path, "kgen_test_lengths")
    want = create_mask(module.mod, None, None, 64, 64, device="cpu")[0, 0]
    env = {"q_idx": torch.arange(64)[:, None], "kv_idx": torch.arange(64)[None, :], "cu": module.cu}
    assert torch.equal(evaluate(loaded(path).trees["mask_mod"], env, torch), want)
