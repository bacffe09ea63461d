"""Classes of a source: a method, an instance or an enumeration has the value that it has in
Python.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import expected, got, same

from kgen.diagnostics import KgenError
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled

SOURCE = """
import enum
from enum import Enum, IntEnum, IntFlag, auto
from functools import partial
from typing import NamedTuple
import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

class Kind(IntEnum):
    PAD = 0
    TEXT = auto()
    IMAGE = 7

class Bits(IntFlag):
    A = auto()
    B = auto()
    AB = A | B

class Mode(Enum):
    NEAR = 3
    FAR = 9

class Sizes(NamedTuple):
    near: int
    far: int = 20
    def both(self):
        return self.near + self.far

class Attn(nn.Module):
    SINK = 2
    sizes = Sizes(4)
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.register_buffer("lengths", torch.tensor([40, 60], dtype=torch.int32))
    @staticmethod
    def causal(b, h, q, k):
        return q >= k
    @classmethod
    def sink(cls, b, h, q, k):
        return k < cls.SINK
    @property
    def twice(self):
        return self.width * 2
    def mask(self, b, h, q, k):
        return (q - k < self.twice) & (k < self.lengths[b])
    def forward(self, b, h, q, k):
        return or_masks(self.mask, self.sink)(b, h, q, k)

class Wide(Attn):
    SINK = 5
    def __init__(self, width, extra):
        super().__init__(width)
        self.width += extra
    def mask(self, b, h, q, k):
        return super().mask(b, h, q, k) | (q == 0)

class Call:
    def __init__(self, n):
        self.n = n
        self.seen = []
        self.seen.append(n)
    def __call__(self, b, h, q, k):
        return q - k < self.n + len(self.seen)

def kinds(b, h, q, k):
    far = k - q == Mode.FAR.value
    return (k % 8 == Kind.IMAGE) | (q % 2 == Kind.TEXT.value) | (h == Bits.AB) | far

def sizes(b, h, q, k):
    near, far = Attn.sizes
    return (q - k < near) | (k - q == far) | (k == Sizes(1, far=3).both()) | (k == Attn.sizes[0])

def scalars(b, h, q, k):
    return (q - k < np.int64(5)) & (k < torch.Size([50, 2])[0])

def make(n):
    return create_block_mask(Call(n), 1, 1, 64, 64, device="cpu")

def make_window(n):
    def attention(b, h, q, k):
        return q - k < n
    return attention

def window(n, b, h, q, k):
    return q - k < n

win_sink = make_window(12)
window_1k = partial(window, 9)
module = Attn(6)
"""
MASKS = {
    # EXPR: its name in the spec
    "Attn.causal": "attn_causal",
    "Attn.sink": "attn_sink",
    "Attn(4).mask": "attn_mask",
    "Attn(4)": "attn",
    "Wide(4, 3)": "wide",
    "Wide.causal": "wide_causal",
    "module": "module",
    "module.mask": "module_mask",
    "Call(3)": "call",
    "and_masks(Call(3), Attn.causal)": "call_attn_causal",
    "and_masks(Attn(4), Call(9))": "attn_call",
    "kinds": "kinds",
    "sizes": "sizes",
    "scalars": "scalars",
    "make(5).mask_mod": "make",
    "win_sink": "win_sink",
    "window_1k": "window_1k",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mods.py").write_text(SOURCE)
    return tmp_path / "mods.py"


@pytest.mark.parametrize("text", MASKS)
def test_mask(text: str, path: Path) -> None:
    asked = "make(5)" if text.startswith("make") else text
    spec = imported(str(path), {"mask_mod": asked}, Options())
    assert spec.name == MASKS[text]
    module = type(sys)("mods")
    exec(SOURCE, vars(module))
    function: Any = eval(text, vars(module))
    _, loaded = settled(spec, "mods.yaml")
    tensors = {"lengths": torch.tensor([40, 60], dtype=torch.int32)}
    same(got(loaded, "mask_mod", tensors), expected(function, "mask_mod"))


STRANGE = {
    "metaclass": "class K(metaclass=M):\n    W = 3\n",
    "decorator": "class K:\n    W = 3\nimport other\n@other.changed\nclass K:\n    W = 3\n",
    "special method": (
        "class K:\n    W = 3\n    def __getattribute__(self, name):\n        return 5\n"
    ),
    "base of another package": "import other\nclass K(other.Base):\n    W = 3\n",
    "setattr": "class K:\n    W = 3\nsetattr(K, 'W', 4)\n",
    "unread call": "import other\nclass K:\n    W = 3\nother.change(K)\n",
    "set in a mod": "class K:\n    W = 3\ndef f():\n    K.W = 4\n    return 3\n",
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_class_that_may_differ_is_refused(name: str, tmp_path: Path) -> None:
    value = "f()" if name == "set in a mod" else "K().W" if name == "special method" else "K.W"
    path = tmp_path / "mods.py"
    path.write_text(f"{STRANGE[name]}def near(b, h, q, k):\n    return q - k < {value}\n")
    with pytest.raises(KgenError) as caught:
        imported(str(path), {"mask_mod": "near"}, Options())
    assert caught.value.diagnostics[0].file == str(path)


MEMBERS = {
    "Kind.IMAGE": '"7"',
    "torch.where(k > Kind.TEXT, s, Kind.IMAGE)": "where(kv_idx > 1, score, 7)",
    "s + gate[Kind.IMAGE]": "score + gate[7]",
    "s.clamp(Kind.TEXT, Kind.IMAGE)": "clamp(score, 1, 7)",
    "s + torch.full_like(s, Kind.IMAGE)": "score + float(7)",
    "s * shaped.shape[0]": "score * 7",
    "s * min(Kind.IMAGE, 9) + float(Kind.TEXT)": "score * 7 + 1.0",
}


@pytest.mark.parametrize("text", MEMBERS)
def test_a_member_of_an_enumeration_is_a_number(text: str, tmp_path: Path) -> None:
    """A member may be an argument of torch, an index, a size, or the result of a mod."""
    path = tmp_path / "mods.py"
    source = (
        "import torch\nfrom enum import IntEnum\nclass Kind(IntEnum):\n    TEXT = 1\n"
        "    IMAGE = 7\n"
        "gate = torch.zeros(8)\nshaped = torch.zeros(Kind.IMAGE, 8)\n"
    )
    path.write_text(f"{source}def score(s, b, h, q, k):\n    return {text}\n")
    written, _ = settled(
        imported(str(path), {"score_mod": "score"}, Options("members")), "mods.yaml"
    )
    assert f"score_mod: {MEMBERS[text]}\n" in written


def test_tensors_of_a_module_of_the_source_follow_it(tmp_path: Path) -> None:
    """A module may convert its tensors and load others, so even a single number is a buffer."""
    path = tmp_path / "mods.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('steps', torch.zeros(16))\n"
        "        self.register_buffer('factor', torch.tensor(2.0))\n"
        "        self.register_buffer('ends', torch.zeros(2, dtype=torch.int32))\n"
        "        self.rate = nn.Parameter(torch.tensor(0.5))\n"
        "    def score(self, score, b, h, q, k):\n"
        "        return score * self.rate + self.steps[h] * self.factor + self.ends[b]\n"
        "m = M()\n"
    )
    spec = settled(imported(str(path), {"score_mod": "m.score"}, Options()), "mods.yaml")[1].spec
    assert {name: (len(b.shape), b.dtype, b.grad) for name, b in spec.buffers.items()} == {
        "steps": (1, "any", False),
        "factor": (0, "any", False),
        "ends": (1, "int32", False),
        "rate": (0, "any", True),
    }
