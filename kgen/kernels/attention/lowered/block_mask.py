"""The kernel that classifies the blocks of a mask as empty, partial or full."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from kgen.expr.hoist import Program
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Call, Node, Type
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Op,
    Statement,
    assign,
    op,
    over,
    row,
    text,
    uses_of,
)
from kgen.targets.triton.printer import Printer


@dataclass(frozen=True)
class BlockMaskKernel:
    """The kernel that classifies each block as empty, partial or full."""

    plane: list[Statement]
    """Statements that compute the batch and head of a program, as far as lists differ between
    them.
    """
    rows: list[Statement]
    """Statements for a block of queries."""
    columns: list[Statement]
    """Statements for a group of blocks of keys."""
    possible: Code | bool
    """Condition for blocks that may not be empty."""
    certain: Code | bool
    """Condition for blocks that are full if they are `possible`."""
    pair_lines: list[Statement]
    """Statements before `mask`, for the pairs of an undecided block."""
    mask: Code
    """The mask of a pair."""
    passed: list[str]
    """Arguments of the function for the pairs of a block, after the block's position."""

    @property
    def names(self) -> frozenset[str]:
        """Names that the kernel uses."""
        lines = [*self.plane, *self.rows, *self.columns, *self.pair_lines]
        decided = [code for code in (self.possible, self.certain) if isinstance(code, Code)]
        return uses_of([*lines, self.mask, *decided]) | {*self.passed}

    @property
    def mask_line(self) -> Statement:
        """The statement that assigns the mask."""
        return assign("mask", self.mask)

    @property
    def decided(self) -> list[Statement]:
        """Statements that assign `possible` and `certain` for a group of blocks of keys."""
        certain = _both(Name("possible"), self.certain)
        if isinstance(self.certain, Code):
            certain = _after(Name("possible"), self.certain)
        return [
            assign(
                "possible",
                self.possible if isinstance(self.possible, Code) else text(str(self.possible)),
            ),
            assign("certain", certain if isinstance(certain, Code) else row("lt", "blocks", 0)),
        ]

    @property
    def pair_params(self) -> list[str]:
        """Signature of the function for the pairs of a block."""
        named = (f"{name}: tl.constexpr" if name == "GQA" else name for name in self.passed)
        return ["q_start", "kv_start", *named]

    @property
    def pair_args(self) -> list[str]:
        """Arguments of the call of the function for the pairs of a block."""
        return ["q_start", "(first + i) * BLOCK_SIZE", *self.passed]


def block_mask_kernel(mask: BlockMask, lowering: Lowering) -> BlockMaskKernel:
    """Build the kernel that classifies the blocks of a mask."""
    decision, evaluation = _printer(mask.decision, lowering), _printer(mask.evaluation, lowering)
    bounds = _Bounds(mask, decision)
    possible, certain = bounds.decide(mask.pairs)
    # Blocks past the last one repeat the last one, so they must not be counted.
    possible = _both(op("({0})", row("lt", "blocks", "kv_blocks")), possible)
    if mask.decision.results["some"] != TRUE:
        possible = _both(op("({0})", decision.own(mask.decision.results["some"])), possible)
    pair_lines = lowering.lines_of(mask.evaluation.bindings, evaluation)
    result = evaluation.tile(mask.evaluation.results["mask"])
    deciding = uses_of([code for code in (possible, certain) if isinstance(code, Code)])
    rows = lowering.lines_of(mask.decision.before_loop(), decision)
    columns = lowering.lines_of(mask.decision.in_loop(), decision)
    in_pairs = uses_of([*pair_lines, result])
    return BlockMaskKernel(
        plane=plane_lines(mask),
        rows=[*rows, *bounds.lines(in_loop=False, used=deciding)],
        columns=[*columns, *bounds.lines(in_loop=True, used=deciding)],
        possible=possible,
        certain=certain,
        pair_lines=pair_lines,
        mask=result,
        passed=[n for n in ("b", "h", *lowering.problem) if n in in_pairs],
    )


def _printer(program: Program, lowering: Lowering) -> Printer:
    return Printer(
        program,
        "q",
        lowering.layouts,
        lowering.plan.index_ranges,
        lowering.constants,
        lowering.spec.accuracy,
        lowering.helpers,
    )


@dataclass
class _Side:
    """An operand of a comparison, with its least and greatest values in a block."""

    name: str
    in_loop: bool
    named: list[Statement]
    value: Code

    def lines(self, used: Set[str]) -> list[Statement]:
        """Return the statements for the used bounds of this operand."""
        form = "({0}, 1, keep_dims=True)" if self.in_loop else "({0})"
        ends = [end for end in ("min", "max") if f"{self.name}_{end}" in used]
        if not ends:
            return []
        values = tuple(op(f"{{tl}}.{end}{form}", self.value) for end in ends)
        return [*self.named, Assign(tuple(f"{self.name}_{end}" for end in ends), values)]


class _Bounds:
    """Builds the conditions that a mask holds for some pair of a block, and for all pairs.

    The method is interval arithmetic over the operands of comparisons. Bounds of a group of blocks
    of keys are columns [GROUP, 1]. Bounds of the block of queries are scalars.
    """

    def __init__(self, mask: BlockMask, printer: Printer) -> None:
        self.mask = mask
        self.printer = printer
        self.found: dict[str, _Side] = {}

    def lines(self, in_loop: bool, used: Set[str]) -> list[Statement]:
        """Return the statements for used bounds, of keys if `in_loop`, otherwise of queries."""
        return [
            line
            for side in self.found.values()
            if side.in_loop == in_loop
            for line in side.lines(used)
        ]

    def decide(self, node: Node) -> tuple[Code | bool, Code | bool]:
        """Return two conditions: `node` may hold for some pair of a block, and `node` holds for all
        pairs.
        """
        if node in self.mask.sides:
            if node == TRUE:
                return True, True
            most, least = (row("ne", self._end(node, end), 0) for end in ("max", "min"))
            return op("({0})", most), op("({0})", least)
        if not isinstance(node, Call):
            return True, False
        if node.fn in ("and", "or"):
            (p, c), (q, d) = (self.decide(a) for a in node.args)
            return (
                (_both(p, q), _both(c, d)) if node.fn == "and" else (_either(p, q), _either(c, d))
            )
        if node.fn not in _COMPARED:
            return True, False
        (a, z), (b, y) = ((self._bound(x, "min"), self._bound(x, "max")) for x in node.args)
        if a is None or z is None or b is None or y is None:
            return True, False
        possible, certain = _COMPARED[node.fn](a, z, b, y)
        return op("({0})", possible), op("({0})", certain)

    def _bound(self, node: Node, end: str) -> Code | None:
        if not node.type.integral:
            return None
        if node in self.mask.sides:
            return self._end(node, end)
        if not isinstance(node, Call) or node.fn not in ("add", "sub", "neg"):
            return None
        other = {"min": "max", "max": "min"}[end]
        if node.fn == "neg":
            inner = self._bound(node.args[0], other)
            return None if inner is None else op("(-{0})", inner)
        left, right = (
            self._bound(a, end if node.fn == "add" or not i else other)
            for i, a in enumerate(node.args)
        )
        return None if left is None or right is None else op("({0})", row(node.fn, left, right))

    def _end(self, node: Node, end: str) -> Code:
        """Return the least or greatest value of an operand in a block."""
        name = self.mask.sides[node]
        result = self.mask.decision.results[name]
        place = self.mask.decision.place(result)
        value = self.printer.own(result)
        if not place.axes:
            return value if _is_named(value) else op("({0})", value)
        if node.type is Type.BOOL:
            value = op("({0}).to({tl}.int32)", value)
        named = list[Statement]()
        if not _is_named(value):
            named, value = [assign(name, value)], Name(name)
        self.found[name] = _Side(name, place.in_loop, named, value)
        return Name(f"{name}_{end}")


def _is_named(value: Code) -> bool:
    """True for a name or a number, which needs no other name."""
    return isinstance(value, Name) or (
        isinstance(value, Op) and not value.args and value.fn.isalnum()
    )


# Conditions that a comparison can hold, and that it must hold, for operands in [a, z] and [b, y].
_COMPARED: dict[str, Callable[[Code, Code, Code, Code], tuple[Code, Code]]] = {
    "lt": lambda a, z, b, y: (row("lt", a, y), row("lt", z, b)),
    "le": lambda a, z, b, y: (row("le", a, y), row("le", z, b)),
    "gt": lambda a, z, b, y: (row("gt", z, b), row("gt", a, y)),
    "ge": lambda a, z, b, y: (row("ge", z, b), row("ge", a, y)),
    "eq": lambda a, z, b, y: (
        row("and", row("le", a, y), row("le", b, z)),
        row("and", row("eq", a, y), row("eq", b, z)),
    ),
    "ne": lambda a, z, b, y: (
        row("or", row("ne", a, y), row("ne", b, z)),
        row("or", row("lt", z, b), row("lt", y, a)),
    ),
}


def _both(a: Code | bool, b: Code | bool) -> Code | bool:
    if a is False or b is False:
        return False
    return b if a is True else a if b is True else row("and", a, b)


def _after(first: Code, rest: Code) -> Code:
    """Put a condition in front of a chain of conditions."""
    if isinstance(rest, Op) and rest.fn == "and":
        return row("and", _after(first, rest.args[0]), rest.args[1])
    return row("and", first, rest)


def _either(a: Code | bool, b: Code | bool) -> Code | bool:
    if a is True or b is True:
        return True
    return b if a is False else a if b is False else op("({0})", row("or", a, b))


def plane_lines(mask: BlockMask) -> list[Statement]:
    """Return the statement that computes the batch and head of a program, as far as lists differ
    between them.
    """
    number = over("row", "q_blocks")
    if mask.by_batch and mask.by_head:
        head = op("{0} % {1}", number, "HQ", binds=MUL, operand=MUL)
        return [Assign(("b", "h"), (over(number, "HQ"), head))]
    if mask.by_batch or mask.by_head:
        return [assign("b" if mask.by_batch else "h", number)]
    return []
