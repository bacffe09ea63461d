"""Imported functions keep their meaning. These tests run the functions; kgen never does."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import SIZES, captured, expected, got, same
from pattern_table import MASKS, SCORES

from kgen.diagnostics import KgenError
from kgen.flex import spec as live_spec
from kgen.flex.flexcode import flex_code
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled
from kgen.kernels.attention.verify.reference import Call, attention
from kgen.spec.load import loads
from kgen.verify.evaluate import evaluate

HERE = Path(__file__).parent

SINGLE = dict.fromkeys(("logarithmic", "log_distance"), 1e-06)
"""Functions that compute in float32 in any dtype, with their tolerance."""
ALL = [("mask_mod", text) for text in MASKS] + [("score_mod", text) for text in SCORES]


def made(name: str) -> Any:
    """Return the module `patterns`, the oracle, under a name."""
    torch.manual_seed(0)
    found = importlib.util.spec_from_file_location(name, HERE / "patterns.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def patterns(in_float64: None) -> Any:
    """Patterns with tensors of float64."""
    return made("patterns")


@pytest.fixture(scope="module")
def live_patterns(in_float64: None) -> Any:
    """Patterns with tensors of float32, as in models. They compute in float64 where possible."""
    torch.set_default_dtype(torch.float32)
    module = made("live_patterns")
    torch.set_default_dtype(torch.float64)
    return module


NAMED: dict[str, torch.Tensor] = {}
"""The tensors that EXPRs name by `:=`."""


def given() -> dict[str, torch.Tensor]:
    """Return the tensors that EXPRs use and no source defines."""
    grouped = torch.arange(128).reshape(2, 64) // 11 % 5 - 1
    known = {
        "DOC": torch.arange(64) // 9,
        "LEFT": torch.tensor([2, 3]),
        "GROUPS": grouped,
        "KEPT": grouped > 0,
    }
    return known | NAMED


def tensors_of(function: Any, module: ModuleType) -> dict[str, torch.Tensor]:
    """Return every tensor that a function sees, by name."""
    found = {n: t for n, t in vars(module).items() if isinstance(t, torch.Tensor)} | given()
    return found | {name.strip("_"): value for name, value in found.items()} | captured(function)


def ran(text: str, module: ModuleType) -> Any:
    scope = dict(vars(module)) | given()
    function = eval(text, scope)
    NAMED.update(
        {name: scope[name] for name in {*scope} - {*vars(module)} if name != "__builtins__"}
    )
    return function


@pytest.mark.parametrize(("field", "text"), ALL)
def test_pattern(field: str, text: str, patterns: Any) -> None:
    spec = imported(str(HERE / "patterns.py"), {field: text}, Options(name="pattern"))
    _, loaded = settled(spec, "pattern.yaml")
    function = ran(text, patterns)
    same(
        got(loaded, field, tensors_of(function, patterns)),
        expected(function, field),
        SINGLE.get(text, 1e-9),
    )


@pytest.mark.parametrize(("field", "text"), ALL)
def test_pattern_as_a_live_function(field: str, text: str, live_patterns: Any) -> None:
    if text.startswith("lambda"):
        pytest.skip("it has no source")
    function = ran(text, live_patterns)
    loaded = loads(live_spec(**{field: function}, name="pattern"), "pattern.yaml")
    same(got(loaded, field, tensors_of(function, live_patterns)), expected(function, field), 1e-6)


@pytest.mark.parametrize(("field", "text"), ALL)
def test_pattern_and_back(field: str, text: str, patterns: Any, tmp_path: Path) -> None:
    """The code of `explain --flex` computes the same values, and imports as the same spec."""
    spec = imported(str(HERE / "patterns.py"), {field: text}, Options(name="pattern"))
    _, loaded = settled(spec, "pattern.yaml")
    if field not in loaded.trees:
        return
    source = flex_code(loaded).partition("\nblock_mask =")[0].partition("\nout =")[0]
    function = ran(text, patterns)
    scope = {n: t.detach() for n, t in tensors_of(function, patterns).items()} | SIZES
    exec(source, scope)
    same(expected(scope[field], field), expected(function, field), SINGLE.get(text, 1e-9))


def test_methods_and_objects(live_patterns: Any) -> None:
    """The attributes of a live object are known."""
    torch.set_default_dtype(torch.float32)
    settings = live_patterns.Settings(9)
    torch.set_default_dtype(torch.float64)
    text = live_spec(mask_mod=settings.mask, score_mod=settings.score(), name="settings")
    loaded = loads(text, "settings.yaml")
    same(got(loaded, "mask_mod", {"bias": settings.bias}), expected(settings.mask, "mask_mod"))
    same(got(loaded, "score_mod", {"bias": settings.bias}), expected(settings.score(), "score_mod"))


@pytest.mark.parametrize(
    ("field", "text", "written"),
    [
        (
            "mask_mod",
            "all_of(causal, both_sides(2))",
            "q_idx >= kv_idx and abs(q_idx - kv_idx) <= 2",
        ),
        (
            "mask_mod",
            "any_of(causal, both_sides(2))",
            "q_idx >= kv_idx or abs(q_idx - kv_idx) <= 2",
        ),
        ("score_mod", "causal_finfo", "where(q_idx >= kv_idx, score, -inf)"),
        ("score_mod", "causal_half", "score + where(q_idx < kv_idx, 1, 0) * -65504.0"),
    ],
)
def test_numbers_that_say_something_else(field: str, text: str, written: str) -> None:
    """Truth values of numbers are decided, and the smallest finite number is minus infinity where a
    `where` selects it.
    """
    spec = imported(str(HERE / "patterns.py"), {field: text}, Options())
    assert f"{field}: {written}\n" in spec.text()


def test_shapes_and_dtypes_are_those_of_the_source() -> None:
    asked = {"score_mod": "bias_by_distance", "mask_mod": "document(padded, DOC)"}
    spec = imported(str(HERE / "patterns.py"), asked, Options())
    _, loaded = settled(spec, "spec.yaml")
    found = {name: (buffer.shape, buffer.dtype) for name, buffer in loaded.spec.buffers.items()}
    assert found == {
        "distance_table": (("HQ", 32), "fp32"),
        "DOC": (("SQ",), "int32"),
        "padding": (("B", "SK"), "bool"),
    }
    assert loaded.spec.name == "bias_by_distance_document_padded"
    assert "DOC: {shape: [SQ], dtype: int32}" in spec.text()
    assert "int32 assumed" in spec.text()


def test_learned_tensors_have_gradients() -> None:
    spec = imported(str(HERE / "patterns.py"), {"score_mod": "gated"}, Options())
    assert settled(spec, "spec.yaml")[1].spec.buffers["gate"].grad


def test_numbers_that_learn_are_no_constants(live_patterns: Any) -> None:
    """A number that requires a gradient is a learned buffer, both from a source and from a live
    function.
    """
    spec = imported(str(HERE / "patterns.py"), {"score_mod": "by_learned_numbers"}, Options())
    live = live_spec(score_mod=live_patterns.by_learned_numbers, name="alive")
    for found in (settled(spec, "spec.yaml")[1], loads(live, "alive.yaml")):
        buffers = {name: (b.shape, b.grad) for name, b in found.spec.buffers.items()}
        assert buffers == dict.fromkeys(("rate", "offset", "floor_of", "sharpness"), ((), True))
    made = imported(
        str(HERE / "patterns.py"), {"score_mod": "by_numbers_of_a_factory()"}, Options()
    )
    found = settled(made, "spec.yaml")[1].spec.buffers
    assert {name: (b.shape, b.dtype, b.grad) for name, b in found.items()} == dict.fromkeys(
        ("learned", "rate"), ((), "any", True)
    )


@pytest.mark.parametrize("text", ["straight_through", "without_gradient", "by_modes_of_gradients"])
def test_what_torch_detaches_has_no_gradient(text: str, live_patterns: Any) -> None:
    """Derivatives of an imported function are its own, for the score and for learned tensors."""
    loaded = settled(
        imported(str(HERE / "patterns.py"), {"score_mod": text}, Options()), "spec.yaml"
    )[1]
    score = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)
    learned = [score, live_patterns.rate, live_patterns.gate, live_patterns.shared]
    at = {"b": 0, "h": 2, "q_idx": 3, "kv_idx": 1}
    place = {n: torch.tensor(i) for n, i in at.items()}
    env = {
        **SIZES,
        **place,
        "score": score,
        "rate": learned[1],
        "gate": learned[2],
        "shared": learned[3],
    }
    own = getattr(live_patterns, text)(score, *place.values())
    read = evaluate(loaded.trees["score_mod"], env, torch)
    found = [
        torch.autograd.grad(x.sum(), learned, allow_unused=True, materialize_grads=True)
        for x in (read, own)
    ]
    for got_, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got_, wanted)


def test_tensors_of_modules_have_the_dtype_that_the_module_gives_them(live_patterns: Any) -> None:
    """`model.bfloat16()` converts parameters, and buffers of floating point."""
    spec = imported(str(HERE / "patterns.py"), {"score_mod": "gated"}, Options())
    assert settled(spec, "spec.yaml")[1].spec.buffers["gate"].dtype == "any"
    module = live_patterns.Biased().float()
    found = loads(
        live_spec(score_mod=module.score, mask_mod=module.mask, name="biased"), "x.yaml"
    ).spec
    dtypes = {name: (buffer.dtype, buffer.grad) for name, buffer in found.buffers.items()}
    assert dtypes == {
        "bias": ("any", True),
        "frozen": ("any", False),
        "steps": ("any", False),
        "ends": ("int32", False),
    }


def test_a_live_object_that_is_called(live_patterns: Any) -> None:
    reach = live_patterns.Reach(7)
    loaded = loads(live_spec(mask_mod=reach, name="reach"), "reach.yaml")
    same(got(loaded, "mask_mod", {}), expected(reach, "mask_mod"))


def test_an_extent_that_nothing_says_is_open() -> None:
    asked = {"mask_mod": "document_local(causal, DOC, STARTS)"}
    text, loaded = settled(imported(str(HERE / "patterns.py"), asked, Options()), "spec.yaml")
    assert loaded.spec.buffers["STARTS"].shape == ("any",)
    assert "STARTS: {shape: [any], dtype: int32}" in text


def test_names_of_kernels_stay_those_of_users(tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text(
        "import torch\n"
        "acc, delta = torch.zeros(64), torch.zeros(4)\n"
        "start, mask = torch.zeros(2, dtype=torch.int32), torch.ones(16, dtype=torch.bool)\n"
        "def score(score, b, h, i, j, W=8):\n"
        "    block_size = 4\n"
        "    return score * acc[j] + delta[h] * (i // block_size)\n"
        "def kept(b, h, i, j):\n"
        "    return (j >= start[b]) & mask[j % 16]\n"
    )
    asked = {"score_mod": "score", "mask_mod": "kept"}
    _, loaded = settled(imported(str(path), asked, Options()), "spec.yaml")
    assert set(loaded.spec.buffers) == {"acc", "delta", "start", "mask"}


def test_what_lies_beside_a_package_is_another(tmp_path: Path) -> None:
    """A package may use only its own modules: a neighbor counts as an installed package."""
    for package, text in (
        ("mine", "from . import helpers"),
        ("other", "def same(x):\n    return x\n"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "mine/helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    mods = tmp_path / "mine/mods.py"
    own = "from mine.helpers import twice\ndef mod(b, h, q, k):\n    return twice(q) >= k\n"
    mods.write_text(own)
    spec = imported(str(mods), {"mask_mod": "mod"}, Options())
    assert "mask_mod: 2 * q_idx >= kv_idx" in spec.text()
    mods.write_text(
        own.replace("twice(q)", "same(q)").replace("mine.helpers import twice", "other import same")
    )
    with pytest.raises(KgenError, match="a function of another package"):
        imported(str(mods), {"mask_mod": "mod"}, Options())


def test_an_error_from_python_says_what_the_command_says() -> None:
    table = torch.zeros(4, 4)

    def summed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[q].sum()

    with pytest.raises(KgenError) as caught:
        live_spec(score_mod=summed)
    said = str(caught.value)
    line = summed.__code__.co_firstlineno + 1
    assert said.startswith("error[reduction]: `.sum()` is a reduction\n")
    assert f"test_import.py:{line}:24\n" in said
    assert "        return score + table[q].sum()\n" in said
    assert "= hint: a mod computes one pair" in said
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.exit_code) == (said, 2)


def test_lengths_that_are_read_are_given_to_the_code_of_flexattention() -> None:
    spec = (
        "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\nlengths: {kv: {per_batch: true}}\n"
    )
    code = flex_code(loads(spec + "mask_mod: kv_lens[b] - kv_idx < 30\n", "x.yaml"))
    assert "def x_mods(kv_lens):" in code
    assert "return (kv_idx < kv_lens[b]) & (kv_lens[b] - kv_idx < 30)" in code


@pytest.mark.parametrize("lengths", ["any", "{per_batch: true}"])
def test_queries_at_the_end_stand_there_in_the_code_of_flexattention(lengths: str) -> None:
    """FlexAttention counts queries from zero.

    In float64 the emitted code must agree with the reference.
    """
    spec = "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 8\nalign: end\n"
    spec += "buffers: {m: {shape: [HQ], dtype: fp32}}\nscore_mod: score + m[h] * (kv_idx - q_idx)\n"
    mods = "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < 9\n"
    loaded = loads(spec + f"lengths: {{kv: {lengths}}}\n" + mods, "x.yaml")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (5, 20, 20))
    lens = torch.tensor([20, 13]) if loaded.spec.per_batch else None
    scope = {
        "q": q,
        "k": k,
        "v": v,
        "m": torch.tensor([0.5, 0.1], dtype=torch.float64),
        "kv_lens": lens,
    }
    exec(flex_code(loaded), scope | {"B": 2, "HQ": 2, "HKV": 2, "SQ": 5, "SK": 20}, scope)
    at = {"aligned_to_end": True, "kv_lens": lens, "buffers": {"m": scope["m"]}}
    wanted = attention(
        q, k, v, Call(score_mod=loaded.trees["score_mod"], mask_mod=loaded.trees["mask_mod"], **at)
    )
    assert torch.allclose(scope["out"], wanted.out, atol=1e-6)
