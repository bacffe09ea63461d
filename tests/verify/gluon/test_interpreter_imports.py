"""The package of an emitted file that runs in the Gluon interpreter."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from kgen.kernels.attention.schedules.hopper import CHIP
from kgen.verify.gluon import interpreter

ROOT = Path(__file__).resolve().parents[3]
GLUON = "triton.experimental.gluon"


def test_a_file_can_import_files_of_its_folder_later() -> None:
    """A call may need a file that the import of `triton.py` did not load."""
    before = sys.modules.get(GLUON)
    module: ModuleType = interpreter.imported(
        ROOT / "generated/causal_d64/triton.py", "kgen_test_later", CHIP
    )
    assert importlib.import_module("kgen_test_later.triton") is module
    assert sys.modules.get(GLUON) is before
