"""Quotients in one form: `x >> 6` is `x // 64`, `x & 63` is `x % 64`, `x // 8 // 8` is `x // 64`, and `x - x % n`,
where the block of x starts, is `n * (x // n)`.

Bits are those of an integer that does not wrap, by contract (`kgen.expr.wrapping`); a hash keeps its shifts, for a
quotient of what wraps is out of contract.
"""

from __future__ import annotations

from kgen.expr.affine import Affine, affine
from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Node, Type
from kgen.expr.wrapping import may_wrap


def quotient(node: Call) -> Node:
    """An integer whose operands are in one form, as a quotient or a remainder where it is one."""
    match node:
        case Call("rshift", (x, Const(int(bits)))) if 0 < bits < 31 and not may_wrap(x):
            return quotient(call("floordiv", x, Const(2**bits, Type.INT)))
        case Call("bitand", (x, Const(int(ones))) | (Const(int(ones)), x)) if not may_wrap(x):
            if _is_power(ones + 1):
                return call("mod", x, Const(ones + 1, Type.INT))
            if _is_power(-ones):
                size = Const(-ones, Type.INT)
                return call("mul", size, quotient(call("floordiv", x, size)))
        case Call("floordiv", (Call("floordiv", (x, Const(int(n)))), Const(int(m)))):
            if n > 0 and m > 0 and n * m < 2**31:
                return call("floordiv", x, Const(n * m, Type.INT))
        case Call("floordiv", (Call("mul", factors), n)) if n in factors:
            (x,) = factors[:1] if factors[1] == n else factors[1:]
            return x if x.type is node.type else node
    return node


def _is_power(n: int) -> bool:
    """Whether a number above one is a power of two that 32 bits hold."""
    return 1 < n <= 2**30 and n & (n - 1) == 0


def starts(total: Affine, *, expands: bool = True) -> Affine:
    """A sum in which `x - x % n` is `n * (x // n)`."""
    for place, factor in total.terms.items():
        if not (isinstance(place, Call) and place.fn == "mod"):
            continue
        x, n = place.args
        whole = affine(x, expands=expands)
        if whole.terms and all(total.terms.get(t) == -factor * f for t, f in whole.terms.items()):
            block = call("floordiv", x, n)
            start = affine(call("mul", n, block), expands=isinstance(n, Const))
            inside = whole + start.times(-1) + Affine({place: -1})
            return starts(total + inside.times(factor), expands=expands)
    return total


def blocks(total: Affine) -> Affine:
    """A sum that is zero where another one is: of starts of blocks of one size, that of the blocks."""
    found = {_block(start): factor for start, factor in total.terms.items()}
    known: dict[Node, int] = {block: factor for block, factor in found.items() if block is not None}
    sizes = {block.args[1] for block in found if block is not None}
    of_one_size = len(known) == len(total.terms) and len(sizes) == 1
    return Affine(known) if of_one_size and not total.number else total


def _block(start: Node) -> Call | None:
    """`x // n` of `n * (x // n)`."""
    if isinstance(start, Call) and start.fn == "mul":
        for block, n in (start.args, start.args[::-1]):
            if isinstance(block, Call) and block.fn == "floordiv" and block.args[1] == n:
                return block
    return None
