"""Calls of a spec's kernels for the tokens of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Kernels:
    """The kernels of a spec, and the arguments of their operators.

    module: the emitted file. Its states are float32.
    name: the function of the package.
    by_token: for q, k, v and each buffer, True if it has tokens.
    saved: for each tensor that forward saves, True if it has tokens, False if it has chunks.
    flags: the arguments of the operator of forward that make it save them.
    learned: the buffers with gradients, by their position after q, k and v.
    packed: True for packed sequences.
    delta: True for the delta rule.
    decay: the position of the decays of chunks in the results of `_chunks`; None without a decay.
    by_column: True if each row of a state has its own decay.
    chunk: the tokens of a chunk.
    state_dtype: the dtype of states in the call.
    """

    module: ModuleType
    name: str
    by_token: tuple[bool, ...]
    saved: tuple[bool, ...]
    flags: tuple[bool, ...]
    learned: tuple[int, ...]
    packed: bool
    delta: bool
    decay: int | None
    by_column: bool
    chunk: int
    state_dtype: torch.dtype

    def rows_of(self, columns: int) -> int:
        """Return the number of decays of a state with one row for each of the keys' columns."""
        return columns if self.by_column else 1


@dataclass(frozen=True)
class Tokens:
    """The tokens of a rank, or of one of its sequences.

    tensors: q, k, v and the buffers.
    starts: the offsets of packed sequences; empty for other batches.
    """

    kernels: Kernels
    tensors: tuple[Tensor, ...]
    starts: tuple[int, ...]
    scale: float

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state of one sequence."""
        q, _, v = self.tensors[:3]
        return v.shape[2], q.shape[3], v.shape[3]

    @property
    def offsets(self) -> list[Tensor]:
        """The argument `cu_seqlens`, if the kernels have it."""
        if not self.kernels.packed:
            return []
        return [torch.tensor(self.starts, dtype=torch.int32, device=self.tensors[0].device)]

    def run(self, begin: int, end: int) -> Tokens:
        """Return a run of tokens of one packed sequence."""
        pairs = zip(self.tensors, self.kernels.by_token, strict=True)
        cut = tuple(x[:, begin:end] if tokens else x for x, tokens in pairs)
        return Tokens(self.kernels, cut, (0, end - begin), self.scale)

    def forward(self, state: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the output, the final states, and the tensors for backward."""
        operands = *self.tensors, *self.offsets, state, self.scale, True, False, *self.kernels.flags
        o, final, _, *saved = self.kernels.module._forward_op(*operands)
        return o, final, saved

    def backward(
        self, do: Tensor, dfinal: Tensor | None, state: Tensor | None, saved: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of q, k, v and learned buffers, and of the initial states."""
        operands = *self.tensors, *self.offsets, state, *saved, self.scale
        *grads, dstate = self.kernels.module._backward_op(do, dfinal, *operands)
        return grads, dstate

    def final(self, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the final states, and the decay of the states over all tokens.

        It has the shape [N, HV, K or 1, 1], and is None without a decay. No output is computed.
        """
        module, (q, k, v, *buffers) = self.kernels.module, self.tensors
        if q.dtype == torch.bfloat16 and module._arch(q.device) == 0:
            # Triton's interpreter cannot multiply bfloat16.
            q, k, v = q.float(), k.float(), v.float()
        with torch.cuda.device_of(q):
            operands = q, k, v, *buffers, *self.offsets, state, self.scale, True, False
            found = module._chunks(*operands)
        if self.kernels.decay is None:
            return found[0], None
        # The last row of a chunk has the sum of its decays, as a power of 2.
        chunks = -(-q.shape[1] // self.kernels.chunk)
        sums = found[self.kernels.decay][: q.shape[0] * chunks, :, -1]
        decay = sums.unflatten(0, (q.shape[0], chunks)).sum(1).exp2()
        return found[0], decay.reshape(*decay.shape[:2], -1, 1)

    def transition(self) -> Tensor:
        """Return the matrices [N, HV, K, K] by which the tokens multiply a state.

        Columns of a state do not mix. So they are the final states of the columns of the unit
        matrix, without values.
        """
        heads, K, V = self.state_shape
        q, k, v, *buffers = self.tensors
        tensors = q, k, torch.zeros_like(v), *buffers
        empty = Tokens(self.kernels, tensors, self.starts, self.scale)
        found, unit = [], torch.eye(K, device=q.device)
        for begin in range(0, K, V):
            columns = unit[:, begin : begin + V]
            columns = pad(columns, (0, V - columns.shape[1]))
            state = columns.expand(q.shape[0], heads, K, V).contiguous()
            found.append(empty.final(state)[0])
        return torch.cat(found, -1)[..., :K]
