"""A pass without machine code is refused, not left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.build.files import require_buildable
from kgen.diagnostics import KgenError
from kgen.kernels.attention.targets.triton.native import native
from kgen.spec.load import load
from kgen.verify.emitted import require_emitted

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "refused"), [("serve_causal", True), ("causal", False)])
def test_serve_is_refused(name: str, refused: bool) -> None:
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    files = require_emitted(ROOT / "generated", loaded)
    if not refused:
        require_buildable(loaded, files)
        return
    with pytest.raises(KgenError) as caught:
        require_buildable(loaded, files)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, "`serve`" in diagnostic.message) == ("unsupported-pass", True)


def test_c_refuses_serve() -> None:
    loaded = load(ROOT / "specs" / "serve_causal.yaml")
    with pytest.raises(KgenError, match="no launches for the pass `serve`"):
        native(loaded, {}, [90])
