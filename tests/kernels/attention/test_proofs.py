"""Obligations of attention kernels: proved for stock specs, refuted for planted errors.

A counterexample consists of numbers for which the kernel contradicts the mask in the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import z3

from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Call, Const, Node, Type, transform
from kgen.expr.spans import Span
from kgen.kernels.attention.lowered.block_mask import BlockMaskKernel, block_mask_kernel
from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import LoopKernel, SpanLoops
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.picture import value
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove import block_lists, points
from kgen.kernels.attention.prove import obligations as prove_obligations
from kgen.kernels.attention.prove.block_lists import of_lists
from kgen.kernels.attention.prove.claims import (
    INT32,
    LOADS,
    MASK,
    ONCE,
    SCORE,
    SKIPPED,
    STORES,
    WHOLE,
)
from kgen.kernels.attention.prove.loops import kernel_of
from kgen.kernels.attention.prove.obligations import obligations, of_pairs
from kgen.kernels.attention.prove.points import differences
from kgen.kernels.attention.prove.setting import Extent, Setting
from kgen.kernels.attention.schedules.decode import prove as decode
from kgen.kernels.attention.schedules.decode.lowering import DecodeKernel, decode_kernel
from kgen.kernels.attention.schedules.decode.plan import plan_decode
from kgen.kernels.attention.schedules.decode.prove import of_decoding
from kgen.kernels.attention.schedules.hopper import prove as hopper
from kgen.kernels.attention.schedules.hopper.lowering import HopperLoops, hopper_loops
from kgen.kernels.attention.schedules.hopper.prove import of_hopper
from kgen.kernels.attention.schedules.portable import prove as portable
from kgen.prove.obligations import Decision, Verdict, decide
from kgen.spec.load import Loaded, load, loads
from kgen.targets.code import Name, Statement, renamed, row

ROOT = Path(__file__).resolve().parents[3]
STOCK = [p for p in sorted((ROOT / "specs").glob("*.yaml")) if "kernel: attention" in p.read_text()]
SAMPLE = ("sliding_window", "relative_bias", "decode_alibi", "block_sparse")
BLOCKS = (128, 64)
TIMEOUT = 10.0
ONE_SHAPE = Extent(lambda shapes: shapes[:1])

Fields = dict[str, Any]


def stock(name: str) -> Loaded:
    return load(ROOT / "specs" / f"{name}.yaml")


def verdicts(loaded: Loaded) -> dict[tuple[str, str], Decision]:
    return {(o.kernel, o.what): decide(o, TIMEOUT) for o in obligations(loaded)}


def hold(found: Mapping[tuple[str, str], Decision]) -> None:
    """Check that nothing is refuted, and that unknown obligations have a reason."""
    assert found
    assert {place for place, d in found.items() if d.verdict is Verdict.REFUTED} == set()
    assert all(d.why for d in found.values() if d.verdict is Verdict.UNKNOWN)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_stock_specs(name: str) -> None:
    hold(verdicts(stock(name)))


@pytest.mark.thorough
def test_stock_specs_are_proved_but_for_a_twentieth() -> None:
    found = {path.stem: verdicts(load(path)) for path in STOCK}
    for of in found.values():
        hold(of)
    every = [decision.verdict for of in found.values() for decision in of.values()]
    assert every.count(Verdict.UNKNOWN) <= len(every) / 20


@pytest.mark.parametrize("name", ["sliding_window", "longformer", "varlen_alibi"])
def test_facts_can_be_true(name: str) -> None:
    """Contradicting facts would prove everything. A loop without the mask is skipped, because it
    may have no tiles.

    For example, the first keys of longformer are fewer than a tile.
    """
    for obligation in obligations(stock(name)):
        if obligation.what == WHOLE:
            continue
        solver = z3.Solver()
        solver.add(*obligation.facts)
        assert solver.check() == z3.sat, (obligation.kernel, obligation.what)


RANGES = (
    "where(q_idx >= 512, kv_idx < 16, kv_idx >= 16) and (kv_idx < 20 or q_idx - kv_idx < 32)",
    "((q_idx < 32) != (kv_idx < 16)) and (kv_idx % 2 == 0 or q_idx >= kv_idx)",
)
CACHES = (
    "passes: [forward, decode]",
    "passes: [forward, decode]\nlengths: {kv: {per_batch: true}}",
    "passes: [forward]\npaged_kv: {page_size: 64}",
)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", RANGES)
def test_ranges_of_which_an_earlier_one_is_empty(mask: str, cache: str) -> None:
    """Kernels visit every allowed tile of keys, also in decoding."""
    text = (
        f"kernel: attention\nname: ranges\ndtype: bf16\nhead_dim: 64\nmask_mod: {mask}\n{cache}\n"
    )
    loaded = loads(text, "ranges.yaml")
    plan = plan_decode(loaded)
    assert len(plan.attention.forward.spans) > 1
    found = {o.what: decide(o, TIMEOUT).verdict for o in of_decoding(loaded, plan)}
    assert {found[what] for what in (SKIPPED, ONCE)} == {Verdict.PROVED}
    assert Verdict.REFUTED not in found.values()


ELEMENTS = (
    ("buffers: {t: {shape: [SK], dtype: int32}}\nmask_mod: t[0] > kv_idx", 3),
    ("buffers: {t: {shape: [SQ], dtype: int32}}\nmask_mod: t[SQ - 1] > q_idx", 3),
    ("buffers: {t: {shape: [SK, 4], dtype: fp32}}\nscore_mod: score + t[SK - 1, 2]", 3),
    (
        "passes: [forward, decode]\nbuffers: {docs: {shape: [B, SK], dtype: int32, sorted: true}}\n"
        "mask_mod: docs[b, q_idx] == docs[b, kv_idx]",
        2,
    ),
)
"""Specs that read elements before the loop along an axis that may be empty, and the number of
portable kernels.
"""


@pytest.mark.parametrize(("more", "kernels"), ELEMENTS)
def test_elements_that_an_empty_axis_has_not_are_guarded(more: str, kernels: int) -> None:
    loaded = loads(
        f"kernel: attention\nname: elements\ndtype: fp32\nhead_dim: 64\n{more}\n", "elements.yaml"
    )
    found = [decide(o, TIMEOUT) for o in obligations(loaded, ONE_SHAPE) if o.what == LOADS]
    assert [one.verdict for one in found] == [Verdict.PROVED] * kernels


HIDDEN = (
    "score + where(q_idx >= kv_idx, 0.0, -inf)",
    "where(score > 0.0, where(q_idx >= kv_idx, score, -inf), -inf)",
    "2.0 * where(q_idx >= kv_idx, score, -inf)",
    "max(where(q_idx >= kv_idx, score, -inf), where(q_idx > 5, score, -inf))",
)
"""Scores that hide pairs. Kernels receive them unchanged if they are not equivalent to a mask."""


def scored(score: str) -> Loaded:
    fields = "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\npasses: [forward]\n"
    return loads(f"{fields}score_mod: {score}", "x.yaml")


@pytest.mark.parametrize("score", HIDDEN)
def test_pairs_that_a_score_hides(score: str) -> None:
    loaded = scored(score)
    assert [*differences(loaded)] == []
    decided = [decide(o, TIMEOUT) for o in of_pairs(loaded)]
    assert {d.verdict for d in decided} == {Verdict.PROVED}


@pytest.mark.parametrize("score", HIDDEN)
def test_pairs_that_no_score_hides_any_more(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that drops minus infinity is refuted, by z3 and at points."""
    shown = loads(scored(score).text.replace("-inf", "-5.0"), "x.yaml")
    plan = plan_attention(shown)
    for module in (prove_obligations, points, portable, hopper):
        monkeypatch.setattr(module, "plan_attention", lambda _: plan)
    assert Verdict.REFUTED in {decide(o, TIMEOUT).verdict for o in of_pairs(scored(score))}
    assert [*differences(scored(score))]


# --- planted errors ------------------------


def refuted(
    name: str,
    what: str,
    loop: Callable[[TileLoop], TileLoop] = lambda loop: loop,
    kernel: Callable[[LoopKernel], LoopKernel] = lambda kernel: kernel,
    of: str = "forward",
    plan: Callable[[AttentionPlan], AttentionPlan] = lambda plan: plan,
) -> Decision:
    """Check that the obligation is proved for the kernel, and refuted with the planted error.

    Return the decision.
    """
    loaded = stock(name)
    right = plan_attention(loaded)
    planted = plan(right)
    whole = getattr(planted, of)
    changed = loop(whole)
    planted = replace(planted, **{of: changed})
    for each, each_loop, change in (
        (right, getattr(right, of), lambda k: k),
        (planted, changed, kernel),
    ):
        made = loop_kernel(Lowering(each), each_loop, accumulators(each_loop))
        setting = Setting(loaded, each, each_loop.outer, BLOCKS)
        stated = [
            o
            for o in kernel_of(of, setting, each_loop, change(made)).obligations()
            if o.what == what
        ]
        assert stated
        found = [decide(obligation, TIMEOUT) for obligation in stated]
        if each is right:
            assert {d.verdict for d in found} == {Verdict.PROVED}
    wrong = [d for d in found if d.verdict is Verdict.REFUTED]
    assert wrong, [d.verdict for d in found]
    assert wrong[0].counterexample
    return wrong[0]


def plus(node: Node, number: int) -> Node:
    return Call("add", (node, Const(number, Type.INT)), Type.INT)


def with_span(**change: Callable[[Node], Node]) -> Callable[[TileLoop], TileLoop]:
    """Return a planted error that changes the ends of the first span."""

    def planted(loop: TileLoop) -> TileLoop:
        first, *others = loop.spans
        ends = {end: make(getattr(first, end)) for end, make in change.items()}
        return replace(loop, spans=(replace(first, **ends), *others))

    return planted


def numbers(found: Decision) -> dict[str, int]:
    return {n: int(v) for n, v in found.counterexample.items() if v.lstrip("-").isdigit()}


def allowed(name: str, env: Mapping[str, int]) -> bool:
    """Evaluate the mask of the spec in Python."""
    loaded = stock(name)
    params = {n: p.value for n, p in loaded.spec.params.items() if p.value is not None}
    return bool(value(loaded.trees["mask_mod"], {**params, **env}, {}))


def test_a_range_that_ends_too_early() -> None:
    found = refuted("sliding_window", SKIPPED, with_span(hi=lambda hi: plus(hi, -1)))
    at = numbers(found)
    assert allowed("sliding_window", at)
    assert at["q_idx"] < at["SQ"]
    assert at["kv_idx"] < at["SK"]
    # The key is the first of a tile that the shorter range omits.
    last = min(at["tile"] * BLOCKS[0] + BLOCKS[0], at["SQ"]) - 1
    assert at["kv_idx"] // BLOCKS[1] * BLOCKS[1] >= min(last + 1, at["SK"]) - 1


def test_a_range_that_begins_too_late() -> None:
    at = numbers(refuted("sliding_window", SKIPPED, with_span(lo=lambda lo: plus(lo, 64))))
    assert allowed("sliding_window", at)


def test_tiles_without_a_mask_that_end_too_late() -> None:
    at = numbers(refuted("sliding_window", WHOLE, with_span(full_hi=lambda hi: plus(hi, 1))))
    assert at["kv_idx"] >= at["SK"] or not allowed("sliding_window", at)


def test_tiles_without_a_mask_that_begin_too_early() -> None:
    at = numbers(refuted("sliding_window", WHOLE, with_span(full_lo=lambda lo: plus(lo, -1))))
    assert not allowed("sliding_window", at)


def test_a_range_for_keys_that_begins_too_late() -> None:
    at = numbers(refuted("causal", SKIPPED, with_span(lo=lambda lo: plus(lo, 64)), of="dkdv"))
    assert at["q_idx"] >= at["kv_idx"]


def swapped(loop: TileLoop) -> TileLoop:
    """Move the window to the other side: keys from a query on."""
    (span,) = loop.spans
    start, last, size = loop.outer.start, loop.outer.last, loop.inner.size
    after = Call("min", (plus(last, 1024), size), Type.INT)
    return replace(loop, spans=(Span(start, after, last, span.full_hi, has_full=True),))


def test_sides_of_a_window_that_are_swapped() -> None:
    assert allowed("sliding_window", numbers(refuted("sliding_window", SKIPPED, swapped)))


def with_spans(kernel: LoopKernel, *spans: SpanLoops) -> LoopKernel:
    return replace(kernel, ranges=replace(kernel.ranges, spans=spans))


def test_bounds_for_tiles_of_another_size() -> None:
    """The bounds belong to tiles of another size, so unmasked tiles begin and end at wrong
    positions.
    """

    def other(kernel: LoopKernel) -> LoopKernel:
        return with_spans(kernel, *(with_blocks(span) for span in kernel.ranges.spans))

    def with_blocks(span: SpanLoops) -> SpanLoops:
        names = {"BLOCK_N": Name("48")}
        return replace(
            span, bounds=[line.map(lambda code: renamed(code, names)) for line in span.bounds]
        )

    refuted("sliding_window", ONCE, kernel=other)


def test_spans_that_overlap() -> None:
    """The second range begins before the end of the first."""

    def overlapping(kernel: LoopKernel) -> LoopKernel:
        first, second = kernel.ranges.spans
        names = {"kv_done": Name("0")}
        bounds = [line.map(lambda code: renamed(code, names)) for line in second.bounds]
        return with_spans(kernel, first, replace(second, bounds=bounds))

    refuted("longformer", ONCE, kernel=overlapping)


def compared(fn: str, by: str) -> Callable[[TileLoop], TileLoop]:
    """Return a planted error that replaces one comparison in the mask of a kernel."""

    def change(node: Node) -> Node:
        if isinstance(node, Call) and node.fn == fn and all(a.type.integral for a in node.args):
            return Call(by, node.args, Type.BOOL)
        return node

    def planted(loop: TileLoop) -> TileLoop:
        results = dict(loop.program.results)
        results["mask"] = transform(results["mask"], change)
        return replace(loop, program=replace(loop.program, results=results))

    return planted


@pytest.mark.parametrize(("fn", "by"), [("ge", "gt"), ("lt", "le"), ("ge", "le")])
def test_another_comparison_in_a_mask(fn: str, by: str) -> None:
    at = numbers(refuted("sliding_window", MASK, compared(fn, by)))
    assert at["q_idx"] < at["SQ"]


def test_a_mask_that_ends_nowhere() -> None:
    """Keys past the end are masked only by the guard, if the mask does not hide them."""
    refuted("full", LOADS, lambda loop: replace(loop, inner_live=TRUE))


def test_a_store_without_its_guard() -> None:
    refuted("causal", STORES, kernel=lambda kernel: replace(kernel, store_guard=None))


def test_a_load_of_a_buffer_without_its_guard() -> None:
    """The plan assumes an index in bounds, because its recorded maximum is too small."""

    def lower(plan: AttentionPlan) -> AttentionPlan:
        greatest = {**plan.index_ranges.greatest, "q_idx": {"": 0}, "kv_idx": {"": 0}}
        return replace(plan, index_ranges=replace(plan.index_ranges, greatest=greatest))

    refuted("document_causal", LOADS, plan=lower)


@pytest.mark.parametrize("result", ["qk_scale", "bias"])
def test_another_score(result: str) -> None:
    def doubled(loop: TileLoop) -> TileLoop:
        results = dict(loop.program.results)
        results[result] = Call("mul", (Const(2, Type.INT), results[result]), Type.FLOAT)
        return replace(loop, program=replace(loop.program, results=results))

    refuted("causal_alibi", SCORE, doubled)


def test_a_row_term_that_is_not_given_back() -> None:
    def lost(loop: TileLoop) -> TileLoop:
        results = {n: node for n, node in loop.program.results.items() if n != "row_rest"}
        return replace(loop, program=replace(loop.program, results=results))

    refuted("causal_alibi", SCORE, lost)


def test_an_integer_that_leaves_its_width() -> None:
    at = numbers(refuted("causal", INT32, with_span(lo=lambda _: plus(_wide(), 0))))
    assert at["SQ"] * 2**10 > 2**31


def _wide() -> Node:
    from kgen.kernels.attention.plan.model import SQ

    return Call("mul", (SQ, Const(2**10, Type.INT)), Type.INT)


def test_a_promise_that_the_launcher_does_not_check(tmp_path: Path) -> None:
    """If documents are not sorted, the search gives wrong ranges."""
    text = (ROOT / "specs/document_causal.yaml").read_text()
    assert "sorted: true" in text
    path = tmp_path / "document_causal.yaml"
    path.write_text(text)
    loaded = load(path)
    plan = plan_attention(loaded)
    buffers = {n: b.model_copy(update={"sorted": False}) for n, b in plan.spec.buffers.items()}
    unsorted = replace(plan, spec=plan.spec.model_copy(update={"buffers": buffers}))
    kernel = loop_kernel(Lowering(plan), plan.forward, [])
    setting = Setting(loaded, unsorted, plan.forward.outer, BLOCKS)
    stated = kernel_of("forward", setting, plan.forward, kernel).obligations()
    found = {o.what: decide(o, TIMEOUT).verdict for o in stated}
    assert found[SKIPPED] is Verdict.REFUTED
    assert found[WHOLE] is Verdict.REFUTED


# --- planted errors in the kernels for Hopper ------------------------


def minus(code: Any, number: str) -> Any:
    return row("sub", code, number)


def changed_line(
    lines: Iterable[Statement], name: str, change: Callable[[Any], Any]
) -> list[Statement]:
    """Change the value of one name in some lines. Return all lines."""
    found = [line.map(change) if line.defines == {name} else line for line in lines]
    assert any(line.defines == {name} for line in found)
    return found


LONG = pytest.mark.thorough
HOPPER = [
    # The planted error, the spec, the kernel, and the refuted obligation.
    ("own_bounds", "n_past", "-1", "causal", "dq", SKIPPED),
    ("own_bounds", "n_last_masked", "1", "causal", "dq", WHOLE),
    ("own_bounds", "n_first_masked", "1", "sliding_window", "dq", WHOLE),
    ("own_bounds", "n_ahead", "-1", "sliding_window", "forward", SKIPPED),
    ("bounds", "kv_hi", "1", "causal", "forward", SKIPPED),
    ("bounds", "q_lo", "-64", "causal", "dkdv", SKIPPED),
    ("bounds", "q_full_hi", "-64", "sliding_window", "dkdv", WHOLE),
    pytest.param(
        "own_bounds", "own_full_hi", "-1", "document_causal", "forward", WHOLE, marks=LONG
    ),
    pytest.param("bounds", "kv_lo", "-1", "document_causal", "forward", SKIPPED, marks=LONG),
]


def test_a_bias_by_distance_beside_rope_dims() -> None:
    """The product of the rope columns is added to a product that starts from the bias."""
    fields = (
        "kernel: attention\nname: x\ndtype: bf16\nhead_dim: {qk: 192, v: 128}\npasses: [forward]\n"
    )
    loaded = loads(f"{fields}score_mod: score + float(h) * (kv_idx - 1)\n", "x.yaml")
    (score,) = (o for o in of_hopper(loaded, plan_attention(loaded)) if o.what == SCORE)
    assert decide(score, TIMEOUT).verdict is not Verdict.REFUTED


EMPTY_HALVES = (
    "(q_idx <= n[b] < kv_idx) or (q_idx // 33 == kv_idx // 33)",
    "where(q_idx < n[b], kv_idx >= n[b], kv_idx >= q_idx)",
)


@pytest.mark.parametrize("mask", EMPTY_HALVES)
def test_a_half_that_begins_before_the_whole(mask: str) -> None:
    """If the range of the whole tile begins past the last key, the empty range of a half begins
    earlier.

    The half must not wait for tiles that the producer does not load.
    """
    fields = "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 128\npasses: [forward]\n"
    buffers = "buffers: {n: {shape: [B], dtype: int32}}\n"
    loaded = loads(f"{fields}{buffers}varlen: true\nmask_mod: {mask}\n", "x.yaml")
    (once,) = (o for o in of_hopper(loaded, plan_attention(loaded)) if o.what == ONCE)
    assert decide(once, TIMEOUT).verdict is Verdict.PROVED


@pytest.mark.parametrize(("where", "line", "less", "name", "kernel", "what"), HOPPER)
def test_a_planted_error_for_hopper(
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    line: str,
    less: str,
    name: str,
    kernel: str,
    what: str,
) -> None:
    loaded = stock(name)
    plan = plan_attention(loaded)

    def of_kernel() -> list[Verdict]:
        stated = [
            o for o in of_hopper(loaded, plan) if o.kernel.startswith(kernel) and o.what == what
        ]
        assert stated
        return [decide(o, TIMEOUT).verdict for o in stated]

    assert set(of_kernel()) == {Verdict.PROVED}

    def planted(*arguments: Any) -> HopperLoops:
        loops = hopper_loops(*arguments)
        of = getattr(loops, kernel)
        owner = of.range if where == "bounds" else of
        lines = {where: changed_line(getattr(owner, where), line, lambda code: minus(code, less))}
        changed = (
            replace(of, range=replace(of.range, **lines))
            if where == "bounds"
            else replace(of, **lines)
        )
        return replace(loops, **{kernel: changed})

    monkeypatch.setattr(hopper, "hopper_loops", planted)
    assert Verdict.REFUTED in of_kernel()


def test_facts_of_hopper_can_be_true() -> None:
    for name in ("sliding_window", "causal_alibi"):
        loaded = stock(name)
        for obligation in of_hopper(loaded, plan_attention(loaded)):
            solver = z3.Solver()
            solver.add(*obligation.facts)
            assert solver.check() == z3.sat, (obligation.kernel, obligation.what)


# --- planted errors in decoding and in lists ------------------------


def test_a_share_that_begins_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = stock("decode_sliding_window")

    def late(*arguments: Any) -> DecodeKernel:
        kernel = decode_kernel(*arguments)
        lines = changed_line(kernel.live_lines, "first", lambda code: row("add", code, "1"))
        return replace(kernel, live_lines=lines)

    plan = plan_decode(loaded)
    right = {o.what: decide(o, TIMEOUT).verdict for o in of_decoding(loaded, plan)}
    assert set(right.values()) == {Verdict.PROVED}
    monkeypatch.setattr(decode, "decode_kernel", late)
    wrong = {o.what: decide(o, TIMEOUT).verdict for o in of_decoding(loaded, plan)}
    assert wrong[SKIPPED] is Verdict.REFUTED


@pytest.mark.parametrize(("field", "what"), [("possible", SKIPPED), ("certain", WHOLE)])
def test_a_block_that_is_in_the_wrong_list(
    monkeypatch: pytest.MonkeyPatch, field: str, what: str
) -> None:
    """The minimum and the maximum of a side are exchanged."""
    loaded = stock("block_sparse")
    plan = plan_attention(loaded)
    ends = {"side_2_min": Name("side_2_max"), "side_2_max": Name("side_2_min")}

    def swapped(*arguments: Any) -> BlockMaskKernel:
        kernel = block_mask_kernel(*arguments)
        return replace(kernel, **{field: renamed(getattr(kernel, field), ends)})

    def verdict() -> Verdict:
        (found,) = [o for o in of_lists(loaded, plan, Lowering(plan)) if o.what == what]
        return decide(found, TIMEOUT).verdict

    assert verdict() is Verdict.PROVED
    monkeypatch.setattr(block_lists, "block_mask_kernel", swapped)
    assert verdict() is Verdict.REFUTED
