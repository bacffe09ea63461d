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
# The kernel of gradients is in Gluon for K = V = 128, and in Triton for other columns.
WIDE = SMALL.replace("small", "wide").replace("64", "128").replace("qk: 2, v: 4", "qk: 1, v: 2")
OWN = {"narrow": NARROW, "plain": PLAIN, "forward_only": FORWARD, "small": SMALL, "wide": WIDE}


def spec(name: str) -> Loaded:
    if name in OWN:
        return loads(OWN[name], f"{name}.yaml")
    return load(ROOT / "specs" / f"{name}.yaml")


FORWARD_KERNELS = ("def _equations_hopper_kernel", "def _pairs_hopper_kernel")
BACKWARD_KERNELS = ("def _pairs_hopper_kernel", "# --- launch on Hopper")
LAUNCHERS = ("# --- launch on Hopper", "# --- launch --")


def written(name: str, folder: Path) -> Path:
    """Write the single file of a spec. Return its path."""
    path = folder / f"{name}.py"
    path.write_text(single(spec(name)))
    return path


def changed(path: Path, part: tuple[str, str], before: str, after: str) -> Path:
    """Change the text between two marks of a file."""
    text = path.read_text()
    begin, end = (text.index(mark) for mark in part)
    inside = text[begin:end]
    assert inside.count(before) == 1, f"{inside.count(before)} times: {before}"
    path.write_text(text[:begin] + inside.replace(before, after) + text[end:])
    return path


def _module(path: Path, seed: int) -> Any:
    from kgen.kernels.linear_attention.schedules.hopper.verify import imported
    from kgen.verify import interpreter
    from kgen.verify.gluon.running import explore

    torch.set_num_threads(1)
    interpreter.mend()
    explore(seed)
    return imported(path, "kgen_test_hopper")


def _wrong(of: str, path: Path, cases: tuple[str, ...], group: str, seed: int) -> list[str]:
    """Return the failures of some cases in one order of warps, and barriers that nobody uses."""
    from kgen.kernels.linear_attention.schedules.hopper import verify as hopper
    from kgen.verify.families import Subject

    module, problem = _module(path, seed), problem_of(spec(of))
    subject = Subject(problem, "triton", path, module, "cpu")
    found = []
    for case in cases or hopper.case_names(problem):
        checks = hopper.run_case(subject, group, case)
        assert checks is not None, f"{case}: no kernel for Hopper was launched"
        found += [f"{case}: {check.message}" for check in checks if not check.ok]
    names = ("_sweep_kernel", "_sweep_back_kernel", "_gradients_hopper_kernel")
    kernels = [vars(module).get(name) for name in names[: 3 if group == "backward" else 1]]
    gluon = [kernel for kernel in kernels if hasattr(kernel, "unused")]
    return [*found, *(text for kernel in gluon for text in kernel.unused())]


ALL = pytest.mark.thorough
SLOW = [pytest.param(name, marks=ALL) for name in STOCK if name != "gated_delta_rule"]


@pytest.mark.parametrize("name", ["gated_delta_rule", *SLOW, "narrow", "plain", "forward_only"])
def test_forward(name: str, tmp_path: Path, verdict: Any) -> None:
    path = written(name, tmp_path)
    verdict(problem_of(spec(name)), path)
    assert interpreted(_wrong, name, path, (), "forward", 0) == []


@pytest.mark.parametrize("name", ["gated_delta_rule", *SLOW, "narrow", "plain", "wide"])
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
        "pair = i[:, None] >= i[None, :]",
        "pair = i[:, None] > i[None, :]",
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
}
HEADS, PARTS = "hopper-heads", "hopper-parts"
X = "x = warpgroup_mma(low_dnew, inverse, zero"
BACK_MUTANTS = {
    "P without scale": ("p_of_head = p * power * scale", "p_of_head = p * power"),
    "chunks from the first": ("gl.maximum(at.count - 1 - n, 0)", "gl.minimum(n, at.count - 1)"),
    "the inverse as columns": (X, X.replace("inverse", "inverse.permute((1, 0))")),
    "P as rows": ("(of_pairs, p, zero", "(of_pairs, p.permute((1, 0)), zero"),
    "keys as queries": ("low, k.permute((1, 0)), zero", "low, q.permute((1, 0)), zero"),
    "known values without decay": ("known = known * after[None, :]", "known = known * 1.0"),
    "queries without decay": ("gl.float32) * queried[None, :]", "gl.float32) * at.scale"),
    "a state that stays": ("        dstate = dstate * last[:, None]\n", ""),
    "updates without decay": ("(x * (0.0 - before)[None, :])", "(0.0 - x)"),
    "updates that are added": ("(0.0 - before)[None, :]", "before[None, :]"),
    "the row of another factor": ("before = _factor(early, n, 1", "before = _factor(early, n, 0"),
    "too few chunks": ("for n in range(at.count):", "for n in range(at.count - 1):"),
    "x of another chunk": ("d.x, [slot, at.h", "d.x, [at.slot, at.h"),
    "states of another chunk": ("d.dstates, [slot, at", "d.dstates, [at.slot, at"),
    "dnew instead of x": (".store(low_x)", ".store(dnew.to(d.k.dtype))"),
    "a final state of another head": (
        "pointers.final + _first_of_state(at.seq, at)",
        "pointers.final + _first_of_state(at.seq * 0, at)",
        HEADS,
    ),
    "an initial state of another head": (
        "pointers.initial + _first_of_state(at.seq, at)",
        "pointers.initial + _first_of_state(at.seq, at) * 0",
    ),
    "the batch of another row": ("Place(seq, seq * NT", "Place(seq * 0, seq * NT", HEADS),
    "dv without betas": ("dv = x * betas[:, None]", "dv = x"),
    "dA of the other sign": ("tl.where(below, -dA * power", "tl.where(below, dA * power"),
    "dA without decay": ("tl.where(below, -dA * power", "tl.where(below, -dA"),
    "dA with the diagonal": ("tl.where(below, -dA * power, 0.0)", "-dA * power"),
    "dA of rows": ("(dA + tl.trans(dA))", "dA"),
    "decays without betas": ("    products = products * betas[:, None]\n", ""),
    "decays without the state": (" - before * of_rows", ""),
    "betas without the state": (" - tl.exp2(G) * of_rows", ""),
    "the last decay without states": ("tl.where(i == BT - 1, after, 0.0)", "0.0"),
    "the last decay without keys": (" + tl.sum(tl.sum(k * dk, 1), 0)", ""),
    "keys without the decay of states": ("xs * (-before)[:, None]", "xs * (-betas)[:, None]"),
    "dk of rows": ("tl.dot(tl.trans(ds), q, dk)", "tl.dot(ds, q, dk)"),
    "dq without decay": ("dq = dq * (tl.exp2(G) * scale)[:, None]", "dq = dq * scale"),
    "no columns of v": ("tl.range(0, V, 64", "tl.range(64, V, 64"),
}
WIDE_MUTANTS = {
    "dv without betas": ("v.store((x * betas[:, None])", "v.store((x)"),
    "ds without scale": ("_power(r.rows, n, 0) * grid.scale", "_power(r.rows, n, 0)"),
    "dA with the diagonal": ("power = _power(r.rows, n, 1)", "power = _power(r.rows, n, 0)"),
    "dA without decay": (
        "        dA = dA * power\n",
        "        dA = gl.where(power > 0.0, dA, 0.0)\n",
    ),
    "keys without betas": ("(dA * of_rows[:, None])", "(0.0 - dA)"),
    "queries without decay": ("dq = dq * queried[:, None]", "dq = dq * grid.scale"),
    "the state without decay": ("        of_y = of_y * decayed[:, None]\n", ""),
    "no part through the system": ("x.store((of_y * betas[:, None])", "x.store((of_y * 0.0)"),
    "dk of rows": ("ds.slots.permute((1, 0)), q, dk", "ds.slots, q, dk"),
    "dA of rows": ("scaled.slots.permute((1, 0)), k, dk", "scaled.slots, k, dk"),
    "updates without decay": ("        dk = dk * after[:, None]\n", ""),
    "one half of the state twice": ("static_range(64 * HALF, 64 * HALF + 64", "static_range(0, 64"),
    "all products of rows": ("gl.where(i[:, None] == j[None, :], total, 0.0)", "total"),
    "states without decay": (", 1), 0) * gl.exp2(G_last)", ", 1), 0)"),
    "the last decay without keys": ("gl.where(token == BT - 1, last, 0.0) -", "0.0 -"),
    "both halves in one part": (", 3 + HALF, OF_TRACE)", ", 3, OF_TRACE)"),
    "betas without the system": ("at, dbetas, 1, TOKEN)", "at, 0.0 * dbetas, 1, TOKEN)"),
    "decays of another sign": ("0.0 - betas * dbetas, 1", "betas * dbetas, 1"),
    "heads of q": ("number // grid.HV, number % grid.HV", "number // grid.HV, number % grid.H"),
    "the first tile again": ("grid.first + n * grid.step", "grid.first + n * 0"),
    "parts next to each other": ("args.grid.all * PART", "args.grid.all * 0 * PART"),
}
WIDE_RACES = {
    "x overwritten before its last read": "        _wait(args.shared.read, n)\n",
    "x read before it is complete": "        _wait(rest, n)\n",
    "ds read before it is complete": "        _wait(ds, n)\n",
    "dA read before it is complete": "        _wait(scaled, n)\n",
    "ds overwritten before its last read": "        _free(ds, n)\n",
    "dA overwritten before its last read": "        _free(scaled, n)\n",
    "keys read before they arrive": "        _wait(r.dstate, n)\n        new",
    "values read before they arrive": "    _wait(r.v, n)\n",
}
LAUNCH_MUTANTS = {
    "parts without a state": (
        "before, after = carried[-2:]",
        "before, after = initial_state, carried[-1]",
        "forward",
    ),
    "parts without the gradient of a state": (
        "after, before = carried[-2:]",
        "after, before = dfinal_state, carried[-1]",
        "backward",
    ),
    "one part": (
        "for tokens, chunks, event in swept:",
        "for tokens, chunks, event in swept[:1]:",
        "backward",
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
BACK_RACES = {
    "all freed before the last product": (
        "        dstate = warpgroup_mma(update, k, dstate",
        "        _release(early, n)\n        _release(late, n)\n"
        "        dstate = warpgroup_mma(update, k, dstate",
        "        dstate = warpgroup_mma_wait(0, deps=[dstate])\n        _release(early, n)\n"
        "        _release(late, n)\n",
        "        dstate = warpgroup_mma_wait(0, deps=[dstate])\n",
    ),
    "states overwritten while they leave": (
        "        tma.store_wait(0)\n        _slot",
        "        _slot",
    ),
    "queries read before they arrive": ("        _wait(late, n)\n", ""),
    "gradients read before they arrive": ("    _wait(early, n)\n    do = ", "    do = "),
    "x sent before TMA sees it": (
        "store(low_x)\n        fence_async_shared()\n",
        "store(low_x)\n",
    ),
}


def test_right_kernels_pass(tmp_path: Path, verdict: Any) -> None:
    path = written("small", tmp_path)
    verdict(problem_of(spec("small")), path)
    for group, *cases in (
        ("forward", MORE, STATES, HEADS, PARTS),
        ("backward", MORE, HEADS, PARTS),
    ):
        assert interpreted(_wrong, "small", path, tuple(cases), group, 0) == []


@pytest.mark.parametrize("name", [*MUTANTS])
def test_wrong_kernels_fail(name: str, tmp_path: Path, verdict: Any) -> None:
    before, after, *where = MUTANTS[name]
    group, case = where or ("forward", MORE)
    path = changed(written("small", tmp_path), FORWARD_KERNELS, before, after)
    verdict(problem_of(spec("small")), path)
    assert _failures(path, (case,), group, 0)


@pytest.mark.parametrize("name", [*BACK_MUTANTS])
def test_wrong_backward_kernels_fail(name: str, tmp_path: Path, verdict: Any) -> None:
    before, after, *where = BACK_MUTANTS[name]
    path = changed(written("small", tmp_path), BACKWARD_KERNELS, before, after)
    verdict(problem_of(spec("small")), path)
    assert _failures(path, tuple(where) or (MORE,), "backward", 0)


@pytest.mark.parametrize("name", [*WIDE_MUTANTS])
def test_wrong_gradients_in_gluon_fail(name: str, tmp_path: Path, verdict: Any) -> None:
    path = changed(written("wide", tmp_path), BACKWARD_KERNELS, *WIDE_MUTANTS[name])
    verdict(problem_of(spec("wide")), path)
    assert _failures(path, (MORE,), "backward", 0)


@pytest.mark.parametrize("name", [*WIDE_RACES])
def test_races_of_gradients_are_found(name: str, tmp_path: Path, verdict: Any) -> None:
    line = WIDE_RACES[name]
    path = _raced((line, line[line.index("\n") + 1 :]), BACKWARD_KERNELS, written("wide", tmp_path))
    verdict(problem_of(spec("wide")), path)
    assert any(_failures(path, (MORE,), "backward", seed) for seed in (0, 1000, 2000))


@pytest.mark.parametrize("name", [*LAUNCH_MUTANTS])
def test_wrong_launches_fail(name: str, tmp_path: Path, verdict: Any) -> None:
    before, after, group = LAUNCH_MUTANTS[name]
    path = changed(written("small", tmp_path), LAUNCHERS, before, after)
    verdict(problem_of(spec("small")), path)
    assert _failures(path, (PARTS,), group, 0)


def _raced(changes: tuple[str, ...], part: tuple[str, str], path: Path) -> Path:
    text = path.read_text()
    begin, end = (text.index(mark) for mark in part)
    inside = text[begin:end]
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert inside.count(before) >= 1, before
        inside = inside.replace(before, after, 1)
    path.write_text(text[:begin] + inside + text[end:])
    return path


@pytest.mark.parametrize("name", [*RACES])
def test_races_are_found(name: str, tmp_path: Path, verdict: Any) -> None:
    path = _raced(RACES[name], FORWARD_KERNELS, written("small", tmp_path))
    verdict(problem_of(spec("small")), path)
    assert any(_failures(path, (MORE,), "forward", seed) for seed in (0, 1000, 2000))


@pytest.mark.parametrize("name", [*BACK_RACES])
def test_races_of_backward_are_found(name: str, tmp_path: Path, verdict: Any) -> None:
    path = _raced(BACK_RACES[name], BACKWARD_KERNELS, written("small", tmp_path))
    verdict(problem_of(spec("small")), path)
    assert any(_failures(path, (MORE,), "backward", seed) for seed in (0, 1000, 2000))


def _failures(path: Path, cases: tuple[str, ...], group: str, seed: int) -> list[str]:
    """Return the failures, or the error of the interpreter."""
    try:
        return interpreted(_wrong, path.stem, path, cases, group, seed)
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
    back = {"_pairs_hopper_kernel", "_sweep_back_kernel", "_gradients_hopper_kernel"}
    of = {v: {kernel for variant, kernel, _ in found if variant == v} for v, *_ in found}
    assert own <= of["aligned"]
    assert own <= of["states"]
    assert back <= of["aligned"] | of["states"]
    assert {"_states_kernel", "_states_back_kernel"}.isdisjoint(of["aligned"] | of["states"])
    assert (own | back).isdisjoint(of["strided"])  # TMA cannot load these tensors
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


# Gradients of o that PyTorch calls contiguous, and that TMA refuses: a stride of 1 along one
# sequence, and an address that is no multiple of 16.
REFUSED = {
    "stride": lambda do: do.as_strided(do.shape, (1, *do.stride()[1:])),
    "address": lambda do: torch.cat([do.new_ones(3), do.flatten()])[3:].view(do.shape),
}


def _refused(path: Path, kind: str) -> list[str]:
    """Return the differences of gradients from those of a dense gradient of o, and bad tiles."""
    from kgen.kernels.linear_attention.verify.inputs import sized

    module = _module(path, 0)
    inputs = sized(problem_of(spec("small")), "refused", 70, "cpu")
    tensors = {n: x.clone().requires_grad_() for n, x in inputs.tensors.items()}
    leaves = [tensors[name] for name in ("q", "k", "v")]
    found, tiles = [], module._gluon_tiles

    def checked(x: torch.Tensor, *sizes: int) -> Any:
        at = [x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1])]
        found.extend(f"TMA refuses {n}" for n in at if n % 16)
        return tiles(x, *sizes)

    module._gluon_tiles = checked
    o = module.small(**tensors, **inputs.keywords)[0]
    do = torch.randn(o.shape).to(o.dtype)
    want = torch.autograd.grad(o, leaves, do, retain_graph=True)
    strange = REFUSED[kind](do)
    assert torch.equal(strange, do)
    assert strange.is_contiguous()
    got = torch.autograd.grad(o, leaves, strange)
    same = all(map(torch.equal, want, got))
    return [*found, *([] if same else ["other gradients"])]


@pytest.mark.parametrize("kind", [*REFUSED])
def test_backward_copies_what_tma_refuses(kind: str, tmp_path: Path) -> None:
    assert interpreted(_refused, written("small", tmp_path), kind) == []


class _Stream:
    """A stream that writes down its waits."""

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: _Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits for", event))


def _streams(path: Path) -> list[tuple[str, ...]]:
    """Return waits, and the stream of each sweep and kernel of gradients, of a call in parts."""
    import contextlib
    from collections.abc import Iterator
    from unittest import mock

    from kgen.kernels.linear_attention.verify.inputs import sized

    module, log = _module(path, 0), list[tuple[str, ...]]()
    call, second = _Stream("call", log), _Stream("second", log)
    current, launch = [call], module._launch

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def launched(kernel: Any, *args: Any, **meta: Any) -> Any:
        name = getattr(kernel, "function", kernel)
        log.append((current[-1].name, "runs", getattr(name, "__name__", str(name))))
        return launch(kernel, *args, **meta)

    module.PART, module._launch = 1, launched
    module._beside = lambda x, parts: second if len(parts) > 1 else None
    inputs = sized(problem_of(spec("small")), "streams", 130, "cpu")
    tensors = {n: x[:1].clone().requires_grad_() for n, x in inputs.tensors.items()}
    with (
        mock.patch("torch.cuda.current_stream", return_value=call),
        mock.patch("torch.cuda.stream", on),
    ):
        module.small(**tensors, **inputs.keywords)[0].sum().backward()
    own = ("_sweep_kernel", "_sweep_back_kernel", "_gradients_hopper_kernel")
    return [line for line in log if line[1] == "waits for" or line[2] in own]


def test_streams_wait_for_each_other(tmp_path: Path) -> None:
    forward = [("second", "waits for", "call"), ("second", "runs", "_sweep_kernel")]
    swept = [("second", "waits for", "call"), ("second", "runs", "_sweep_back_kernel")]
    last = ("call", "runs", "_gradients_hopper_kernel")
    gradients = [x for i in (1, 2, 3) for x in (("call", "waits for", f"event {i}"), last)]
    join = [("call", "waits for", "second")]
    found = interpreted(_streams, written("small", tmp_path))
    assert found == [*forward * 3, *join, *swept * 3, *gradients, *join]


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
