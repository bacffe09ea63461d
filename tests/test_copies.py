"""Two copies of an emitted file in a process: each has its own operators, with names that do not
depend on the folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kgen.kernels.attention.adapt.context_parallel import adapter
from kgen.render.project import load
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).parents[1]
FILES = (
    *(
        "causal/triton.py",
        "block_sparse/triton.py",
        "causal/cuda.py",
        "rms_norm/triton.py",
        "rms_norm/cuda.py",
    ),
    *("gated_delta_output/triton.py", "gated_delta_output/cute_sm90.py"),
)


@pytest.mark.parametrize("file", FILES)
def test_copies_of_a_file(file: str, tmp_path: Path) -> None:
    folder = Path(file).parent
    shutil.copytree(ROOT / "generated" / folder, tmp_path / folder)
    have_operators_of_their_own(ROOT / "generated" / file, tmp_path / file)


def test_copies_of_what_is_for_several_ranks(tmp_path: Path) -> None:
    for place in ("here", "there"):
        for folder, files in adapter(load(ROOT / "specs/causal.yaml")).folders.items():
            (tmp_path / place / folder).mkdir(parents=True)
            for name, text in files.items():
                (tmp_path / place / folder / name).write_text(text)
    file = "causal_context_parallel/__init__.py"
    have_operators_of_their_own(tmp_path / "here" / file, tmp_path / "there" / file)


def have_operators_of_their_own(here: Path, there: Path) -> None:
    """Check two different namespaces `kgen_<hash>`. A number is added if a namespace exists."""
    first, second = (
        import_file(file, f"copy_{i}")._LIBRARY.ns for i, file in enumerate((here, there))
    )
    assert first != second
    assert first.split("_")[:2] == second.split("_")[:2]
