"""Block masks in Triton: what `_block_mask.j2` and `_block_mask_launcher.j2` name."""

from __future__ import annotations

import re

from kgen.expr.hoist import Binding, Program
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Call, Node, Type, reads, variables
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.launcher import LauncherFields
from kgen.kernels.attention.targets.triton.ranges import lists_of
from kgen.targets.arguments import number_lines
from kgen.targets.triton.printer import Printer
from kgen.targets.triton.text import wrapped

SIZES = ("B", "HQ", "HKV", "SQ", "SK")
_TYPES = {"int": "int", "float": "float"}


def block_mask_fields(mask: BlockMask, kernels: KernelFields, launcher: LauncherFields) -> dict[str, object]:
    """The names of the kernels that list blocks, and of the functions around them."""
    kernel = _kernel(mask, kernels)
    buffers = list(dict.fromkeys(r.buffer for r in reads(mask.condition)))
    scalars = [n for n in kernels.runtime if n in variables(mask.condition)]
    words = set(re.findall(r"\w+", str(kernel))) | {"SQ", "SK"}
    sizes = [n for n in (*kernels.sizes, *scalars) if n in words]
    grouped = "GQA" in words
    strides = [p for b in buffers for p in kernels.problem if p == f"{b}_ptr" or p.startswith(f"stride_{b}_")]
    params = [f"{p}{kernels.problem[p]}" for p in (*strides, *sizes, *["GQA"] * grouped)]
    args = [a for b in buffers for a in (b, f"*{b}.stride()")] + sizes + ["GQA=HQ // HKV"] * grouped
    lists = [n for inner in ("kv", "q")[: 1 + kernels.plan.backward] for n in lists_of(inner)]
    batches, heads = "B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"
    sharing = [w for w, own in (("batches", mask.by_batch), ("heads", mask.by_head)) if not own]
    device = f"{buffers[0]}.device" if buffers else "device"
    directions = ["(q_blocks, kv_blocks)", "(kv_blocks, q_blocks)"][: 1 + kernels.plan.backward]
    op_params = [f"{b}: Tensor" for b in buffers] + [f"{n}: int" for n in SIZES]
    op_params += [f"{n}: {_TYPES[kernels.runtime[n].type]}" for n in scalars]
    return kernel | {
        "size": BLOCK_SIZE,
        "no_specialize": f"do_not_specialize={sizes!r}".replace("'", '"'),
        "kernel_params": wrapped(params, 4),
        "kernel_args": ", ".join(args),
        "q_last": "q_last" in words,
        "planes": " * ".join(n for n in (batches, heads) if n != "1") or "1",
        "list_sizes": f"{batches}, {heads}",
        "lists": ", ".join(lists),
        "list_params": ", ".join(f"{n}_ptr" for n in lists),
        "directions": ", ".join(directions) + "," * (len(directions) == 1),
        "op_params": ", ".join([*op_params, "device: torch.device"]),
        "op_type": f"tuple[{', '.join(['Tensor'] * len(lists))}]",
        "op_names": ", ".join([*buffers, *SIZES, *scalars]),
        "signature": ", ".join(["", "*", *buffers, *scalars, *['device="cuda"'] * (not buffers)]),
        "device": device,
        "device_words": [] if buffers else ["device: of the tensors that it will be used with."],
        "argument_words": launcher.argument_words(buffers, scalars),
        "numbers": number_lines({n: kernels.runtime[n] for n in scalars}),
        "checks": launcher.length_checks()
        + launcher.scalar_checks(scalars)
        + launcher.buffer_checks(buffers, device),
        "sharing": f", which {' and '.join(sharing)} share" if sharing else "",
    }


def _kernel(mask: BlockMask, kernels: KernelFields) -> dict[str, object]:
    """The lines of the kernel that decides what is left of each block."""

    def printer(program: Program) -> Printer:
        return Printer(
            program,
            "q",
            kernels.layouts,
            kernels.plan.index_ranges,
            kernels.constants,
            kernels.spec.fast_math,
            kernels.helpers,
        )

    def lines(bindings: list[Binding], of: Printer) -> list[str]:
        return [f"{b.name} = {of.over(b.node, b.place.axes)}" for b in bindings]

    decision, evaluation = printer(mask.decision), printer(mask.evaluation)
    bounds = _Bounds(mask, decision)
    possible, certain = bounds.decide(mask.pairs)
    # Blocks past the last one are the last one again.
    possible = _both("(blocks < kv_blocks)", possible)
    if mask.decision.results["some"] != TRUE:
        possible = _both(f"({decision.own(mask.decision.results['some'])})", possible)
    pair_lines = lines(list(mask.evaluation.bindings), evaluation)
    result = evaluation.tile(mask.evaluation.results["mask"])
    words = set(re.findall(r"\w+", "\n".join([*pair_lines, result])))
    passed = [n for n in ("b", "h", *kernels.problem) if n in words]
    return {
        "plane": _plane(mask),
        "rows": lines(mask.decision.before_loop(), decision) + bounds.lines(in_loop=False),
        "columns": lines(mask.decision.in_loop(), decision) + bounds.lines(in_loop=True),
        "possible": possible,
        "certain": "" if certain == "False" else certain,
        "pair_params": ", ".join(
            ["q_start", "kv_start", *(n + ": tl.constexpr" * (n == "GQA") for n in passed)]
        ),
        "pair_args": ", ".join(["q_start", "(first + i) * BLOCK_SIZE", *passed]),
        "pair_lines": pair_lines,
        "mask": result,
    }


class _Bounds:
    """Spells where a condition holds for some pair of a block, and where for all of them.

    Bounds of a group of blocks of keys are columns [GROUP, 1]; those of the one block of queries are scalars.
    """

    def __init__(self, mask: BlockMask, printer: Printer) -> None:
        self.mask = mask
        self.printer = printer
        self.found: dict[str, tuple[bool, list[str]]] = {}

    def lines(self, in_loop: bool) -> list[str]:
        """The bounds that were asked for, of rows or of columns."""
        return [line for of, lines in self.found.values() if of == in_loop for line in lines]

    def decide(self, node: Node) -> tuple[str, str]:
        """That the condition is possible in a block, and that it is certain."""
        if node in self.mask.sides:
            if node == TRUE:
                return "True", "True"
            return f"({self._end(node, 'max')} != 0)", f"({self._end(node, 'min')} != 0)"
        if not isinstance(node, Call):
            return "True", "False"
        if node.fn in ("and", "or"):
            (p, c), (q, d) = (self.decide(a) for a in node.args)
            return (_both(p, q), _both(c, d)) if node.fn == "and" else (_either(p, q), _either(c, d))
        if node.fn not in _COMPARED:
            return "True", "False"
        ends = [(self._bound(a, "min"), self._bound(a, "max")) for a in node.args]
        if any(end is None for pair in ends for end in pair):
            return "True", "False"
        (a, z), (b, y) = ends
        possible, certain = (form.format(a=a, z=z, b=b, y=y) for form in _COMPARED[node.fn])
        return f"({possible})", f"({certain})"

    def _bound(self, node: Node, end: str) -> str | None:
        if not node.type.integral:
            return None
        if node in self.mask.sides:
            return self._end(node, end)
        if not isinstance(node, Call) or node.fn not in ("add", "sub", "neg"):
            return None
        other = {"min": "max", "max": "min"}[end]
        if node.fn == "neg":
            inner = self._bound(node.args[0], other)
            return None if inner is None else f"(-{inner})"
        left, right = (
            self._bound(a, end if node.fn == "add" or not i else other) for i, a in enumerate(node.args)
        )
        sign = "+" if node.fn == "add" else "-"
        return None if left is None or right is None else f"({left} {sign} {right})"

    def _end(self, node: Node, end: str) -> str:
        """The least or greatest value of a side in a block."""
        name = self.mask.sides[node]
        result = self.mask.decision.results[name]
        place = self.mask.decision.place(result)
        text = self.printer.own(result)
        if not place.axes:
            return text if re.fullmatch(r"\w+", text) else f"({text})"
        value = f"({text}).to(tl.int32)" if node.type is Type.BOOL else text
        named = [] if re.fullmatch(r"\w+", value) else [f"{name} = {value}"]
        over = f"{name if named else value}{', 1, keep_dims=True' if place.in_loop else ''}"
        both = f"{name}_min, {name}_max = tl.min({over}), tl.max({over})"
        self.found[name] = place.in_loop, [*named, both]
        return f"{name}_{end}"


# Of a comparison, for operands within [a, z] and [b, y]: whether it can hold, and whether it must.
_COMPARED = {
    "lt": ("{a} < {y}", "{z} < {b}"),
    "le": ("{a} <= {y}", "{z} <= {b}"),
    "gt": ("{z} > {b}", "{a} > {y}"),
    "ge": ("{z} >= {b}", "{a} >= {y}"),
    "eq": ("({a} <= {y}) & ({b} <= {z})", "({a} == {y}) & ({b} == {z})"),
    "ne": ("({a} != {y}) | ({b} != {z})", "({z} < {b}) | ({y} < {a})"),
}


def _both(a: str, b: str) -> str:
    if "False" in (a, b):
        return "False"
    return b if a == "True" else a if b == "True" else f"{a} & {b}"


def _either(a: str, b: str) -> str:
    if "True" in (a, b):
        return "True"
    return b if a == "False" else a if b == "False" else f"({a} | {b})"


def _plane(mask: BlockMask) -> list[str]:
    """Whose rows a program makes."""
    if mask.by_batch and mask.by_head:
        return ["b, h = row // q_blocks // HQ, row // q_blocks % HQ"]
    return [f"{'b' if mask.by_batch else 'h'} = row // q_blocks"] * (mask.by_batch or mask.by_head)
