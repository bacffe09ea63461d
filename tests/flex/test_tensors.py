"""Tensors that a source slices, joins or loads: their elements, and their shapes in a spec."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import SIZES, captured, expected, got, same

from kgen.diagnostics import KgenError
from kgen.flex import spec as live_spec
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled
from kgen.spec.load import Loaded, loads

HEAD = "import itertools\nimport math\n\nimport numpy as np\nimport torch\n\n"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int32": torch.int32, "int64": torch.int64}
DTYPES |= {"bool": torch.bool, "bf16": torch.bfloat16}
PAIR = "b, h, q, k"

ROWS = {
    "rows in a loop": (
        "mods = torch.tensor([[[0, 5], [9, 4], [20, 30]], [[1, 2], [3, 9], [40, 9]]])",
        "m = q < 0\nfor o, n in mods[b]:\n    m = m | ((k >= o) & (k < o + n))\nreturn m",
    ),
    "a row under two names": (
        "t = torch.arange(128).reshape(64, 2) // 3",
        "lo, hi = t[q]\nreturn (k >= lo) & (k < hi + 5)",
    ),
    "unbind": (
        "t = torch.arange(128).reshape(64, 2) // 3",
        "lo, hi = t[q].unbind(-1)\nreturn (k >= lo) & (k <= hi)",
    ),
    "torch.unbind": (
        "t = torch.arange(6).reshape(3, 2)",
        "a, c, d = torch.unbind(t)\nreturn a[1] + c[0] + d[h % 2] > k",
    ),
    "size": (
        "t = torch.arange(192).reshape(64, 3)",
        (
            "m = q < 0\nfor i in range(t.size(1)):\n    m = m | (k == t[q, i])\n"
            "return m & (t.size(-1) == t.shape[1])"
        ),
    ),
    "size of a row": (
        "t = torch.arange(192).reshape(64, 3)",
        "return t[q, t[q].size(0) - 1] // 3 >= k",
    ),
    "dim and numel": ("t = torch.arange(6).reshape(3, 2)", "return q - k < t.dim() * t.numel()"),
    "zip": (
        "a = torch.tensor([0, 9])\nc = torch.tensor([5, 30])",
        "m = q < 0\nfor x, y in zip(a, c):\n    m = m | ((k >= x) & (k < y))\nreturn m",
    ),
    "enumerate": (
        "t = torch.tensor([3, 1, 4])",
        "return sum((k % 7 == n) * i for i, n in enumerate(t)) > 0",
    ),
    "list": (
        "t = torch.arange(256).reshape(4, 64)\nrows = list(t)",
        "return rows[1][q] // 2 > rows[2][k] // 3",
    ),
    "a tensor under two names": ("lo, hi = torch.arange(128).reshape(2, 64)", None),
    "names of elements": ("t = torch.tensor([5, 40])\nlo, hi = t", "return (k >= lo) & (k < hi)"),
    "unbind of elements": (
        "t = torch.tensor([5, 40])\nlo, hi = t.unbind()",
        "return (k >= lo) & (k < hi)",
    ),
    "a view that is changed": (
        "t = torch.tensor([5, 40])\nlo = t[0]\nt[0] = 20",
        "return (k >= lo) & (k < t[1])",
    ),
    "reversed": ("t = torch.tensor([5, 40])", "hi, lo = reversed(t)\nreturn (k >= lo) & (k < hi)"),
}
"""Tensors, and the body of a mask. The body is None if the read tensor cannot have a name."""
MADE = {
    "meshgrid": (
        (
            "y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing='ij')\n"
            "y = y.flatten()\nx = x.reshape(-1)"
        ),
        "return (y[q] - y[k]).abs() + (x[q] - x[k]).abs() < 3",
    ),
    "meshgrid of xy": (
        "y, x = torch.meshgrid(torch.arange(4), torch.arange(16), indexing='xy')",
        "return y[q // 4, h] + x[k // 4, h] > 3",
    ),
    "meshgrid in a stack": (
        (
            "g = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing='ij'), "
            "-1).view(64, 2)"
        ),
        "return g[q, 0] >= g[k, 1]",
    ),
    "unique": (
        "ids = torch.arange(64) // 7 * 3\nvalues, inverse = torch.unique(ids, return_inverse=True)",
        "return (inverse[q] == inverse[k]) & (values[h] < 9)",
    ),
    "unique_consecutive": (
        "ids = torch.arange(64) // 7\n"
        "_, inverse, counts = ids.unique_consecutive(return_inverse=True, return_counts=True)",
        "return (inverse[q] == inverse[k]) & (counts[h] > 2)",
    ),
    "stack": (
        "t = torch.stack([torch.arange(64), torch.arange(64) // 2])",
        "return t[0, q] >= t[1, k]",
    ),
    "cat": ("t = torch.cat([torch.arange(40), torch.arange(24)])", "return t[q] >= t[k]"),
    "accumulate": (
        "lengths = [3, 4, 5, 9]\nends = torch.tensor(list(itertools.accumulate(lengths)))",
        "return ends[h] > k",
    ),
    "accumulate with a function": (
        "e = torch.tensor(list(itertools.accumulate([3, 1, 5], max, initial=2)))",
        "return e[h] > k",
    ),
    "chain": ("e = torch.tensor(list(itertools.chain([3], (4, 5), [9])))", "return e[h] > k"),
    "product": ("w = sum(x * y for x, y in itertools.product([1, 2], [3, 4]))", "return q - k < w"),
    "pairwise": ("w = sum(y - x for x, y in itertools.pairwise([1, 5, 30]))", "return q - k < w"),
    "load": ("t = torch.load('t.pt')", "return t[q] == t[k]"),
    "load of several": ("t = torch.load('all.pt')['ids']", "return t[q] == t[k]"),
    "from_numpy": (
        "t = torch.from_numpy(np.arange(64, dtype=np.int32) // 9)",
        "return t[q] == t[k]",
    ),
    "nonzero": (
        "kept = torch.arange(64) % 3 == 1\nindex = kept.nonzero().squeeze(-1)",
        "return (index[h] == k) | (q > k)",
    ),
    "nonzero by q": (
        "kept = torch.arange(100) > 9\nindex = torch.nonzero(kept).squeeze(-1)",
        "return index[q] >= index[k] + 2",
    ),
    "nonzero as a tuple": (
        "(index,) = (torch.arange(100) > 9).nonzero(as_tuple=True)",
        "return index[q] >= k",
    ),
    "where of a condition": (
        "index = torch.where(torch.arange(100) > 9)[0]",
        "return index[q] >= k",
    ),
    "chosen by a mask": ("t = torch.arange(100)\nt = t[t > 9]", "return t[q] >= k"),
    "max": (
        "t = torch.randn(64, 5)\nbest, at = t.max(dim=1)",
        "return (best[q] > 1) | (at[k] == h)",
    ),
    "max under its names": ("at = torch.randn(64, 5).max(1).indices", "return at[q] == at[k]"),
    "sort": ("t, order = torch.sort(torch.randn(64))", "return (t[q] > 0) & (order[k] > q)"),
    "split": ("a, c = torch.arange(128).split(64)", "return a[q] + 64 >= c[k]"),
    "chunk": (
        "a, c = torch.arange(128).reshape(2, 64).chunk(2, dim=0)",
        "return a[0, q] + 64 >= c[0, k]",
    ),
    "columns": ("a, c = torch.arange(128).reshape(64, 2).unbind(-1)", "return a[q] >= c[k]"),
    "permute": (
        "t = torch.arange(128).reshape(2, 1, 64).permute(2, 0, 1).squeeze(-1)",
        "return t[q, 0] >= t[k, 1] - 64",
    ),
    "dtype of a logarithm": ("t = torch.log10(torch.arange(1, 65))", "return t[q] >= t[k]"),
    "dtype of a choice": (
        "t = torch.where(torch.arange(64) % 3 == 1, 2, 5)",
        "return t[q] >= t[k]",
    ),
    "dtype of a sum": ("t = (torch.arange(64) % 3 == 1) + 1", "return t[q] >= t[k]"),
    "dtype of a mix": ("t = torch.arange(64).int() + torch.arange(64)", "return t[q] >= t[k]"),
    "dtype of halves": ("t = torch.arange(64).half() * 0.5", "return t[q] >= t[k]"),
    "dtype of a question": ("t = torch.isnan(torch.randn(64))", "return t[q] | (q >= k)"),
}
"""Sources of one mask each."""


def written(name: str, table: dict[str, Any], path: Path) -> str:
    made, body = table[name]
    body = body or "return lo[q] >= hi[k]"
    text = f"{HEAD}{made}\n\n\ndef mod({PAIR}):\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    path.write_text(text)
    return text


def ran(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    torch.manual_seed(0)
    found.loader.exec_module(module)
    return module


def assert_same(loaded: Loaded, module: ModuleType) -> None:
    """Check that the mask has the values of the function, and that shapes and dtypes are the
    spec's.
    """
    known = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)} | captured(
        module.mod
    )
    for name, buffer in loaded.spec.buffers.items():
        assert DTYPES[buffer.dtype] == known[name].dtype, name
        extents = [SIZES.get(n, n) for n in buffer.shape]
        assert len(extents) == known[name].dim(), name
        assert all(
            n in ("any", real) for n, real in zip(extents, known[name].shape, strict=True)
        ), name
    same(got(loaded, "mask_mod", known), expected(module.mod, "mask_mod"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save((torch.arange(64) // 9).int(), "t.pt")
    torch.save({"ids": (torch.arange(64) // 9).int()}, "all.pt")
    return tmp_path


ALL = [(name, table) for table in (ROWS, MADE) for name in table]


@pytest.mark.parametrize(("name", "table"), ALL, ids=[name for name, _ in ALL])
def test_a_source_means_the_same(name: str, table: dict[str, Any], folder: Path) -> None:
    written(name, table, folder / "mods.py")
    spec = imported("mods.py", {"mask_mod": "mod"}, Options(name="one"))
    assert_same(loads(spec.text(), "one.yaml"), ran(folder / "mods.py"))


@pytest.mark.parametrize(
    "name", [name for name in ROWS if name not in ("list", "a tensor under two names")]
)
def test_a_live_function_means_the_same(name: str, folder: Path) -> None:
    written(name, ROWS, folder / "live_mods.py")
    module = ran(folder / "live_mods.py")
    assert_same(loads(live_spec(mask_mod=module.mod, name="one"), "one.yaml"), module)


@pytest.mark.parametrize(
    "name", ["load", "load of several", "from_numpy", "nonzero", "nonzero by q", "chosen by a mask"]
)
def test_extents_that_depend_on_values_are_open(name: str, folder: Path) -> None:
    written(name, MADE, folder / "mods.py")
    text, loaded = settled(
        imported("mods.py", {"mask_mod": "mod"}, Options(name="one")), "one.yaml"
    )
    (buffer,) = loaded.spec.buffers.values()
    assert buffer.shape == ("any",)
    assert "its extents depend on unknown values: any" in text


SLOPES = """
def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


def make(heads):
    slopes = torch.tensor(get_slopes(heads))

    def mod(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    return mod
"""


@pytest.mark.parametrize("heads", [4, 6])
def test_the_slopes_of_alibi(heads: int, folder: Path) -> None:
    (folder / "slopes.py").write_text(HEAD + SLOPES)
    spec = imported("slopes.py", {"score_mod": f"make({heads})"}, Options(name="one"))
    loaded = loads(spec.text(), "one.yaml")
    assert {n: (b.shape, b.dtype) for n, b in loaded.spec.buffers.items()} == {
        "slopes": (("HQ",), "fp32")
    }
    function = ran(folder / "slopes.py").make(heads)
    same(got(loaded, "score_mod", captured(function)), expected(function, "score_mod"), 1e-6)


@pytest.mark.parametrize(
    ("made", "body", "said"),
    [
        ("t = torch.load('t.pt')", "lo, hi = t[q]\nreturn lo > hi", "whose length is unknown here"),
        (
            "t = torch.zeros(8, 2)[:4]",
            "for x in t:\n    q = q + x[0]\nreturn q > k",
            "whose length is unknown",
        ),
        (
            "t = torch.zeros(8, 2)",
            "a, c = t.unbind(-1)\nreturn a[q] > c[k]",
            "returns columns here",
        ),
        (
            "t = torch.zeros(8, 2)",
            "a, c, d = t[q]\nreturn a > c",
            "cannot unpack 2 values into 3 names",
        ),
        ("t = torch.zeros(8, 2)", "return q > t.size(5)", "Python cannot compute this"),
        (
            "t = torch.zeros(3)",
            "for x in q:\n    k = k + x\nreturn q > k",
            "a loop runs over a value of the pair",
        ),
        (
            "t = torch.load('t.pt')\nn = 1 if isinstance(t, dict) else 2",
            "return q - k < n",
            "type of this element",
        ),
        ("t = torch.load('t.pt')['n']", "return q - k < t", "`t` is a whole tensor here"),
        (
            "t = torch.ones(3)\na = t[0] * 1\nt[0] = 7",
            "return q - k < a",
            "`t` is changed after this element",
        ),
        (
            "t = torch.ones(3)\na = t[0].clone()\nt *= 7",
            "return q - k < a",
            "`t` is changed after this element",
        ),
        (
            "t = torch.ones(3)\na = t[0] + 1\nt.mul_(7)",
            "return q - k < a",
            "`t` is changed after this element",
        ),
        (
            "t = torch.zeros(3)\nlo, hi = torch.load('x').split(3)",
            "return lo[q] > hi[k]",
            "the number of parts",
        ),
    ],
)
def test_what_is_not_known_is_refused(made: str, body: str, said: str, folder: Path) -> None:
    written("it", {"it": (made, body)}, folder / "mods.py")
    with pytest.raises(KgenError, match=said):
        imported("mods.py", {"mask_mod": "mod"}, Options(name="one"))
