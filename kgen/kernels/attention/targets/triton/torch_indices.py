"""Index expressions in eager PyTorch. The launcher uses them to scatter gradients that kernels
store by row.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Var, measured, reads, variables
from kgen.expr.spelling import ATOM
from kgen.targets.code import TORCH, Code, Name, number, op, row, spell

POSITIONS = frozenset({"b", "h", "q_idx", "kv_idx", "distance"})
"""Names that are tensors in the launcher. Sizes and parameters are Python numbers."""


def torch_index(node: Node, tensors: frozenset[str] = POSITIONS) -> str:
    """Return an integer expression over `tensors`, as a tensor."""
    return spell(_Indices(tensors).tensor(node), TORCH)


@dataclass(frozen=True)
class _Indices:
    tensors: frozenset[str]

    def tensor(self, node: Node) -> Code:
        """Return an expression as a tensor, even if it contains only numbers."""
        found = self.value(node)
        # Avoid torch.tensor: it copies from the host and synchronizes with the device.
        return op("torch.full((), {0}, device=q.device)", found) if self._is_number(node) else found

    def _is_number(self, node: Node) -> bool:
        if isinstance(node, Call) and TABLE[node.fn].spelled[TORCH].binds == ATOM:
            return False  # a function of torch, of tensors
        return not variables(node) & self.tensors and not reads(node)

    def value(self, node: Node) -> Code:
        """Return an expression as an operand. Python numbers are allowed."""
        if isinstance(node, Const):
            return number(node)
        if isinstance(node, Var) and (length := measured(node.name)):
            return op("{0}.shape[{1}]", *length)
        if isinstance(node, Var):
            return Name(node.name)
        if isinstance(node, Read) and not node.indices:
            return Name(node.buffer)
        if isinstance(node, Read):
            holes = ", ".join(f"{{{at}}}" for at in range(len(node.indices) + 1))
            return op(f"_read({holes})", node.buffer, *map(self.tensor, node.indices))
        of = TABLE[node.fn].spelled[TORCH]
        if of.binds == ATOM:
            return row(node.fn, *map(self.tensor, node.args))
        return row(node.fn, *(self._operand(a, of.operand) for a in node.args))

    def _operand(self, node: Node, context: int) -> Code:
        """Return an operand. Add brackets if precedence is equal: `(a + b) - c`."""
        found = self.value(node)
        as_tight = isinstance(node, Call) and TABLE[node.fn].spelled[TORCH].binds == context
        return op("({0})", found) if as_tight else found
