"""Context parallelism of linear attention: emitted packages in several processes, with gloo and
Triton's interpreter, against float64 and against one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import shared_sequences
from ruamel.yaml import YAML
from support.running.several_ranks import launched, written

from kgen.diagnostics import KgenError
from kgen.kernels.linear_attention.adapt.context_parallel import adapter
from kgen.render.project import load
from kgen.spec.load import loads_variants

ROOT = Path(__file__).parents[4]
PROGRAM = shared_sequences.__file__
APART = 2e-2
"""Bound of relative differences from one rank: tensors between kernels are bfloat16, and chunks
begin at other tokens.
"""
STATES = {"o", "final_state", "dq", "dk", "dv", "dinitial_state"}


@dataclass(frozen=True)
class Over:
    """A call over ranks: a stock spec with changes, and the tokens of each rank."""

    name: str
    spec: str
    lengths: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    grads: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    thorough: bool = True


PACKED = {"varlen": True}
FEW = {"heads": {"group": 1}}
LENGTHS = (20, 17, 18)
OF_DELTA = "da da_log ddt_bias db"
EIGHT = (4, 3, 0, 5, 4, 6, 5, 5)
CALLS = (
    # The second sequence passes through the second rank.
    Over(
        *("passing", "gated_delta_rule", (5, 6, 7), (3, 12, 3), OF_DELTA, {**PACKED, **FEW}),
        thorough=False,
    ),
    # One sequence enters the second rank, and another one leaves it.
    Over("other", "linear_attention_elu", (5, 6, 7), (3, 0, 5, 10), thorough=False),
    Over("no-tokens", "mamba2", (0, 7, 6), (), "ddt da_log ddt_bias dd", FEW, thorough=False),
    Over("normed", "gated_delta_net", (5, 6), (), f"{OF_DELTA} dz dw", FEW, thorough=False),
    Over("longer", "gated_delta_rule", (9, 12, 18), (5, 0, 30, 4), OF_DELTA, PACKED),
    Over("empty-twice", "mamba2", (0, 17, 0, 12), (), "ddt da_log ddt_bias dd"),
    Over("longer-normed", "gated_delta_net", LENGTHS, (), f"{OF_DELTA} dz dw"),
    Over("longer-other", "linear_attention_elu", LENGTHS, (5, 0, 20, 30, 0)),
    Over("other-delta", "gated_delta_rule", LENGTHS, (5, 0, 20, 30, 0), OF_DELTA, PACKED),
    Over("whole", "gated_delta_rule", LENGTHS, (), OF_DELTA),
    Over("at-the-end", "gated_delta_rule", (0, 30, 20), (0, 10, 20, 13), OF_DELTA, PACKED),
    Over("columns", "kda", LENGTHS, (), "dg da_log ddt_bias db"),
    Over("constant", "retnet", LENGTHS),
    Over("columns-added", "gla", LENGTHS, (53, 2), "dg", PACKED),
    Over(
        *("keys-wider", "gated_delta_rule", (10, 12, 11), (), OF_DELTA),
        {"head_dim": {"qk": 128, "v": 64}, "save": "recompute"},
    ),
    Over(
        *("values-wider", "delta_rule", (10, 12, 11), (), "dbeta"),
        {"head_dim": {"qk": 64, "v": 128}, "state_dtype": "bf16"},
        {"through": "checkpoint"},
    ),
    Over(
        *("parts", "mamba2", LENGTHS, (), "ddt da_log ddt_bias dd", {}),
        {"more": {"reduce_gradients": False}},
    ),
    Over("eight", "gated_delta_rule", EIGHT, (3, 0, 20, 9), OF_DELTA, PACKED),
    Over("eight-whole", "mamba2", EIGHT, (), "ddt da_log ddt_bias dd"),
    Over(*("compiled", "retnet", (9, 12)), job={"through": "compile"}),
    Over("two", "kda", (30, 9), (), "dg da_log ddt_bias db"),
)


def small(folder: Path, name: str, spec: str, changes: dict[str, Any]) -> Path:
    """Write a stock spec with small sizes and changes, and its package. Return the spec."""
    yaml = YAML()
    data = yaml.load((ROOT / f"specs/{spec}.yaml").read_text())
    data |= {"name": f"small_{name.replace('-', '_')}", "head_dim": 64, "chunk_size": 16}
    data |= {"passes": ["forward", "backward"], **changes}
    path = folder / f"{data['name']}.yaml"
    with path.open("w") as file:
        yaml.dump(data, file)
    written(folder, adapter(load(path)))
    return path


def job_of(folder: Path, call: Over) -> dict[str, Any]:
    """Return the job of a call."""
    path, total = small(folder, call.name, call.spec, call.changes), sum(call.lengths)
    sequences = call.sequences or (total,)
    job = {"spec": str(path), "name": call.name, "ranks": len(call.lengths)}
    job |= {"lengths": call.lengths, "sequences": sequences}
    return job | {"case": {"tail": total - sum(sequences)}, **call.job}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """The results of all selected calls, from one start of the processes, because starting takes
    longer than the kernels.
    """
    folder = tmp_path_factory.mktemp("ranks")
    asked = {
        item.callspec.params["call"].name
        for item in request.session.items
        if item.path == request.path
        and getattr(item, "originalname", "") == "test_ranks_give_what_one_gives"
    }
    jobs = [job_of(folder, call) for call in CALLS if call.name in asked]
    found = launched(PROGRAM, folder, jobs, 550)[0]
    return dict(zip((job["name"] for job in jobs), found, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=call.name, marks=[pytest.mark.thorough] if call.thorough else [])
        for call in CALLS
    ],
)
@pytest.mark.timeout(600)
def test_ranks_give_what_one_gives(call: Over, results: dict[str, Any]) -> None:
    rows = results[call.name]
    assert {row["name"] for row in rows} == STATES | set(call.grads.split())
    assert all(row["ok"] and row["apart"] < APART for row in rows), rows


RANKS = r"Disagreement: rank 0 and rank 1 differ in "
WRONG = {
    "heads": RANKS + "shapes without tokens and dtypes",
    "scale": RANKS + "scale, which is ",
    "final": RANKS + "output_final_state, which is ",
    "offsets": RANKS + r"cu_seqlens, which is a list of 4 offsets on this rank",
    "distributed": "TypeError: small_wrong: expected local tensors, got a DTensor: pass x.to_local",
    "beyond": r"ValueError: cu_seqlens must begin with 0, .* ranks, 20, got \[0, 5, 15, 21\]",
}


def test_ranks_that_differ_raise(tmp_path: Path) -> None:
    path = small(tmp_path, "wrong", "linear_attention_elu", {"heads": {"group": 2}})
    common = {"spec": str(path), "name": "wrong", "ranks": 2, "sequences": [5, 10, 5]}
    common["case"] = {"heads": 2}
    found = launched(PROGRAM, tmp_path, [{**common, "mistake": mistake} for mistake in WRONG], 60)
    for place, (mistake, words) in enumerate(WRONG.items()):
        for one in found:
            assert re.match(words, one[place]), (mistake, one[place])


PLANTED = {
    "not-transposed": ("states.py", "(factor.mT if back else factor)", "factor"),
    "nothing-passes": ("states.py", "if share.carries and state is not None:", "if False:"),
    "not-from-zeros": (
        "states.py",
        "final, decay = tokens.final(None)",
        "final, decay = tokens.final(state + 1)",
    ),
    "not-summed": ("states.py", "total += one", "pass"),
    "another-sequence": (
        "states.py",
        "dwhole[share.first : share.ended]",
        "dwhole[: share.ended - share.first]",
    ),
    "values-stay": ("kernels.py", "torch.zeros_like(v)", "v"),
    "decay-of-a-token": ("kernels.py", ".sum(1).exp2()", ".amax(1).exp2()"),
    "other-slots": ("states.py", "x[:slots]", "x[-slots:]"),
    "not-entering": ("states.py", "state[share.entering] = entering", "pass"),
}
"""Mistakes planted in the code around the kernels."""
SHOWN_BY = {
    "decay-of-a-token": "whole-mamba2",
    "another-sequence": "other-delta",
    "other-slots": "other-delta",
}
"""The call that shows a mistake, if it is not `passing`."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    file, right, wrong = PLANTED[name]
    calls = {call.name: call for call in CALLS}
    calls["whole-mamba2"] = Over("whole-mamba2", "mamba2", (20, 40, 18))
    job = job_of(tmp_path, calls[SHOWN_BY.get(name, "passing")])
    changed = tmp_path / f"{Path(job['spec']).stem}_context_parallel" / file
    assert changed.read_text().count(right) == 1
    changed.write_text(changed.read_text().replace(right, wrong))
    rows = launched(PROGRAM, tmp_path, [job], 250)[0][0]
    assert not all(row["ok"] and row["apart"] < APART for row in rows), rows


SPEC = """kernel: linear_attention
name: taken
dtype: {dtype}
head_dim: 64
buffers:
  {name}: {{shape: [HV], dtype: fp32, grad: true}}
decay: -exp({name}[h])
"""


@pytest.mark.parametrize("name", ["group", "reduce_gradients"])
def test_a_name_that_the_function_has_is_refused(name: str) -> None:
    with pytest.raises(KgenError, match=f"`{name}` is already an argument of the function") as of:
        adapter(loads_variants(SPEC.format(name=name, dtype="bf16"), Path("taken.yaml")))
    (found,) = of.value.diagnostics
    assert (found.line, found.column) == (6, 3)


def test_several_variants_are_refused() -> None:
    with pytest.raises(KgenError, match="a package for several ranks has one variant") as of:
        adapter(loads_variants(SPEC.format(name="a", dtype="[bf16, fp16]"), Path("taken.yaml")))
    (found,) = of.value.diagnostics
    assert (found.line, found.column, found.hint) == (3, 1, "write one `dtype`")


def test_the_name_of_an_argument_may_collide_with_a_name_of_the_file() -> None:
    """`betas` is a name of the kernels' file."""
    made = adapter(loads_variants(SPEC.format(name="betas", dtype="bf16"), Path("taken.yaml")))
    text = made.folders["taken_context_parallel"]["__init__.py"]
    assert "q, k, v, *, betas, scale=None, initial_state=None," in text
    compile(text, "taken", "exec")
