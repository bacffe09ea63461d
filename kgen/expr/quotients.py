"""Canonical form of quotients.

`x >> 6` is `x // 64`, `x & 63` is `x % 64`, `x // 8 // 8` is `x // 64`, and `x - x % n`, the start
of the block of x, is `n * (x // n)`. This holds for integers that do not wrap
(`kgen.expr.wrapping`). A hash keeps its shifts, because a quotient of a wrapped integer is out of
contract.
"""

from __future__ import annotations

from kgen.expr.affine import Affine, affine
from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Node, Type
from kgen.expr.wrapping import may_wrap


def quotient(node: Call) -> Node:
    """Return an integer as a quotient or remainder if it is one.

    Its operands are in canonical form.
    """
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
    """True for a power of two above one that fits in 32 bits."""
    return 1 < n <= 2**30 and n & (n - 1) == 0


def starts(total: Affine, *, expands: bool = True) -> Affine:
    """Return a sum in which `x - x % n` is `n * (x // n)`."""
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
    """Return a sum that is zero where the given one is: starts of equal blocks are replaced by the
    numbers of the blocks.
    """
    found = {_block(start): factor for start, factor in total.terms.items()}
    known: dict[Node, int] = {block: factor for block, factor in found.items() if block is not None}
    sizes = {block.args[1] for block in found if block is not None}
    of_one_size = len(known) == len(total.terms) and len(sizes) == 1
    return Affine(known) if of_one_size and not total.number else total


def _block(start: Node) -> Call | None:
    """Return `x // n` for `n * (x // n)`, else None."""
    if isinstance(start, Call) and start.fn == "mul":
        for block, n in (start.args, start.args[::-1]):
            if isinstance(block, Call) and block.fn == "floordiv" and block.args[1] == n:
                return block
    return None
