"""A plan depends only on its spec, not on the order of sets and hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SPECS = Path(__file__).resolve().parents[3] / "specs"
NAMES = ("causal_alibi", "longformer", "relative_bias")

# Print sets in order, because only their elements matter.
PROGRAM = """
import dataclasses, sys
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.explaining import explain
from kgen.pages.text import text
from kgen.spec.load import load

def canonical(value):
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        values = ", ".join(canonical(getattr(value, f.name)) for f in fields)
        return f"{type(value).__name__}({values})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(canonical, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {canonical(v)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    return repr(value)

for path in sys.argv[1:]:
    loaded = load(path)
    print(canonical(plan_attention(loaded)))
    print(text(explain(loaded)))
"""


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    paths = [str(SPECS / f"{name}.yaml") for name in NAMES]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *paths],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SPECS.parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "4242")
    ]
    outputs = [run.communicate(timeout=100)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert outputs[0].count("AttentionPlan(") == len(NAMES)
    assert outputs[1:] == outputs[:1] * 2
