"""The kernels for Hopper: compared with float64 in `kgen.verify.gluon` on the CPU, and the calls
that launch them.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.single_file import single

from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.schedules.hopper.conditions import without_kernels
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load, loads
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[3]
STOCK = ("gated_delta_rule", "gated_delta_net", "delta_rule", "deltanet_negative")
# Narrow keys with feature maps that are not zero at zero, and 4 blocks of columns of v; nothing
# that multiplies tokens, and no tensor that forward keeps; a decay without a factor of updates.
NARROW = """
kernel: linear_attention
name: narrow
dtype: fp16
head_dim: {qk: 64, v: 256}
heads: any
buffers: {g: {shape: [T, HV], dtype: fp32, grad: true}}
decay: g[t, h]
rule: delta
q_map: elu(x) + 1
k_map: elu(x) + 1
qk_norm: l2
state_dtype: bf16
"""
PLAIN = """
kernel: linear_attention
name: plain
dtype: fp16
head_dim: 64
rule: delta
save: recompute
"""
FORWARD = """
kernel: linear_attention
name: forward_only
dtype: fp16
head_dim: {qk: 128, v: 64}
heads: {qk: 1, v: 3}
buffers: {b: {shape: [T, HV], dtype: fp32}}
rule: delta
beta: sigmoid(b[t, h])
passes: [forward]
"""
SMALL = """
kernel: linear_attention
name: small
dtype: fp16
head_dim: 64
heads: {qk: 2, v: 4}
buffers:
  g: {shape: [T, HV], dtype: fp32, grad: true}
  b: {shape: [T, HV], dtype: fp32, grad: true}
decay: g[t, h]
rule: delta
beta: sigmoid(b[t, h])
qk_norm: l2
"""
OWN = {"narrow": NARROW, "plain": PLAIN, "forward_only": FORWARD, "small": SMALL}


def spec(name: str) -> Loaded:
    if name in OWN:
        return loads(OWN[name], f"{name}.yaml")
    return load(ROOT / "specs" / f"{name}.yaml")


def written(name: str, folder: Path, *change: str) -> Path:
    """Write the single file of a spec, with a change of its text. Return its path."""
    text = single(spec(name))
    if change:
        before, after = change
        assert text.count(before) == 1, f"{text.count(before)} times: {before}"
        text = text.replace(before, after)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def _module(path: Path, seed: int) -> Any:
    from kgen.kernels.linear_attention.schedules.hopper.verify import imported
    from kgen.verify import interpreter
    from kgen.verify.gluon.running import explore

    torch.set_num_threads(1)
    interpreter.mend()
    explore(seed)
    return imported(path, "kgen_test_hopper")


def _wrong(name: str, path: Path, cases: tuple[str, ...], group: str, seed: int) -> list[str]:
    """Return the failures of some cases in one order of warps, and barriers that nobody uses."""
    from kgen.kernels.linear_attention.schedules.hopper import verify as hopper
    from kgen.verify.families import Subject

    module, problem = _module(path, seed), problem_of(spec(name))
    subject = Subject(problem, "triton", path, module, "cpu")
    found = []
    for case in cases or hopper.case_names(problem):
        checks = hopper.run_case(subject, group, case)
        assert checks is not None, f"{case}: no kernel for Hopper was launched"
        found += [f"{case}: {check.message}" for check in checks if not check.ok]
    return [*found, *module._sweep_kernel.unused()]


ALL = pytest.mark.thorough
SLOW = [pytest.param(name, marks=ALL) for name in STOCK if name != "gated_delta_rule"]


@pytest.mark.parametrize("name", ["gated_delta_rule", *SLOW, "narrow", "plain", "forward_only"])
def test_forward(name: str, tmp_path: Path, verdict: Any) -> None:
    path = written(name, tmp_path)
    verdict(problem_of(spec(name)), path)
    assert interpreted(_wrong, name, path, (), "forward", 0) == []


@pytest.mark.parametrize("name", ["gated_delta_rule", *SLOW, "narrow", "plain"])
def test_backward_reads_what_forward_keeps(name: str, tmp_path: Path, verdict: Any) -> None:
    path = written(name, tmp_path)
    verdict(problem_of(spec(name)), path)
    cases = ("hopper-more", "hopper-steep")
    assert interpreted(_wrong, name, path, cases, "backward", 0) == []


@pytest.mark.parametrize("seed", range(1000, 5000, 1000))
def test_forward_in_other_orders(seed: int, tmp_path: Path, verdict: Any) -> None:
    path = written("small", tmp_path)
    verdict(problem_of(spec("small")), path)
    cases = ("hopper-more", "hopper-states")
    assert interpreted(_wrong, "small", path, cases, "forward", seed) == []


MORE, STATES = "hopper-more", "hopper-states"
NEW_STORE = "_slot(stores.new, 0).permute((1, 0)).store(low_new)"
MUTANTS = {
    "k unnormed": ("k = x.to(k_mapped_ptr", "k = k.to(k_mapped_ptr", "forward", MORE),
    "P without the diagonal": (
        "below, pair = i[:, None] > i[None, :], i[:, None] >= i",
        "below, pair = i[:, None] > i[None, :], i[:, None] > i",
    ),
    "P without decay": (
        "p_of_head = p * power * scale",
        "p_of_head = tl.where(pair, p, 0.0) * scale",
    ),
    "P without scale": ("p_of_head = p * power * scale", "p_of_head = p * power"),
    "A without decay": ("tl.where(below, a * power, 0.0)", "tl.where(below, a, 0.0)"),
    "A with the diagonal": ("tl.where(below, a * power, 0.0)", "a * power"),
    "A without betas": ("a_of_head = a_of_head * betas[:, None]", "pass"),
    "A of too few blocks": (
        "i[:, None] // 16 >= i[None, :] // 16",
        "i[:, None] >= i[None, :] + 48",
    ),
    "one head of v": (
        "for member in range(HV // H):\n        chunk =",
        "for member in range(1):\n        chunk =",
    ),
    "factors of other tokens": ("known * before[None, :]", "known * betas[None, :]"),
    "values without betas": ("v.to(gl.float32) * betas[None, :]", "v.to(gl.float32)"),
    "another inverse": ("rest, inverse.permute((1, 0)), zero", "rest, inverse, zero"),
    "keys as columns": ("low, k.permute((1, 0)), zero", "low, q.permute((1, 0)), zero"),
    "queries as keys": ("low, q.permute((1, 0)), zero", "low, k.permute((1, 0)), zero"),
    "queries without decay": ("out = out * queried[None, :]", "out = out * at.scale"),
    "P as columns": ("p.permute((1, 0)), out", "p, out"),
    "updates that stay": ("(new * after[None, :]).to", "new.to"),
    "a state that stays": ("        state = state * last[:, None]\n", ""),
    "an update in the state alone": (
        "state = warpgroup_mma(update, k, state, is_async=True)",
        "state = warpgroup_mma(update, q, state, is_async=True)",
    ),
    "the row of another factor": ("after = _factor(updates, n, 3", "after = _factor(updates, n, 2"),
    "too few chunks": ("for n in range(at.count):", "for n in range(at.count - 1):"),
    "a chunk too few loaded": ("for n in range(at.count + 1):", "for n in range(at.count):"),
    "one factor of five": ("for row in gl.static_range(5):", "for row in gl.static_range(4):"),
    "o of the next chunk": ("gl.where(n > 0, (n - 1) * BT,", "gl.where(n > 0, n * BT,"),
    "o of the last chunk": ("[at.seq, at.h, (at.count - 1) * BT, at", "[at.seq, at.h, 0, at"),
    "another head of k": ("h // (HV // H), pid % blocks", "h % H, pid % blocks"),
    "no initial state": ("    if INITIAL:\n        state = gl", "    if ENDS:\n        state = gl"),
    "a final state of another head": (
        "final = pointers.final + _first_of_state(at.seq, at)",
        "final = pointers.final + _first_of_state(at.seq * 0, at)",
        "forward",
        "hopper-heads",
    ),
    "states of the chunk before": (
        "ends = pointers.ends + _first_of_state(slot, at)",
        "ends = pointers.ends + _first_of_state(at.slot, at)",
        "forward",
        STATES,
    ),
    "rest instead of new": (NEW_STORE, NEW_STORE.replace("low_new", "rest"), "backward", MORE),
    "new of another chunk": ("d.new, [slot, at.h", "d.new, [at.slot, at.h", "backward", MORE),
    "states of another chunk": ("d.states, [slot, at", "d.states, [at.slot, at", "backward", MORE),
    "W of nothing": (
        "    if keep:\n        _launch(",
        "    if within:\n        _launch(",
        "backward",
        MORE,
    ),
}
RACES = {
    "all freed before the last products": (
        "        out = warpgroup_mma_wait(0, deps=[out])\n        out = out",
        "        out = warpgroup_mma_wait(0, deps=[out])\n        _release(updates, n)\n"
        "        _release(outputs, n)\n        out = out",
        "        _release(updates, n)\n        _release(outputs, n)\n        low_out",
        "        low_out",
    ),
    "P freed before the last product": (
        "        out = warpgroup_mma(gl.convert_layout(low_new",
        "        _release(outputs, n)\n        out = warpgroup_mma(gl.convert_layout(low_new",
        "        _release(updates, n)\n        _release(outputs, n)\n",
        "        _release(updates, n)\n",
    ),
    "o overwritten while it leaves": (
        "            tma.store_wait(STORES - 1)\n",
        "",
    ),
    "queries read before they arrive": (
        "        _wait(outputs, n)\n        q, p",
        "        q, p",
        "        _again(outputs, n)\n",
        "",
    ),
    "o sent before TMA sees it": (
        "store(low_out)\n            fence_async_shared()\n            barrier()\n",
        "store(low_out)\n            barrier()\n",
    ),
    "values read before they arrive": ("    _wait(updates, n)\n    v = ", "    v = "),
}


@pytest.mark.parametrize("name", ["right", *MUTANTS])
def test_wrong_kernels_fail(name: str, tmp_path: Path, verdict: Any) -> None:
    problem = problem_of(spec("small"))
    if name == "right":
        path = written("small", tmp_path)
        verdict(problem, path)
        for group, *cases in (
            ("forward", MORE, STATES, "hopper-heads"),
            ("backward", MORE),
        ):
            assert interpreted(_wrong, "small", path, tuple(cases), group, 0) == []
        return
    before, after, *where = MUTANTS[name]
    group, case = where or ("forward", MORE)
    path = written("small", tmp_path, before, after)
    verdict(problem, path)
    assert _failures(path, (case,), group, 0)


@pytest.mark.parametrize("name", [*RACES])
def test_races_are_found(name: str, tmp_path: Path, verdict: Any) -> None:
    changes = RACES[name]
    text = single(spec("small"))
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(before) >= 1, before
        text = text.replace(before, after, 1)
    path = tmp_path / "small.py"
    path.write_text(text)
    verdict(problem_of(spec("small")), path)
    assert any(_failures(path, (MORE,), "forward", seed) for seed in (0, 1000, 2000))


def _failures(path: Path, cases: tuple[str, ...], group: str, seed: int) -> list[str]:
    """Return the failures, or the error of the interpreter."""
    try:
        return interpreted(_wrong, "small", path, cases, group, seed)
    except (RuntimeError, AssertionError) as error:
        return [repr(error)]


# --- calls ------------------------


def _launches(path: Path, arch: str) -> list[tuple[str, str, bool | None]]:
    """Return variant, kernel and KEEP or VALUES of each launch that compile calls make."""
    from kgen.verify.compile_triton import Launch, each_launch
    from kgen.verify.compiling import CompileJob
    from kgen.verify.emitted import emitted_files

    loaded = spec("gated_delta_rule")
    (file,) = emitted_files(path, loaded)
    found: list[tuple[str, str, bool | None]] = []

    def take(variant: str, launch: Launch) -> None:
        flags = [launch.constants[n] for n in ("KEEP", "VALUES") if n in launch.constants]
        found.append((variant, launch.function.fn.__name__, flags[0] if flags else None))

    each_launch(CompileJob(problem_of(loaded), file, arch), take)
    return found


def launches(arch: str) -> list[tuple[str, str, bool | None]]:
    context = multiprocessing.get_context("spawn")  # others preload Triton with its interpreter
    with context.Pool(1) as pool:
        return pool.apply_async(_launches, (ROOT / "generated", arch)).get(120.0)


def test_calls_choose_the_kernels() -> None:
    found = launches("sm_90a")
    own = {"_sweep_kernel", "_equations_hopper_kernel"}
    of = {v: {kernel for variant, kernel, _ in found if variant == v} for v, *_ in found}
    assert own <= of["aligned"]
    assert own <= of["states"]
    assert "_states_kernel" not in of["aligned"] | of["states"]
    assert own.isdisjoint(of["strided"])  # TMA cannot load these tensors
    assert {"_states_kernel", "_output_kernel"} <= of["strided"]
    # Without gradients, forward keeps nothing for backward, and W is not computed.
    kept = [flag for variant, kernel, flag in found if kernel == "_sweep_kernel"]
    assert {*kept} == {False, True}
    solved = [flag for variant, kernel, flag in found if kernel == "_solve_kernel"]
    assert solved.count(False) == kept.count(True)
    assert own.isdisjoint(kernel for _, kernel, _ in launches("sm_80"))


def _kept(path: Path) -> dict[str, Any]:
    """Return the sizes of the results of forward, and the error of a backward pass without them."""
    from kgen.kernels.linear_attention.verify.inputs import sized
    from kgen.verify import interpreter
    from kgen.verify.toolchain import import_file

    interpreter.mend()
    module = import_file(path, "kgen_test_kept")
    inputs = sized(problem_of(spec("small")), "kept", 70, "cpu")
    operator, sizes = module._forward_op, []

    def taken(*args: Any) -> Any:
        results = operator(*args)
        sizes.append([x.numel() for x in results[3:]])
        return results

    module._forward_op = taken
    plain, named = dict(inputs.tensors), dict(inputs.keywords)
    out = module.small(**plain, **named)[0]
    learned = {**plain, "v": plain["v"].clone().requires_grad_()}
    same = module.small(**learned, **named)[0]
    with torch.no_grad():
        module.small(**learned, **named)
    module._forward_op = lambda *args: operator(*args[:-1], False)
    error = ""
    try:
        module.small(**learned, **named)[0].sum().backward()
    except RuntimeError as caught:
        error = str(caught)
    return {"sizes": sizes, "same": torch.equal(out, same.detach()), "error": error}


def test_forward_keeps_tensors_only_for_backward(tmp_path: Path) -> None:
    found = interpreted(_kept, written("small", tmp_path))
    without, kept, disabled = found["sizes"]
    assert not any(without)
    assert not any(disabled)
    assert all(kept)
    assert found["same"]
    assert found["error"] == "small: forward ran without gradients, so it kept nothing for backward"


# --- specs ------------------------

CHANGES = {
    "the rule is `add`, not `delta`": ("rule: delta", "rule: add"),
    "the decay varies along the columns of the keys": (
        "{shape: [T, HV], dtype: fp32, grad: true}\ndecay: g[t, h]",
        "{shape: [T, HV, K], dtype: fp32, grad: true}\ndecay: g[t, h, c]",
    ),
    "sequences are packed": ("rule: delta", "rule: delta\nvarlen: true"),
    "the output has a `skip`": ("rule: delta", "rule: delta\nskip: v"),
    "heads of q and k have 256 columns": ("head_dim: 128", "head_dim: 256"),
    "chunks have 32 tokens, not 64": ("rule: delta", "rule: delta\nchunk_size: 32"),
}
BASE = """kernel: linear_attention
name: base
dtype: bf16
head_dim: 128
buffers:
  g: {shape: [T, HV], dtype: fp32, grad: true}
decay: g[t, h]
rule: delta
"""


@pytest.mark.parametrize("reason", [None, *CHANGES])
def test_specs_with_kernels(reason: str | None) -> None:
    text = BASE.replace(*CHANGES[reason]) if reason else BASE
    assert reason is None or text != BASE
    loaded = loads(text, "base.yaml")
    assert without_kernels(plan_linear_attention(loaded)) == reason
    files = render_spec(loaded)
    assert ("hopper.py" in files) == (reason is None)
    assert ("keep" in files["triton.py"]) == (reason is None)


def test_stock_specs_with_kernels() -> None:
    there = {path.parent.name for path in (ROOT / "generated").glob("*/hopper.py")}
    family = {
        path.stem
        for path in (ROOT / "specs").glob("*.yaml")
        if "kernel: linear_attention\n" in path.read_text(encoding="utf-8")
    }
    assert there & family == {*STOCK}
