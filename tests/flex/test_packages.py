"""Packages as SOURCE, modules of packages, and numbers that stand for "no limit"."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.diagnostics import KgenError
from kgen.flex.importing import Options, imported
from kgen.spec.load import loads

CAUSAL = "def causal(b, h, q, k):\n    return q >= k\n"
LATER = "def causal(b, h, q, k):\n    return q > k\n"


def written(folder: Path, files: dict[str, str], source: str = "mods.py", mask: str = "mod") -> str:
    """The mask of a spec that is imported from some files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    text = imported(str(folder / source), {"mask_mod": mask}, Options(name="one")).text()
    loads(text, "one.yaml")
    found = [line for line in text.splitlines() if line.startswith("mask_mod: ")]
    return found[0].removeprefix("mask_mod: ") if found else "everything"


USES = "def mod(b, h, q, k):\n    return {}(b, h, q, k)\n"


@pytest.mark.parametrize("init", [{"a/__init__.py": ""}, {}])
@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("import a.b", "a.b.causal"),
        ("import a.b as m", "m.causal"),
        ("import a.c.d", "a.c.d.causal"),
        ("import a.c.d as m", "m.causal"),
        ("import a.c.d\nimport a.b", "a.b.causal"),
        ("from a import b as m", "m.causal"),
        ("from a.c import d", "d.causal"),
    ],
)
def test_a_module_of_a_package_is_read(
    line: str, called: str, init: dict[str, str], tmp_path: Path
) -> None:
    files = {"a/b.py": CAUSAL, "a/c/d.py": CAUSAL, "mods.py": f"{line}\n{USES.format(called)}"}
    assert written(tmp_path, files | init) == "q_idx >= kv_idx"


def test_a_name_of_a_package_that_hides_its_module_is_read(tmp_path: Path) -> None:
    files = {"a/__init__.py": "from .b import b\n", "a/b.py": CAUSAL.replace("causal", "b")}
    assert (
        written(tmp_path, files | {"mods.py": "import a.b\n" + USES.format("a.b")})
        == "q_idx >= kv_idx"
    )


def test_a_name_that_the_import_of_a_module_changes_is_refused(tmp_path: Path) -> None:
    files = {"a/__init__.py": LATER.replace("causal", "b"), "a/b.py": CAUSAL}
    with pytest.raises(KgenError, match="`b`, a name and a module of"):
        written(tmp_path, files | {"mods.py": "import a.b\n" + USES.format("a.b.causal")})


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    files = {"pack/__init__.py": "from .masks import *\n", "pack/masks.py": CAUSAL}
    assert written(tmp_path, files, "pack", "causal") == "q_idx >= kv_idx"
    text = imported(str(tmp_path / "pack"), {"mask_mod": "causal"}, Options()).text()
    assert text.startswith("# Imported from pack: mask_mod=causal\n")


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        KgenError, match=r"the folder has no `__init__.py`(?s:.*)name a file of it: `.*one.py`"
    ):
        written(tmp_path, {"pack/one.py": CAUSAL}, "pack", "causal")


@pytest.mark.parametrize(
    ("test", "mask"),
    [
        ("(q >= k) & (q - k < 2**62)", "q_idx >= kv_idx"),
        ("(q >= k) & (sys.maxsize > q - k)", "q_idx >= kv_idx"),
        ("(q >= k) & (q - k <= 2**31)", "q_idx >= kv_idx"),
        ("(q >= k) & (q - k > -(2**40))", "q_idx >= kv_idx"),
        ("(q >= k) | (q - k > 2**62)", "q_idx >= kv_idx"),
        ("(q >= k) | (2**62 < q)", "q_idx >= kv_idx"),
        ("(q >= k) & (q != 2**62)", "q_idx >= kv_idx"),
        ("(q >= k) | (q == 2**62)", "q_idx >= kv_idx"),
        ("q < 2**62", "everything"),
        ("q.clamp(max=2**62) >= k", "q_idx >= kv_idx"),
        ("torch.clamp(q, 3, 2**40) >= k", "max(q_idx, 3) >= kv_idx"),
        ("q / 2**33 >= k", "q_idx / 8589934592.0 >= kv_idx"),
        ("F[q] < 2**40", "F[q_idx] < 1099511627776.0"),
    ],
)
def test_a_number_past_32_bits_decides(test: str, mask: str, tmp_path: Path) -> None:
    text = f"import sys, torch\nF = torch.zeros(8)\ndef mod(b, h, q, k):\n    return {test}\n"
    assert written(tmp_path, {"mods.py": text}) == mask


@pytest.mark.parametrize(
    "test", ["q + 2**62 > k", "L[q] < 2**40", "q.clamp(min=2**40) > k", "q % 2**40 > k"]
)
def test_other_numbers_past_32_bits_are_refused(test: str, tmp_path: Path) -> None:
    text = (
        "import torch\nL = torch.zeros(8, dtype=torch.int64)\ndef mod(b, h, q, k):\n"
        f"    return {test}\n"
    )
    with pytest.raises(KgenError, match="does not fit in 32 bits"):
        written(tmp_path, {"mods.py": text})
