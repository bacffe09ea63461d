"""Context parallelism: emitted packages in several processes, with gloo and Triton's interpreter,
against float64.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from support.running.several_ranks import launched, written

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.context_parallel import adapter
from kgen.render.project import load
from kgen.spec.load import loads_variants
from kgen.verify.families import problem_of

ROOT = Path(__file__).parents[4]
SMALL = """kernel: attention
name: {name}
dtype: {dtype}
head_dim: 16
{rest}
"""
SPECS = {
    "full": "gqa: 2",
    "causal": "mask_mod: q_idx >= kv_idx",
    "bf16": "gqa: 2",
    "window": "params: {window: 20}\nmask_mod: q_idx >= kv_idx and q_idx - kv_idx < window",
    "documents": "buffers: {doc: {shape: [B, SQ], dtype: int32, sorted: true}}\n"
    "mask_mod: doc[b, q_idx] == doc[b, kv_idx]",
    "longformer": "params: {window: 9}\nmask_mod: abs(q_idx - kv_idx) <= window or kv_idx < 5",
    # Names that the other files of the package use are valid buffer names.
    "learned": "buffers: {called: {shape: [HQ], dtype: fp32, grad: true}}\n"
    "score_mod: score + called[h] * (kv_idx - q_idx)\nmask_mod: q_idx >= kv_idx",
    "number": "buffers: {gain: {shape: [], dtype: any, grad: true}, reach: {shape: [], dtype: "
    "int32}}\n"
    "score_mod: score * (1 + gain)\nmask_mod: q_idx >= kv_idx and q_idx - kv_idx <= reach",
    "local": (
        "params: {forward: {type: int, runtime: true}}\n"
        "mask_mod: kv_idx < forward or q_idx >= kv_idx"
    ),
    "bias": "buffers: {bias: {shape: [HQ, SQ, SK], dtype: fp32, grad: true}}\n"
    "score_mod: score + bias[h, q_idx, kv_idx]",
    "sinks": (
        "gqa: 2\nsinks: true\nparams: {cap: 5.0}\nscore_mod: cap * tanh(score / cap)\n"
        "mask_mod: q_idx >= kv_idx"
    ),
    "sunk": "sinks: true\nmask_mod: q_idx > kv_idx + 40",
    "ends": "align: end\nmask_mod: q_idx >= kv_idx\nscore_mod: score * (1 + SK / 1000)",
    "packed": "varlen: true\ngqa: any\nmask_mod: q_idx + SK - SQ >= kv_idx",
    "several": "mask_mod: q_idx >= kv_idx",
    "lens": "sinks: true\nbuffers: {lens: {shape: [B], dtype: int32}}\nmask_mod: kv_idx < lens[b]",
    "cache": "passes: [forward]\nlengths: {kv: {per_batch: true}}\nmask_mod: q_idx >= kv_idx",
}
PACKED = [[40, 40], [20, 33], [1, 20], [0, 0], [30, 1]]
CALLS = [
    ("full", 3, {}, {}),
    ("causal", 2, {}, {"gathered": False}),
    ("causal", 4, {"sq": 83, "sk": 83}, {"sharding": "head_tail", "gathered": False}),
    ("window", 4, {}, {"unplanned": True, "sharding": "contiguous"}),
    ("local", 3, {}, {"sharding": "by_cost", "gathered": True}),
    ("documents", 3, {}, {"sharding": "head_tail", "gathered": False}),
    ("longformer", 4, {}, {"sharding": "contiguous"}),
    ("learned", 2, {}, {"gathered": True}),
    ("bias", 2, {}, {"gathered": False}),
    ("sinks", 3, {}, {"gathered": False}),
    ("sunk", 3, {}, {"sharding": "head_tail", "gathered": True}),
    ("ends", 2, {"sq": 50, "sk": 70}, {"gathered": False}),
    ("packed", 3, {"packed": PACKED}, {"sharding": "by_cost", "gathered": False}),
    ("cache", 2, {"sq": 40, "sk": 70}, {}),
    ("causal", 3, {}, {"through": "dtensors", "sharding": "contiguous", "unplanned": True}),
    ("causal", 3, {}, {"through": "context_parallel", "sharding": "head_tail"}),
    ("causal", 2, {"sq": 50, "sk": 50}, {"through": "compile", "gathered": False}),
    ("causal", 2, {"sq": 50, "sk": 50}, {"through": "checkpoint"}),
    ("causal", 3, {}, {"through": "failure", "sharding": "by_cost", "gathered": True}),
    ("causal", 3, {}, {"through": "failure", "sharding": "by_cost", "gathered": False}),
    (
        "causal",
        2,
        {"batch": 1},
        {"sharding": "head_tail", "gathered": True},
    ),  # gradients keep their memory order
    ("causal", 2, {}, {"through": "turned", "sharding": "head_tail", "gathered": True}),
    ("causal", 3, {}, {"through": "turned", "sharding": "contiguous", "gathered": False}),
    (
        "lens",
        2,
        {},
        {
            "sharding": "head_tail",
            "gathered": False,
            "buffers": {"lens": [0, 50]},
            "without_sink": [1],
        },
    ),
    ("sunk", 2, {}, {"sharding": "head_tail", "gathered": False, "without_sink": [1]}),
    ("several", 2, {}, {}),
    ("causal", 2, {}, {"sharding": "head_tail", "gathered": True, "peers": True}),
    ("sinks", 3, {}, {"sharding": "contiguous", "gathered": True, "peers": True}),
    ("bf16", 3, {}, {"sharding": "head_tail", "gathered": True, "peers": True}),
    ("packed", 2, {"packed": PACKED}, {"gathered": True, "peers": True}),
    ("window", 3, {}, {"sharding": "contiguous", "peers": True}),
    ("packed", 3, {"packed": PACKED}, {"sharding": "contiguous", "gathered": False, "peers": True}),
    ("sunk", 4, {"batch": 1}, {"sharding": "contiguous", "gathered": False, "peers": True}),
    ("window", 2, {}, {"sharding": "contiguous", "peers": True, "brief": True}),
    ("sunk", 3, {}, {"sharding": "contiguous", "gathered": False, "peers": True, "brief": True}),
    (
        "window",
        2,
        {},
        {"through": "failure", "sharding": "contiguous", "peers": True, "brief": True},
    ),
    ("bf16", 2, {}, {"through": "autocast"}),
    ("number", 2, {}, {"gathered": False}),
]
SAMPLE = {4, 5, 7, 12, 18, 22, 23, 26, 30}
"""Indices of the cases that run at every change, with few heads: gathered keys and steps, peer
memory, and kernels that fail. `--all` runs every case with all heads and ranks.
"""
FEW = {"batch": 1, "heads_kv": 1}
"""The sizes of the sample."""
SIZES = {22: {"batch": 1}, 23: {}}
"""The sizes of cases whose mistakes do not show with one head or one sequence."""
TWO_RANKS = {4, 5, 12, 18}
"""The cases of the sample that run on two ranks instead of three."""
WRONG = [
    ("heads", True),
    ("dtype", True),
    ("rows", True),
    ("heads", False),
    ("values", True),
    ("values", False),
    ("dtype of v", True),
    ("dimensions", True),
    ("dimensions", False),
    ("pass", True),
    ("pass", False),
    ("unshard", True),
]


@pytest.fixture(scope="module")
def calls(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[int, bool], Any]:
    """The results of all selected cases, from one start of the processes, because starting takes
    longer than the kernels.
    """
    folder = tmp_path_factory.mktemp("ranks")
    asked = {
        (item.callspec.params["number"], item.callspec.params["few"])
        for item in request.session.items
        if item.path == request.path
        and getattr(item, "originalname", "") == "test_ranks_give_what_one_gives"
    }
    jobs = {}
    for number, few in sorted(asked):
        name, size, case, more = CALLS[number]
        path = folder / f"small_{name}.yaml"
        if not path.exists():
            dtype = {"several": "[fp32, fp16]", "bf16": "bf16"}.get(
                name, "fp32"
            )  # "several" has one file per dtype
            path.write_text(SMALL.format(name=f"small_{name}", dtype=dtype, rest=SPECS[name]))
            write(folder, path)
        case = {"name": f"{name}-{number}", "sq": 90, "sk": 90, "batch": 2, "heads_kv": 2} | case
        case |= SIZES.get(number, FEW) if few else {}
        size = 2 if few and number in TWO_RANKS else size
        jobs[number, few] = {"spec": str(path), "ranks": size, "case": case, **more}
    return dict(zip(jobs, launched(ranks.__file__, folder, [*jobs.values()], 280)[0], strict=True))


def write(folder: Path, path: Path) -> None:
    """Write the package of a spec."""
    written(folder, adapter(load(path)))


def case_of(number: int, few: bool) -> Any:
    """Return the parameters of one case."""
    name, size, _, more = CALLS[number]
    words = f"{name}-{size}{more.get('through', '')}{'-few' if few else ''}"
    return pytest.param(number, few, id=words, marks=[] if few else pytest.mark.thorough)


@pytest.mark.parametrize(
    ("number", "few"),
    [case_of(number, False) for number in range(len(CALLS))]
    + [case_of(number, True) for number in sorted(SAMPLE)],
)
def test_ranks_give_what_one_gives(
    number: int, few: bool, calls: dict[tuple[int, bool], Any]
) -> None:
    name = CALLS[number][0]
    rows = calls[number, few]
    wanted = {"out", "lse"} | ({"dq", "dk", "dv"} if name != "cache" else set())
    wanted |= {"learned": {"dcalled"}, "bias": {"dbias"}, "number": {"dgain"}}.get(name, set())
    wanted |= {"dsinks"} if name in ("sinks", "sunk", "lens") else set()
    assert {row["name"] for row in rows} == wanted
    assert all(row["ok"] for row in rows), rows


RANKS = r"Disagreement: ranks? \d(, \d)* and ranks? \d(, \d)*"


@pytest.mark.parametrize("last", ["gone", "gone behind"])
def test_ranks_that_differ_raise(last: str, tmp_path: Path) -> None:
    """All ranks raise within seconds.

    In the last mistakes, a rank exits before a call or between its passes.
    """
    write(tmp_path, ROOT / "specs/causal.yaml")
    path = tmp_path / "small_window.yaml"
    path.write_text(SMALL.format(name="small_window", dtype="bf16", rest=SPECS["window"]))
    write(tmp_path, path)
    wrong = WRONG if last == "gone" else []
    jobs = [{"ranks": 3, "mistake": mistake, "planned": planned} for mistake, planned in wrong]
    # These ranks compute with their own keys before they notice the mistake.
    brief = {"ranks": 3, "of": "small_window", "columns": 16, "peers": True, "brief": True}
    late = ["heads", "dtype", "pass"] if last == "gone" else []
    jobs += [{**brief, "mistake": mistake} for mistake in late]
    found = launched(ranks.__file__, tmp_path, [*jobs, {"ranks": 3, "mistake": last}], 120)
    words = {
        "heads": rf"{RANKS} differ in shapes and dtypes of q, k and v, which is ",
        "dtype": rf"{RANKS} differ in shapes and dtypes of q, k and v, which is ",
        "rows": r"Disagreement: expected \(queries, keys\) of",
        "values": "Disagreement: rank 1 has 20 keys and 19 values",
        "dtype of v": rf"{RANKS} differ in shapes and dtypes of q, k and v, which is ",
        "dimensions": rf"{RANKS} differ in shapes and dtypes of q, k and v, which is ",
        "pass": rf"{RANKS} differ in the pass, which is ",
        "unshard": r"ValueError: expected \[20, 20, 20\] rows along dimension 2, by rank",
    }
    for number, mistake in enumerate([*(mistake for mistake, _ in wrong), *late]):
        said = {one[number] for one in found}
        assert all(re.match(words[mistake], text) for text in said), said
    assert [len(one) for one in found] == [len(jobs) + 1, len(jobs), len(jobs) + 1]
    assert all("Error: " in one[-1] or "Disagreement: " in one[-1] for one in (found[0], found[2]))
    if last == "gone":
        assert all(
            "a rank of the group does not respond" in one[-1] for one in (found[0], found[2])
        )


STOCK = sorted(
    path for path in (ROOT / "specs").glob("*.yaml") if "kernel: attention" in path.read_text()
)
NOT_HERE = {"decode_paged", "softcap_fast"}
"""`decode_paged` has keys in pages, which cannot be sharded. `softcap_fast` has an instruction that
the interpreter lacks.
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "path", [p for p in STOCK if p.stem not in NOT_HERE], ids=lambda path: path.stem
)
def test_stock_specs_over_ranks(path: Path, size: int, tmp_path: Path) -> None:
    number = STOCK.index(path) + (2, 3, 4, 8).index(size)
    problem = problem_of(load(path)[0])
    write(tmp_path, path)
    case: dict[str, Any] = {"name": path.stem, "sq": 131, "sk": 131, "batch": 1, "heads_kv": 1}
    if problem.varlen:
        case |= {"sq": 70, "sk": 70, "packed": PACKED}
    sharding = ("head_tail", "by_cost", "contiguous", "auto")[number % 4]
    job = {
        "spec": str(path),
        "ranks": size,
        "case": case,
        "sharding": sharding,
        "gathered": number % 3 == 0,
    }
    job |= {"peers": number % 2 == 0, "brief": number // 4 % 2 == 0}
    rows = launched(ranks.__file__, tmp_path, [job], 1700)[0][0]
    assert rows
    assert all(row["ok"] for row in rows), rows


PLANTED = {
    "queries-from-0": ("runtime.py", '"q_start": pair.q[0]', '"q_start": 0'),
    "keys-from-0": ("runtime.py", '"kv_start": pair.kv[0]', '"kv_start": 0'),
    "a-key-less": (
        "planning.py",
        "q_rank, kv_rank, hull, keys)",
        "q_rank, kv_rank, hull, (keys[0] + 1, keys[1]))",
    ),
    "weights-swapped": (
        "merging.py",
        "tl.exp2((lse - most).to(tl.float32)) / some",
        "tl.exp2((most - lse).to(tl.float32)) / some",
    ),
    "gradients-left-out": (
        "key_gradients.py",
        "self.add(Pair(self.rank, self.rank, interval, interval), dk, dv)",
        "pass",
    ),
    "as-it-is-not": (
        "key_gradients.py",
        "return alone.movedim(axis, 0)",
        "return alone.movedim(axis, 0) * 2",
    ),
    "another-place": (
        "key_gradients.py",
        "found[other, interval, i] = end, dtype",
        "found[other, interval, i] = 0, dtype",
    ),
    "another's-buffer": ("exchange.py", "_whole(keys, peers, other)", "_whole(keys, peers, rank)"),
    "values-for-keys": ("exchange.py", "zip((k, v), there", "zip((v, k), there"),
    "keys-for-values": ("exchange.py", "k, v = there = [", "v, k = there = ["),
    "own-gradients": (
        "key_gradients.py",
        "self.peers.view(other, offset",
        "self.peers.view(self.rank, offset",
    ),
}
"""Mistakes planted in the code around the kernels."""
PEERS = {"another-place", "another's-buffer"}
GATHERED = {"as-it-is-not", *PEERS}
"""Mistakes that show in one sequence with gathered keys, and with peer memory."""
BY_STEPS = {"values-for-keys", "keys-for-values", "own-gradients"}
"""Mistakes that show with a window and peer memory."""
BRIEF = {"keys-for-values"}
"""Mistakes that show if kernels read remote keys directly."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    file, right, wrong = PLANTED[name]
    of = "window" if name in BY_STEPS else "causal"
    path = tmp_path / f"small_{of}.yaml"
    path.write_text(SMALL.format(name=f"small_{of}", dtype="fp32", rest=SPECS[of]))
    write(tmp_path, path)
    mended = tmp_path / f"small_{of}_context_parallel" / file
    assert mended.read_text().count(right) == 1
    mended.write_text(mended.read_text().replace(right, wrong))
    gathered = name in GATHERED
    case = {"name": "mistaken", "sq": 90, "sk": 90, "batch": 1 if gathered else 2, "heads_kv": 2}
    job = {
        "spec": str(path),
        "ranks": 2,
        "case": case,
        "sharding": "head_tail",
        "gathered": gathered,
    }
    job |= {"peers": name in PEERS | BY_STEPS, "brief": name in BRIEF}
    if name in BY_STEPS:
        job["sharding"] = "contiguous"
    rows = launched(ranks.__file__, tmp_path, [job], 250)[0][0]
    assert not all(row["ok"] for row in rows), rows


# --- with what people use ------------------------


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_example_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    """With FSDP2 and checkpointing, windows and sinks."""
    write(tmp_path, ROOT / "specs/gpt_oss.yaml")
    example = ROOT / "examples/context_parallel.py"
    losses = []
    for size in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(size),
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        told = ["--adapters", str(tmp_path), "--length", "150", "--layers", "1"]
        said = subprocess.run(
            [*command, example, *told], env=environment, capture_output=True, text=True, timeout=800
        )
        assert said.returncode == 0, said.stderr[-3000:]
        losses.append([float(x) for x in re.findall(r"loss ([\d.]+)", said.stdout)])
    assert len(losses[0]) == 3
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_pages_go_over_no_ranks() -> None:
    with pytest.raises(KgenError, match="its keys are in pages"):
        adapter(load(ROOT / "specs/decode_paged.yaml"))


@pytest.mark.parametrize(
    "name", ["plan", "heads", "length", "q_start", "back", "learned", "reduce_gradients", "ctx"]
)
def test_a_name_that_the_package_has_is_refused(name: str) -> None:
    learned = f"buffers: {{{name}: {{shape: [HQ], dtype: fp32}}}}\nscore_mod: score + {name}[h]"
    number = f"params: {{{name}: {{type: int, runtime: true}}}}\nmask_mod: kv_idx < {name}"
    for rest in (learned, number):
        text = SMALL.format(name="taken", dtype="bf16", rest=rest)
        with pytest.raises(
            KgenError, match=f"`{name}` is a.* (argument|name) (of|in) the .* for several ranks"
        ):
            adapter(loads_variants(text, Path("taken.yaml")))
