"""Bad sources: one precise message at its place, exit code 2, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.running.pace import within

from kgen.cli import app

HEAD = "import random\nimport math\nimport os\nimport numpy as np\nimport torch\n"
BIAS = "bias = torch.zeros(8, 4)\n"
WHOLE = {
    # name: (source after HEAD, options, code, place, message)
    "branch": (
        "def mod(b, h, q, k):\n    if q > k:\n        return h > 1\n    return h > 0\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:8",
        "a branch depends on the pair",
    ),
    "conditional": (
        "def mod(s, b, h, q, k):\n    return s if q > k else -s\n",
        ["--score", "mod"],
        "data-dependent",
        "mods.py:7:17",
        "torch.where",
    ),
    "and": (
        "def mod(b, h, q, k):\n    return q > k and h > 1\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:12",
        "`&`",
    ),
    "not": (
        "def mod(b, h, q, k):\n    return not q > k\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:12",
        "`~`",
    ),
    "assert in a mod": (
        "W = 4\ndef mod(b, h, q, k):\n    assert W > 100, 'wide'\n    return q - k < W\n",
        ["--mask", "mod"],
        "raises",
        "mods.py:8:5",
        "an assertion of the source fails here",
    ),
    "chain": (
        "def mod(b, h, q, k):\n    return 0 <= q - k < 8\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:12",
        "`&`",
    ),
    "loop": (
        "def mod(b, h, q, k):\n    for i in range(q):\n        k = k + i\n    return k > q\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:14",
        "the number of loop iterations",
    ),
    "while": (
        "def mod(b, h, q, k):\n    while q > 0:\n        q = q - 1\n    return q > k\n",
        ["--mask", "mod"],
        "data-dependent",
        "mods.py:7:11",
        "a branch depends on the pair",
    ),
    "reduction": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + bias[q].sum()\n",
        ["--score", "mod"],
        "reduction",
        "mods.py:8:16",
        "`.sum()` is a reduction",
    ),
    "infinite factor": (
        'def mod(s, b, h, q, k):\n    return s + (q < k).float() * -float("inf")\n',
        ["--score", "mod"],
        "not-in-language",
        "mods.py:7:16",
        "a product with infinity",
    ),
    "dot": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + torch.dot(bias[q], bias[k])\n",
        ["--score", "mod"],
        "reduction",
        "mods.py:8:16",
        "`torch.dot` is a reduction",
    ),
    "matmul": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + bias[q] @ bias[k]\n",
        ["--score", "mod"],
        "reduction",
        "mods.py:8:16",
        "`@` is a reduction",
    ),
    "random": (
        "def mod(s, b, h, q, k):\n    return s + torch.randn(())\n",
        ["--score", "mod"],
        "randomness",
        "mods.py:7:16",
        "random",
    ),
    "random of Python": (
        "def mod(s, b, h, q, k):\n    return s * random.random()\n",
        ["--score", "mod"],
        "randomness",
        "mods.py:7:16",
        "`random.random`",
    ),
    "dropout": (
        "def mod(s, b, h, q, k):\n    return torch.nn.functional.dropout(s)\n",
        ["--score", "mod"],
        "randomness",
        "mods.py:7:12",
        "random",
    ),
    "other package": (
        "def mod(s, b, h, q, k):\n    return np.tanh(s)\n",
        ["--score", "mod"],
        "other-package",
        "mods.py:7:12",
        "`numpy.tanh`",
    ),
    "math": (
        "def mod(s, b, h, q, k):\n    return math.tanh(s)\n",
        ["--score", "mod"],
        "other-package",
        "mods.py:7:12",
        "torch.tanh",
    ),
    "missing argument": (
        "def window(n):\n    return lambda b, h, q, k: q - k < n\n",
        ["--mask", "window()"],
        "bad-call",
        "--mask:1:1",
        "`window` needs its argument `n`",
    ),
    "not called": (
        "def window(n):\n    return lambda b, h, q, k: q - k < n\n",
        ["--mask", "window"],
        "bad-call",
        "--mask:1:1",
        "call it if it returns one: `window(n)`",
    ),
    "unknown": (
        "def causal(b, h, q, k):\n    return q >= k\n",
        ["--mask", "casual"],
        "unknown-name",
        "--mask:1:1",
        "the source has `causal`",
    ),
    "tensor for a function": (
        BIAS + "def causal(b, h, q, k):\n    return q >= k\n",
        ["--mask", "bias"],
        "bad-call",
        "--mask:1:1",
        "`bias` is a tensor, expected a function of a pair",
    ),
    "method of a tensor for a function": (
        BIAS + "def causal(b, h, q, k):\n    return q >= k\n",
        ["--mask", "bias.t().abs"],
        "bad-call",
        "--mask:1:1",
        "hint: the source has `causal`",
    ),
    "made in a mod": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + torch.cumsum(bias, 0)[q, k]\n",
        ["--score", "mod"],
        "no-name",
        "mods.py:8:16",
        "a tensor without a name is read",
    ),
    "unknown name inside": (
        "def causal(b, h, q, k):\n    return q >= key\n",
        ["--mask", "causal"],
        "unknown-name",
        "mods.py:7:17",
        "`key` is not defined",
    ),
    "score for mask": (
        "def mod(s, b, h, q, k):\n    return s\n",
        ["--mask", "mod"],
        "bad-call",
        "--mask:1:1",
        "a mask_mod takes (b, h, q_idx, kv_idx)",
    ),
    "score for mask, hint": (
        "def mod(s, b, h, q, k):\n    return s\n",
        ["--mask", "mod"],
        "bad-call",
        "--mask:1:1",
        "it has the parameters of a score_mod: name it with `--score`",
    ),
    "mask for score, hint": (
        "def mod(b, h, q, k):\n    return q >= k\n",
        ["--score", "mod"],
        "bad-call",
        "--score:1:1",
        "it has the parameters of a mask_mod: name it with `--mask`",
    ),
    "nothing": (
        "def mod(s, b, h, q, k):\n    s * 2\n",
        ["--score", "mod"],
        "bad-call",
        "mods.py:6:1",
        "returns None",
    ),
    "no function": (
        "def make():\n    return None, 1\n",
        ["--score", "make()[0]"],
        "bad-call",
        "--score:1:1",
        "a score_mod must be a function, got None",
    ),
    "whole tensor": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + bias[q]\n",
        ["--score", "mod"],
        "whole-tensor",
        "mods.py:8:16",
        "`bias` has 2 dimensions, and 1 are indexed",
    ),
    "too many indices": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + bias[q, k, h]\n",
        ["--score", "mod"],
        "bad-index",
        "mods.py:8:16",
        "`bias` has 2 dimensions, and 3 indices here",
    ),
    "slice": (
        BIAS + "def mod(s, b, h, q, k):\n    return s + bias[q, :]\n",
        ["--score", "mod"],
        "whole-tensor",
        "mods.py:8:16",
        "more than one element",
    ),
    "dtype": (
        "t = torch.zeros(8, dtype=torch.int8)\ndef mod(b, h, q, k):\n    return t[h] == 1\n",
        ["--mask", "mod"],
        "bad-dtype",
        "mods.py:8:12",
        "a tensor of int8 is not in the language",
    ),
    "list": (
        "found = [2, 1]\nfound.sort()\ndef mod(b, h, q, k):\n    return q > k + found[0]\n",
        ["--mask", "mod"],
        "not-in-language",
        "mods.py:7:1",
        "`.sort()`",
    ),
    "attribute of what is not there": (
        "def mod(b, h, q, k):\n    return q > k\n",
        ["--mask", "none.such"],
        "unknown-name",
        "--mask:1:1",
        "is not defined in mods.py",
    ),
    "class": (
        "class Mod(metaclass=Meta):\n    def __call__(self, b, h, q, k):\n        return q >= k\n",
        ["--mask", "Mod()"],
        "bad-call",
        "--mask:1:1",
        "the class `Mod`",
    ),
    "raises": (
        (
            "def mod(n):\n    if n < 0:\n        raise ValueError(n)\n"
            "    return lambda b, h, q, k: q > n\n"
        ),
        ["--mask", "mod(-1)"],
        "raises",
        "mods.py:8:9",
        "raises an exception",
    ),
    "asserts": (
        "def mod(n):\n    assert n % 2 == 0\n    return lambda b, h, q, k: q > n\n",
        ["--mask", "mod(3)"],
        "raises",
        "mods.py:7:5",
        "an assertion of the source fails",
    ),
    "in place": (
        "def mod(s, b, h, q, k):\n    return s.mul_(2)\n",
        ["--score", "mod"],
        "not-in-language",
        "mods.py:7:12",
        "in place",
    ),
    "two names": (
        "def mod(s, b, h, q, k):\n    t = s\n    s += 1\n    return t\n",
        ["--score", "mod"],
        "not-in-language",
        "mods.py:8:5",
        "in place",
    ),
    "attribute": (
        BIAS
        + (
            "def make(t):\n    if t.is_cuda:\n        return None\n"
            "    return lambda b, h, q, k: q > k\n"
        ),
        ["--mask", "make(bias)"],
        "not-known",
        "mods.py:8:8",
        "`.is_cuda`",
    ),
    "elements": (
        BIAS + "def mod(s, b, h, q, k):\n    bias[0, 0] = 1\n    return s\n",
        ["--score", "mod"],
        "not-in-language",
        "mods.py:8:5",
        "an element is assigned",
    ),
    "large number": (
        "def mod(b, h, q, k):\n    return q * 2654435761 > k\n",
        ["--mask", "mod"],
        "literal-range",
        "mods.py:7:12",
        "32 bits",
    ),
    "not Python": (
        "def mod(:\n",
        ["--mask", "mod"],
        "syntax-error",
        "mods.py:6:9",
        "not valid Python",
    ),
    "EXPR is not Python": (
        "",
        ["--mask", "mod("],
        "syntax-error",
        "--mask:1:4",
        "not valid Python",
    ),
    "name": (
        "def mod(b, h, q, k):\n    return q >= k\n",
        ["--mask", "mod", "--name", "Upper"],
        "bad-name",
        "--name:1:1",
        "lower_snake_case",
    ),
    "zero division": (
        "def mod(b, h, q, k):\n    return q // (h - h) > k\n",
        ["--mask", "mod"],
        "zero-division",
        "mods.py:6:1",
        "the divisor is always zero",
    ),
    "too deep": (
        (
            "def mod(b, h, q, k):\n    x = q\n    for i in range(90):\n        x = (x ^ i) + 1\n"
            "    return x > k\n"
        ),
        ["--mask", "mod"],
        "too-deep",
        "mods.py:9:13",
        "nests more than",
    ),
    "wide characters": (
        "def mod(b, h, q, k):\n    ä = 'äöü'; return missing\n",
        ["--mask", "mod"],
        "unknown-name",
        "mods.py:7:23",
        "`missing`",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WHOLE)
def test_message(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, options, code, place, said = WHOLE[name]
    (folder / "mods.py").write_text(HEAD + text, encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        app(["import", "mods.py", *options], prog_name="kgen")
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.count("error[") == 1
    assert f"error[{code}]" in err
    assert f"--> {place}\n" in err
    assert said in err
    assert "hint: " in err
    assert os.listdir(folder) == ["mods.py"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["missing.py", "--mask", "x"], "cannot-read"),
        (["no.such.module", "--mask", "x"], "no-source"),
        (["mods.py"], "usage"),
        (["mods.py", "--mask", "causal", "--gqa", "some"], "usage"),
    ],
)
def test_usage(
    arguments: list[str], code: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mods.py").write_text("def causal(b, h, q, k):\n    return q >= k\n")
    with pytest.raises(SystemExit) as caught:
        app(["import", *arguments], prog_name="kgen")
    assert caught.value.code == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert os.listdir(folder) == ["mods.py"]


def test_a_spec_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mods.py").write_text("def causal(b, h, q, k):\n    return q >= k\n")
    command = ["import", "mods.py", "--mask", "causal"]
    for options, code in (([], 0), ([], 2), (["--force"], 0)):
        with pytest.raises(SystemExit) as caught:
            app([*command, *options], prog_name="kgen")
        assert caught.value.code == code
    assert "error[exists]" in capsys.readouterr().err


def test_names_of_kernels_give_way(folder: Path) -> None:
    """If kernels use the name of a tensor, the buffer gets another name, and the spec has a
    comment.
    """
    names = ["mask", "acc", "q", "scale", "out", "block_size", "start", "delta", "W", "i"]
    (folder / "mods.py").write_text(
        "import torch\n"
        + "".join(f"{name} = torch.zeros(8)\n" for name in names)
        + (
            "def mod(s, b, h, q_idx, kv_idx):\n"
            f"    return s + {' + '.join(f'{n}[h]' for n in names)}\n"
        )
    )
    with pytest.raises(SystemExit) as caught:
        app(["import", "mods.py", "--score", "mod", "--name", "many"], prog_name="kgen")
    assert caught.value.code == 0
    text = (folder / "specs/many.yaml").read_text()
    assert "# scale_values is scale of the source" in text
    assert "  W: {shape: [HQ], dtype: fp32}" in text
    with pytest.raises(SystemExit) as caught:
        app(["render"], prog_name="kgen")
    assert caught.value.code == 0


def test_a_module_of_a_package(folder: Path) -> None:
    """Modules of the same package are read, but never imported."""
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "base.py").write_text(
        "raise SystemExit('imported')\ndef causal(b, h, q, k):\n    return q >= k\n"
    )
    (package / "more.py").write_text(
        "from package.base import causal as inner\nfrom . import base\nfrom .base import *\n"
        "def mod(b, h, q, k):\n    return inner(b, h, q, k) & base.causal(b, h, q, k) & causal(b, "
        "h, q, k)\n"
    )
    with pytest.raises(SystemExit) as caught:
        app(["import", "package.more", "--mask", "mod", "--name", "many"], prog_name="kgen")
    assert caught.value.code == 0
    assert (
        "mask_mod: q_idx >= kv_idx and q_idx >= kv_idx and q_idx >= kv_idx"
        in (folder / "specs/many.yaml").read_text()
    )


def test_a_package_above_the_folder(folder: Path) -> None:
    """Names in a package count from its root, in any working directory."""
    (folder / "__init__.py").write_text("")
    (folder / "mods.py").write_text(f"from {folder.name}.base import causal\n")
    (folder / "base.py").write_text("def causal(b, h, q, k):\n    return q >= k\n")
    with pytest.raises(SystemExit) as caught:
        app(["import", "mods.py", "--mask", "causal"], prog_name="kgen")
    assert caught.value.code == 0


def test_a_long_mod_ends_soon(folder: Path) -> None:
    """The time for many small terms does not grow with their square."""
    text = "def mod(b, h, q, k):\n" + "".join(
        f"    x{i} = (q + {i}) % 7 == k\n" for i in range(120)
    )
    (folder / "mods.py").write_text(
        text + f"    return {' | '.join(f'(x{i} & x{i + 1})' for i in range(60))}\n"
    )
    with within(3), pytest.raises(SystemExit):
        app(["import", "mods.py", "--mask", "mod", "--name", "long"], prog_name="kgen")


@pytest.mark.parametrize(("gqa", "shape"), [("1", "8"), ("4", "HKV"), ("any", "8")])
def test_heads_that_share_keys(gqa: str, shape: str, folder: Path) -> None:
    """`h // 4` is a key-value head if four queries share one."""
    (folder / "mods.py").write_text(
        "import torch\nt = torch.zeros(8)\ndef mod(s, b, h, q, k):\n    return s + t[h // 4]\n"
    )
    with pytest.raises(SystemExit) as caught:
        app(
            ["import", "mods.py", "--score", "mod", "--name", "shared", "--gqa", gqa],
            prog_name="kgen",
        )
    assert caught.value.code == 0
    assert f"t: {{shape: [{shape}], dtype: fp32}}" in (folder / "specs/shared.yaml").read_text()
