"""Attention backends for vLLM and SGLang: their files, the layers that they refuse, and batches
against float64.

The tests use stand-ins with the signatures of the engines. Where an engine is installed, they use
it, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from engine_calls import CASES, START
from engine_stand_ins import STAND_INS, stand_in
from exact_windows import written

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.serving import sglang_adapter, vllm_adapter
from kgen.render.adapters import Adapter
from kgen.spec.load import loads_variants

PAGE = ROOT / "docs" / "serving-engines.md"
PROGRAM = Path(__file__).parent / "engine_calls.py"
ADAPTERS = {"vllm": vllm_adapter, "sglang": sglang_adapter}
PASSED_WITH = {"vllm": "0.33.0 and 0.24.0", "sglang": "0.5.23"}
SIGNED = {"vllm": "0.33.0", "sglang": "0.5.23"}
"""The versions whose signatures the stand-ins have."""
BOUND = 1e-2
"""Tolerance for bfloat16, relative to the largest element."""
QUICK = ("vllm any", "vllm fp8", "sglang window")
SLOW = [
    f"{engine} {case}"
    for engine in ADAPTERS
    for case in CASES
    if f"{engine} {case}" not in (*QUICK, "sglang alibi", "sglang heads")
]
RUNS = [*QUICK, *(pytest.param(run, marks=pytest.mark.thorough) for run in SLOW)]
HEAD = "kernel: attention\nname: own\ndtype: bf16\nhead_dim: 32\ngqa: any\n"
CAUSAL = "mask_mod: q_idx >= kv_idx\n"
SERVE = "passes: [forward, serve]\n"


def made(engine: str, *lines: str) -> Adapter:
    return ADAPTERS[engine](loads_variants("".join(lines), "own.yaml"))


def called(engine: str, case: str, folder: Path, *, real: bool = False) -> Any:
    """Write the package of a case, and return the result of a run in a process of its own."""
    if real and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed; this passed with {PASSED_WITH[engine]}")
    mods = CASES.get(case, CASES["window"])[0]
    written(made(engine, START, mods), folder)
    if not real:
        stand_in(engine, folder)
    run = subprocess.run(
        [sys.executable, str(PROGRAM), engine, str(folder), case],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("run", RUNS)
def test_batches_are_those_of_float64(run: str, tmp_path: Path) -> None:
    found = called(*run.split(), tmp_path)
    assert len(found) >= 3
    assert {name: error for name, error in found.items() if not error < BOUND} == {}


@pytest.mark.parametrize(
    "run", ["vllm plain", "vllm any", "vllm heads", "sglang any", "sglang fp8"]
)
def test_batches_of_the_engine_are_those_of_float64(run: str, tmp_path: Path) -> None:
    found = called(*run.split(), tmp_path, real=True)
    assert len(found) >= 3
    assert {name: error for name, error in found.items() if not error < BOUND} == {}


REFUSED = {
    "vllm": {
        "head": "head_size = 32",
        "group": "query heads for each key head = 2, and the layer has 1",
        "slopes": "slopes of ALiBi = False",
        "no window": "sliding_window = 12, and the layer has None",
        "window": "sliding_window = 12, and the layer has 13",
        "cache": "--kv-cache-dtype auto or bfloat16, got fp8",
        "cap": "logits_soft_cap = 0.0, and the layer has 30.0",
        "type": "and the layer has encoder",
        "sinks": "attention sinks = True, and the layer has False",
        "output": "do not quantize their output",
        "custom": "Set VLLM_PLUGINS=own_vllm",
    },
    "sglang": {
        "mla": "does not support MLA",
        "speculative": "does not support speculative decoding",
        "encoder": "does not support an encoder",
        "page": "use --page-size 64",
        "pool": "use --disable-hybrid-swa-memory",
        "dtype": "the dtype of the model = torch.bfloat16",
        "cache": "--kv-cache-dtype = torch.bfloat16, and the model has torch.float8_e4m3fn",
        "head": "head_dim = 32",
        "group": "query heads for each key head = 2, and the model has 1",
        "window": "a window = 12, and the model has 13",
        "no window": "a window = 12, and the model has None",
        "cap": "logit_cap = 0.0, and the model has 30.0",
        "type": "and the model has AttentionType.ENCODER_ONLY",
        "cross": "is_cross_attention = False",
        "irope": "use_irope = False",
        "sinks": "attention sinks = True, and the model has False",
        "more": "do not take `score_mod`",
        "init_forward_metadata": "batches of TARGET_VERIFY",
        "init_forward_metadata_out_graph": "CUDA graphs of TARGET_VERIFY",
    },
}
"""Parts of the messages for layers that differ from a spec with a window and sinks."""


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "engine"])
@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_backend_refuses_other_layers(engine: str, real: bool, tmp_path: Path) -> None:
    found = called(engine, "refusals", tmp_path, real=real)
    assert {*found} == {*REFUSED[engine]}
    assert {n: m for n, m in REFUSED[engine].items() if m not in found[n]} == {}


def test_vllm_checks_the_features_of_the_backend(tmp_path: Path) -> None:
    found = called("vllm", "features", tmp_path, real=True)
    assert found.pop("fits") == []
    assert {name for name, reasons in found.items() if len(reasons) != 1} == set()


@pytest.mark.parametrize("engine", ADAPTERS)
def test_stand_ins_have_the_signatures_of_the_engine(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed; this passed with {SIGNED[engine]}")
    stand_in(engine, tmp_path)
    own, theirs = (signatures(engine, folder) for folder in (str(tmp_path), ""))
    assert len(own) >= 10
    # The engine may have further fields and parameters at the end.
    assert {n: args for n, args in own.items() if theirs.get(n, [])[: len(args)] != args} == {}


SIGNATURES = """
import importlib, inspect, json, sys

folder, *modules = sys.argv[1:]
if folder:
    sys.path.insert(0, folder)
sys.dont_write_bytecode = True
found = {}
for name in modules:
    for label, member in vars(importlib.import_module(name)).items():
        home = (getattr(member, "__module__", None) or "").partition(".")[0]
        if home != name.partition(".")[0] or label == "MHATokenToKVPool":
            continue
        functions = {label: member} if inspect.isfunction(member) else {}
        if inspect.isclass(member):
            own = [n for n in vars(member) if not n.startswith("_") or n == "__init__"]
            functions = {f"{label}.{n}": getattr(member, n) for n in own}
        for n, function in functions.items():
            if inspect.isfunction(function) or inspect.ismethod(function):
                found[n] = list(inspect.signature(function).parameters)
print(json.dumps(found))
"""


def signatures(engine: str, folder: str) -> dict[str, list[str]]:
    """Return the parameters of the functions in the modules that backends import."""
    modules = [f"{engine}.{name.replace('/', '.')}" for name in STAND_INS[engine]]
    command = [sys.executable, "-c", SIGNATURES, folder, *modules]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("lines", "said", "place"),
    [
        (CAUSAL, "needs the pass `serve`", (1, 1)),
        (SERVE, "see no later keys", (1, 1)),
        (f"{SERVE}mask_mod: q_idx >= kv_idx and kv_idx >= SQ\n", "`SQ` has other values", (7, 11)),
        (f"{SERVE}{CAUSAL}score_mod: score * h\n", "`h` has other values", (8, 12)),
        (f"{SERVE}{CAUSAL}kv_dtype: int8\n", "no cache in int8", (8, 11)),
        (
            f"{SERVE}{CAUSAL}buffers: {{bias: {{shape: [any], dtype: fp32}}}}\n"
            "score_mod: score + bias[kv_idx]\n",
            "no value for the buffer `bias`",
            (8, 11),
        ),
        (
            f"{SERVE}params: {{near: {{type: int, runtime: true}}}}\n"
            "mask_mod: q_idx >= kv_idx and (q_idx - kv_idx < near or kv_idx < 4)\n",
            "no value for the parameter `near`",
            (7, 10),
        ),
        (
            f"{SERVE}params: {{near: {{type: int, runtime: true, within: 131072}}}}\n"
            "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < near\n",
            "`within` of `near` excludes layers without a window",
            (7, 51),
        ),
    ],
)
@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_spec_that_no_layer_can_call(
    engine: str, lines: str, said: str, place: tuple[int, int]
) -> None:
    with pytest.raises(KgenError, match=said) as raised:
        made(engine, HEAD, lines)
    (found,) = raised.value.diagnostics
    assert (found.line, found.column) == place
    assert found.hint


def test_engines_differ() -> None:
    slopes = (
        "buffers: {slopes: {shape: [HQ], dtype: fp32}}\n"
        "score_mod: score + slopes[h] * (kv_idx - q_idx)\n"
    )
    made("vllm", HEAD, SERVE, CAUSAL, slopes)
    with pytest.raises(KgenError, match="no value for the buffer `slopes`"):
        made("sglang", HEAD, SERVE, CAUSAL, slopes)
    wide = HEAD.replace("head_dim: 32", "head_dim: {qk: 48, v: 32}")
    made("sglang", wide, SERVE, CAUSAL)
    with pytest.raises(KgenError, match="one head dim for keys and values"):
        made("vllm", wide, SERVE, CAUSAL)


@pytest.mark.parametrize("engine", ADAPTERS)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dtype: bf16", "dtype: [bf16, fp16]", "runs one dtype and one head dim"),
        ("name: own", "name: register", "already has this name"),
    ],
)
def test_a_package_has_one_spec(engine: str, old: str, new: str, said: str) -> None:
    with pytest.raises(KgenError, match=said):
        made(engine, HEAD.replace(old, new), SERVE, CAUSAL)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (CAUSAL, "fits causal layers"),
        ("mask_mod: kv_idx > q_idx - 128 and q_idx >= kv_idx\n", "a window of 128 keys"),
        (f"{CAUSAL}score_mod: 30.0 * tanh(score / 30.0)\n", "scores capped at 30.0"),
        (CASES["own"][0].removeprefix("gqa: any\n"), "whose mask it replaces, scores of its own"),
        (CASES["any"][0].removeprefix("gqa: any\n"), "any window or none, attention sinks"),
    ],
)
@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_package_says_which_layers_it_fits(engine: str, lines: str, said: str) -> None:
    adapter = made(engine, HEAD, SERVE, lines)
    assert said in adapter.fits[0]
    for name in ("__init__.py", "backend.py"):
        text = " ".join(adapter.folders[f"own_{engine}"][name].split())
        assert adapter.fits[0].partition(" fits ")[2] in text
    assert "Untested: a GPU" in adapter.folders[f"own_{engine}"]["backend.py"]


@pytest.mark.parametrize(
    ("engine", "group"), [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")]
)
def test_the_package_installs_with_its_entry_point(engine: str, group: str, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    written(made(engine, HEAD, SERVE, CAUSAL), tmp_path)
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tmp_path / f"own_{engine}",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    with zipfile.ZipFile(tmp_path / run.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
        (points,) = (wheel.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert f"[{group}]\nown_{engine} = own_{engine}:register\n" in points
    assert {f"own_{engine}/{n}" for n in ("__init__.py", "backend.py", "own/triton.py")} <= {*names}


@pytest.mark.parametrize("engine", ADAPTERS)
def test_the_example_of_the_docs_runs(engine: str, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (script,) = [block for block in blocks if f"import serve_causal_{engine}\n" in block]
    (tmp_path / "example.py").write_text(script)
    stand_in(engine, tmp_path)
    adapt = ["-m", "kgen", "adapt", "serve_causal", "--for", engine, "--no-prove"]
    for arguments in (adapt, ["example.py"]):
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    assert ("[torch.bfloat16] [128] 8" in run.stdout) == (engine == "vllm")


def test_the_docs_name_the_tested_versions() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for versions in PASSED_WITH.values():
        for version in versions.split(" and "):
            assert f"| {version} |" in text
