"""Operators in C++: schemas, launches on a simulated driver, results, errors, and fallbacks."""

from __future__ import annotations

import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages.c_on_paper import python
from support.packages.operators_on_paper import BUILD, compiled, loaded_operators, sources_of

from kgen.build.native import native_of
from kgen.build.operators import compiled_name, with_code
from kgen.build.package import BuildOptions, build_specs
from kgen.build.replacing import require_replaceable
from kgen.build.stale import stale
from kgen.diagnostics import KgenError
from kgen.render.environment import rendered
from kgen.spec.load import load
from kgen.verify.events import LeftOut

ROOT = Path(__file__).resolve().parents[2]
AWKWARD = """kernel: attention
name: awkward
dtype: fp16
head_dim: 16
gqa: any
sinks: true
lengths: {q: any, kv: any}
buffers:
  double: {shape: [HQ], dtype: fp32}
  found: {shape: [], dtype: fp32}
params:
  register: {type: float, runtime: true}
  NAME: {type: int, runtime: true}
mask_mod: q_idx >= kv_idx - NAME
score_mod: score * register + double[h] * (kv_idx - q_idx) + found
"""
"""Names that mean something else in C++, a number as a buffer, and all kinds of arguments."""
PACKED = """kernel: attention
name: packed
dtype: fp16
head_dim: 16
gqa: any
varlen: true
mask_mod: q_idx >= kv_idx
"""
FORWARD = """kernel: attention
name: alone
dtype: fp16
head_dim: 16
mask_mod: q_idx >= kv_idx
passes: [forward]
"""
"""No backward pass."""
SPECS = {"awkward": AWKWARD, "packed": PACKED, "alone": FORWARD}


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with fake machine code, and operators that are not compiled."""
    return sources_of(SPECS, tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="session")
def awkward(sources: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of the package `awkward`."""
    return compiled(sources, "awkward", pytestconfig.cache)


@pytest.fixture(scope="session")
def alone(sources: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of the package `alone`."""
    return compiled(sources, "alone", pytestconfig.cache)


@pytest.fixture(scope="session")
def packed(sources: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of the package `packed`."""
    return compiled(sources, "packed", pytestconfig.cache)


# --- what there is ------------------------


@pytest.mark.parametrize("spec", sorted(p.stem for p in (ROOT / "specs").glob("*.yaml")))
def test_schemas_are_those_of_python(spec: str) -> None:
    """A program that was exported with one package runs with the other."""
    loaded = load(ROOT / "specs" / f"{spec}.yaml")
    families = ("attention", "linear_attention")
    if loaded.spec.kernel not in families or "serve" in (loaded.spec.passes or ()):
        return
    native = native_of(loaded, {"gqa": (1,), "batch": (1,), "heads": (8,)}, [80, 90])
    emitted = ROOT / "generated" / spec / "triton.py"
    module = importlib.import_module(f"generated.{spec}.triton")
    code = module._LIBRARY.ns[: len("kgen_") + 16]
    if native.operators is None:
        assert native.why_in_python == WHY.get(spec)
        return
    assert spec not in WHY
    text = re.sub(r'"\s+"', "", rendered(with_code(native.operators, emitted)))
    assert f'made_library("{code}", NAME, implement)' in text
    found = re.findall(r'library,\s+"(.*?)",', text)
    first, last = ("_out_op", "_out_and_lse_op", "_forward_op"), ("_decode_op",)
    operators = [n for n in (*first, "_backward_op", *last) if hasattr(module, n)]
    schemas = [getattr(module, place)._schema for place in operators]
    assert found == [str(schema).partition("::")[2] for schema in schemas]
    places = [place for place in operators if place != "_backward_op"]
    assert dict(native.operators.places) == {
        place: getattr(module, place)._schema.name.partition("::")[2] for place in places
    }


WHY = {
    **dict.fromkeys(("block_sparse", "causal_images", "natten_2d"), "the spec needs a block mask"),
    **dict.fromkeys(
        ("head_scale", "pair_bias", "relative_bias", "varlen_alibi"), "a buffer has a gradient"
    ),
}
"""Stock specs of these families with operators in Python only."""


def _heard(spec: str, tmp_path: Path) -> list[str]:
    """Return the reasons that `kgen build --torch` prints for a stock spec before it compiles."""
    loaded, heard = load(ROOT / "specs" / f"{spec}.yaml"), list[str]()
    stopped = mock.patch("kgen.build.package._all_compiled", side_effect=_Stopped)
    with stopped, pytest.raises(_Stopped):
        build_specs(
            [loaded],
            ROOT / "generated",
            tmp_path,
            BuildOptions(["sm_90a"], targets=["triton"], torch=True),
            lambda event: heard.append(event.why) if isinstance(event, LeftOut) else None,
        )
    return heard


class _Stopped(Exception):
    """The end of a build."""


def test_specs_with_operators_in_python_are_named(tmp_path: Path) -> None:
    in_python = "as operators in C++: "
    assert _heard("causal", tmp_path) == []
    assert _heard("pair_bias", tmp_path) == [f"{in_python}a buffer has a gradient"]
    assert _heard("gated_delta_rule", tmp_path) == []
    why = "this kernel family has no operators in C++"
    assert _heard("gated_delta_output", tmp_path) == [f"{in_python}{why}"]


def test_a_package_without_a_compiler_has_the_sources(tmp_path: Path) -> None:
    (tmp_path / "packed.yaml").write_text(PACKED)
    done = python(
        ["-c", BUILD, str(tmp_path), str(tmp_path / "packed.yaml")],
        {"TRITON_INTERPRET": None, "CXX": str(tmp_path / "no-compiler")},
    )
    assert done.returncode == 0, done.stderr
    package = tmp_path / "packed"
    assert sorted(p.name for p in (package / "operators").iterdir()) == [
        "kgen_torch.h",
        "operators.cpp",
    ]
    loaded, asked = [load(tmp_path / "packed.yaml")], (["sm_80", "sm_90a"], None, ["triton"])
    generated = tmp_path / "generated"
    missing = (
        f"packed: `operators/{compiled_name()}` is missing: the operators in C++ were not compiled"
    )
    assert stale(loaded, generated, tmp_path, *asked, c=True) == []
    assert stale(loaded, generated, tmp_path, *asked, torch=True) == [missing]
    done = python(
        [str(package / "_runtime" / "operators.py")], {"CXX": str(tmp_path / "no-compiler")}
    )
    assert done.returncode == 1
    assert "no-compiler cannot run" in done.stderr
    other = package / "operators" / "torch-1.0.0-x86_64.so"
    other.touch()
    require_replaceable(tmp_path, ["packed"])
    other.rename(other.with_name("mine.so"))
    with pytest.raises(KgenError, match="did not write this file"):
        require_replaceable(tmp_path, ["packed"])
    other.with_name("mine.so").unlink()
    (package / "operators" / "operators.cpp").write_text("#error wrong\n")
    done = python([str(package / "_runtime" / "operators.py")], {})
    assert done.returncode == 1
    assert "failed: operators/operators.cpp:1:2: error: #error wrong" in done.stderr
    assert interpreted(_warnings, tmp_path) == []
    other.touch()
    (words,) = interpreted(_warnings, tmp_path)
    assert words.startswith("packed: operators in Python run, because the operators in C++ are not")


def _warnings(folder: Path) -> list[str]:
    """Return the warnings of a package when it is imported."""
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        package = importlib.import_module("packed")
    module = sys.modules["packed.triton"]
    assert package.packed is module.packed
    assert module._out_op._schema.name == f"{module._LIBRARY.ns}::packed"
    return [str(x.message) for x in said if "operators" in str(x.message)]


# --- calls, with the simulated driver ------------------------


def test_results_are_right(awkward: Path) -> None:
    errors, launched = interpreted(_errors, awkward)
    assert launched == ["_forward_kernel", "_delta_kernel", "_dq_kernel", "_dkdv_kernel"]
    assert max(errors.values()) < 4e-3, errors


def _given() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return arguments of `awkward`."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 40, 16, dtype=torch.half) for heads in (4, 2, 2)]
    own = {"double": torch.randn(4), "found": torch.tensor(0.25), "sinks": torch.randn(4)}
    for x in (*tensors, own["sinks"]):
        x.requires_grad_()
    return tensors, {**own, "register": 0.7, "NAME": 3}


def _reference(q: Any, k: Any, v: Any, double: Any, found: Any, sinks: Any, **more: Any) -> Any:
    """Compute `awkward` in float64, with the natural log-sum-exp."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    rows, columns = torch.arange(40)[:, None], torch.arange(40)[None, :]
    scores = q @ k.mT / 4 * more["register"] + found + double[:, None, None] * (columns - rows)
    scores = scores.masked_fill(columns > rows + more["NAME"], -torch.inf)
    lse = torch.cat([scores, sinks[:, None, None].expand(2, 4, 40, 1)], -1).logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _errors(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return the errors of all results, relative to the largest number, and the launches."""
    loaded = loaded_operators(folder, "awkward")
    tensors, keywords = _given()
    exact = [x.detach().double().requires_grad_() for x in (*tensors, keywords["sinks"])]
    want = _reference(*exact[:3], **{**keywords, "sinks": exact[3]})
    got = loaded.function(*tensors, **keywords, return_lse=True)
    weights = torch.randn_like(want[0]), torch.randn_like(want[1])
    gradients = []
    for results, of in ((want, exact), (got, [*tensors, keywords["sinks"]])):
        loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, of))
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    pairs = zip(names, (*got, *gradients[1]), (*want, *gradients[0]), strict=True)
    errors = {
        n: float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        for n, a, b in pairs
    }
    return errors, loaded.kernels()


def test_operators_suit_pytorch(awkward: Path) -> None:
    """`opcheck` compares schemas, autograd, and shapes of fake tensors, also of dynamic shapes."""
    assert interpreted(_checked, awkward) == {"SUCCESS"}


def _checked(folder: Path) -> set[str]:
    loaded = loaded_operators(folder, "awkward")
    (q, k, v), keywords = _given()
    own = [keywords[name] for name in ("double", "found", "sinks")]
    found = set()
    for place in ("_out_op", "_out_and_lse_op"):
        arguments = (q, k, v, *own, 0.25, 0.7, 3)
        found |= set(torch.library.opcheck(getattr(loaded.module, place), arguments).values())
    return found


def test_what_machine_code_does_not_do_python_does(awkward: Path) -> None:
    assert interpreted(_in_python, awkward) == []


def _in_python(folder: Path) -> list[str]:
    """Return the cases in which the fallback to operators in Python is wrong."""
    loaded = loaded_operators(folder, "awkward")
    (q, k, v), keywords = _given()
    wrong = []

    def gradient(q: torch.Tensor) -> torch.Tensor:
        return loaded.function(q, k, v, **keywords).float().sum()

    want = torch.autograd.grad(gradient(q), q)[0]

    def near(x: torch.Tensor) -> bool:
        return bool((x - want).abs().max() < 4e-3 * want.abs().max())

    if loaded.kernels() != ["_forward_kernel", "_delta_kernel", "_dq_kernel", "_dkdv_kernel"]:
        wrong.append("C++ does not launch")
    if not near(torch.func.grad(gradient)(q)) or loaded.kernels():
        wrong.append("torch.func")
    half = {**keywords, "sinks": keywords["sinks"].detach().half()}
    if loaded.function(q, k, v, **half).dtype != q.dtype or loaded.kernels():
        wrong.append("sinks in float16")
    loaded.paper.device(75, 4)
    if not near(torch.autograd.grad(gradient(q), q)[0]) or loaded.kernels():
        wrong.append("a chip without machine code")
    loaded.paper.device(80, 4)
    first = torch.autograd.grad(gradient(q), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="awkward: second derivatives are not supported"):
        torch.autograd.grad(first.sum(), q)
    own = [keywords[name] for name in ("double", "found", "sinks")]
    with pytest.raises(ValueError, match="awkward: scale must be positive, got 0"):
        loaded.module._out_op(q, k, v, *own, 0.0, 0.7, 3)
    return wrong


def test_errors_are_those_of_python(packed: Path) -> None:
    """C++ checks the arguments of `packed`, and the emitted function names mistakes."""
    launched, differing = interpreted(_mistaken, packed)
    assert differing == []
    assert launched == 2, "a right call, without and with gradients"


def _mistaken(folder: Path) -> tuple[int, list[Any]]:
    """Return the number of right calls that C++ launched, and the calls whose errors differ."""
    loaded = loaded_operators(folder, "packed", fast=True)
    q, k, v = (torch.randn(50, heads, 16, dtype=torch.half) for heads in (4, 2, 2))
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    loaded.function(q, k, v, ends, ends)
    loaded.function(q.requires_grad_(), k, v, ends, ends).sum().backward()
    launched = loaded.kernels().count("_forward_kernel")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q.float(), k, v, ends, ends), {}),
        ((q[0], k, v, ends, ends), {}),
        ((q[0, 0], k, v, ends, ends), {}),
        ((torch.nested.nested_tensor([q[0], q[1]]), k, v, ends, ends), {}),
        ((None, k, v, ends, ends), {}),
        ((q, k[:40], v, ends, ends), {}),
        ((q[:, :3], k, v, ends, ends), {}),
        ((q, k, v, ends.long(), ends), {}),
        ((q, k, v, ends[:2], ends), {}),
        ((q, k, v, ends.repeat_interleave(2)[::2], ends), {}),
        ((q, k, v, ends[:1], ends[:1]), {}),
        ((q.to_sparse(), k, v, ends, ends), {}),
        ((q, k, v, ends, ends), {"scale": 0.0}),
        ((q, k, v, ends, ends), {"scale": math.inf}),
        ((q, k, v, ends, ends), {"scale": 1e-40}),
        ((q, k, v, ends, ends), {"scale": "1"}),
        ((q, k, v, ends, ends), {"scale": True}),
        ((q, k, v.to("meta"), ends, ends), {}),
    ]
    emitted = loaded.function.__globals__["_emitted"]
    differing = []
    for arguments, keywords in calls:
        said = []
        for function in (emitted, loaded.function):
            try:
                function(*arguments, **keywords)
                said.append("nothing")
            except (TypeError, ValueError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        if said[0] != said[1] or said[0] == "nothing":
            differing.append((len(differing), *said))
    return launched, differing + ([] if not loaded.kernels() else ["a wrong call launches"])


@pytest.mark.thorough  # the compiler takes half a minute
def test_a_spec_without_backward_refuses_gradients(alone: Path) -> None:
    error, launched, said = interpreted(_alone, alone)
    assert error < 4e-3
    assert launched == ["_forward_kernel"] * 2
    assert said[0] == said[1]
    assert said[0].startswith("alone: q requires grad, but the spec has no backward pass")
    assert said[2] == "alone: a tensor requires grad, but the spec has no backward pass"


def _alone(folder: Path) -> tuple[float, list[str], list[str]]:
    """Return the error of a result, the launches, and messages of calls that need a gradient."""
    loaded = loaded_operators(folder, "alone", fast=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 16, dtype=torch.half) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    got = loaded.function(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        loaded.function(q, k, v)
    kernels = loaded.kernels()
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: loaded.function(q, k, v),
        lambda: loaded.function.__globals__["_emitted"](q, k, v),
        lambda: loaded.module._out_op(q, k, v, 0.25),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(str(error.value).partition("\n")[0])
    return float((got.double() - want).abs().max()), kernels, said
