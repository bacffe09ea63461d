"""What a kernel is measured against: the same attention as a PyTorch user would write it.

Modifications reach the peers as Python source, printed from the trees that the user wrote through the `torch`
column of the function table.
"""

from __future__ import annotations

import keyword
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.bench.attention.packed import Packing, flattened, packing, ragged, token_buffers
from kgen.expr.functions import ATOM, TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, reads, substitute, variables
from kgen.verify.attention.cache import paged
from kgen.verify.attention.problem import Buffer, Problem
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES

Mod = Callable[..., Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# The dimensions that an index covers exactly, so that its reads need no guard.
_COVERED = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}


@dataclass(frozen=True)
class Workload:
    """One benchmark: q [B, HQ, SQ, D], k [B, HKV, SK, D], v [B, HKV, SK, DV], dout [B, HQ, SQ, DV]."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    buffers: Mapping[str, Tensor]
    params: Mapping[str, int | float]
    packing: Packing | None = None
    """Of packed sequences, which are one sequence of documents here: B is 1."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that expressions may name."""
        return {
            "B": self.q.shape[0],
            "HQ": self.q.shape[1],
            "HKV": self.k.shape[1],
            "SQ": self.q.shape[2],
            "SK": self.k.shape[2],
        }

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1]) // int(self.k.shape[1])

    @property
    def first(self) -> int:
        """The position of the first query."""
        return int(self.k.shape[2] - self.q.shape[2]) if self.problem.aligned_to_end else 0

    @property
    def runtime(self) -> dict[str, int | float]:
        """The params that the emitted function takes."""
        return {p.name: self.params[p.name] for p in self.problem.runtime_params}


def draw_workload(
    problem: Problem, batch: int, heads: int, length: int, device: str, queries: int | None = None
) -> Workload:
    """A workload with ordinary contents: N(0, 1) operands, documents of 1024 tokens, ALiBi-like slopes.

    There are as many queries as keys, or `queries`. Packed sequences have `batch * length` tokens in all.
    """
    torch.manual_seed(0)
    packed, lengths = None, ragged(batch * length) if problem.varlen else []
    if problem.varlen:
        batch, length = 1, batch * length
        packed, problem = packing(problem, lengths, device), flattened(problem)
    group = 1 if problem.gqa == "any" else int(problem.gqa)
    heads_kv = max(1, heads // group)
    heads = heads_kv * group
    step = math.lcm(problem.q_multiple, problem.kv_multiple)
    length = -(-length // step) * step
    dtype = DTYPES[problem.dtype]

    def normal(b: int, h: int, s: int, d: int) -> Tensor:
        if packed is not None:
            return torch.randn((b, s, h, d), device=device).to(dtype).transpose(1, 2)
        return torch.randn((b, h, s, d), device=device).to(dtype)

    queries = length if queries is None else queries
    sizes = {"B": len(lengths) or batch, "HQ": heads, "HKV": heads_kv, "SQ": queries, "SK": length}
    tokens = token_buffers(lengths, device) if packed else {}
    runtime = {p.name: _ordinary(p.name, p.type, length) for p in problem.runtime_params}
    return Workload(
        problem=problem,
        q=normal(batch, heads, queries, problem.head_qk),
        k=normal(batch, heads_kv, length, problem.head_qk),
        v=normal(batch, heads_kv, length, problem.head_v),
        dout=normal(batch, heads, queries, problem.head_v),
        buffers={
            b.name: _contents(b, sizes, problem.block_mask).to(device)
            for b in problem.buffers
            if b.name not in tokens
        }
        | tokens,
        params={p.name: p.value for p in problem.params if p.value is not None} | runtime,
        packing=packed,
    )


def _ordinary(name: str, type_: str, length: int) -> int | float:
    if type_ == "int":
        return min(1024, length // 4)
    return 30.0 if "cap" in name else 1.0


def _contents(buffer: Buffer, sizes: Mapping[str, int], in_blocks: bool = False) -> Tensor:
    """Ordinary contents; `in_blocks`, what a mask reads leaves whole blocks out."""
    shape = tuple(n if isinstance(n, int) else sizes[n] for n in buffer.shape)
    dtype, length = DTYPES[buffer.dtype], sizes["SK"]
    per_token = any(n in ("SQ", "SK") for n in buffer.shape)
    if dtype.is_floating_point:
        if per_token or not shape:
            values = torch.randn(shape)
        else:
            values = torch.exp2(-8 * torch.arange(1, shape[-1] + 1) / shape[-1]).expand(shape)
        return (values.sort(-1).values if buffer.sorted else values).to(dtype).contiguous()
    if dtype == torch.bool:
        return torch.rand(shape) > (0.75 if in_blocks else 0.1)
    if per_token and buffer.sorted:
        document = min(1024, max(1, length // 4))
        return (torch.arange(shape[-1]) // document).expand(shape).to(dtype).contiguous()
    if per_token and in_blocks:
        # Runs of 256 with a number of their own, 768 zeros after each.
        place = torch.arange(shape[-1])
        return torch.where(place % 1024 < 256, place // 1024 + 1, 0).expand(shape).to(dtype).contiguous()
    if per_token:
        return torch.randint(0, 4, shape).to(dtype)
    if buffer.sorted:
        return torch.linspace(0, length, shape[-1]).expand(shape).to(dtype).contiguous()
    return torch.full(shape, 3 * length // 4 if "len" in buffer.name else length // 4).to(dtype)


# --- expressions as Python source ---


def python_source(node: Node, workload: Workload) -> str:
    """A tree as a Python expression over tensors `score b h q_idx kv_idx`, `torch` and the buffers' names."""
    return _printed(node, workload)[0]


def _printed(node: Node, workload: Workload) -> tuple[str, int]:
    """The text and how tightly it binds."""
    if isinstance(node, Read):
        return _read(node, workload), ATOM
    known = workload.sizes | dict(workload.params)
    if isinstance(node, Var) and node.name not in known:
        return node.name, ATOM
    if isinstance(node, Const | Var) or not _depends(node):
        return _literal(evaluate(node, known | dict(workload.buffers), torch).item()), ATOM
    assert isinstance(node, Call)
    if node.fn in ("min", "max"):
        return _extremum(node, workload), ATOM
    spelling = TABLE[node.fn].spelled["torch"]
    operands = []
    for position, arg in enumerate(node.args):
        text, binds = _printed(arg, workload)
        # The right operand is bracketed at equal strength too: a - (b - c).
        tight = binds > spelling.operand or (binds == spelling.operand and position == 0)
        operands.append(text if tight else f"({text})")
    return spelling.form.format(*operands), spelling.binds


def _depends(node: Node) -> bool:
    """Whether the value is a tensor: it moves with the position, or reads a buffer."""
    return bool(variables(node) & {"score", "b", "h", "q_idx", "kv_idx"} or reads(node))


def _literal(value: int | float | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "torch.inf" if value > 0 else "(-torch.inf)"
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def _extremum(node: Call, workload: Workload) -> str:
    """Nested minima or maxima; a number becomes a bound of `clamp`, for `torch.minimum` wants tensors."""
    moving = sorted(node.args, key=lambda arg: not _depends(arg))
    text = _printed(moving[0], workload)[0]
    for arg in moving[1:]:
        other = _printed(arg, workload)[0]
        if _depends(arg):
            text = f"torch.{node.fn}imum({text}, {other})"
        else:
            text = f"torch.clamp({text}, {'max' if node.fn == 'min' else 'min'}={other})"
    return text


def _read(node: Read, workload: Workload) -> str:
    declared = next(b for b in workload.problem.buffers if b.name == node.buffer)
    indices, guards = [], []
    for index, dimension, size in zip(
        node.indices, declared.shape, workload.buffers[node.buffer].shape, strict=True
    ):
        text, binds = _printed(index, workload)
        if not (isinstance(index, Var) and _COVERED.get(index.name) == dimension):
            if not _depends(index):
                text = f"torch.full_like(b, {text})"
            elif binds < ATOM:
                text = f"({text})"
            guards += [f"({text} >= 0)", f"({text} < {size})"]
            text = f"torch.clamp({text}, 0, {size - 1})"
        indices.append(text)
    value = f"{node.buffer}[{', '.join(indices)}]" if indices else node.buffer
    if node.type is Type.FLOAT and declared.dtype != "fp32":
        value = f"{value}.to(torch.float32)"
    nothing = "False" if node.type is Type.BOOL else "0"
    return f"torch.where({' & '.join(guards)}, {value}, {nothing})" if guards else value


def modification_source(node: Node, workload: Workload, name: str, score: bool) -> str:
    """A tree as the definition of a function for FlexAttention, which finds `torch` and the buffers by their names."""
    names = [b.name for b in workload.problem.buffers]
    if bad := [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]:
        raise ValueError(f"buffers {bad} cannot be named in Python")
    arguments = ("score, " if score else "") + "b, h, q_idx, kv_idx"
    return f"def {name}({arguments}):\n    return {python_source(node, workload)}\n"


def modification(node: Node, workload: Workload, score: bool) -> Mod:
    """A tree as a function for FlexAttention, buffers in its closure."""
    source = textwrap.indent(modification_source(node, workload, "modification", score), "    ")
    names = [b.name for b in workload.problem.buffers]
    scope: dict[str, Any] = {}
    # Our own printed text.
    exec(f"def make({', '.join(['torch', *names])}):\n{source}    return modification\n", scope)
    made: Mod = scope["make"](torch, *(workload.buffers[name] for name in names))
    return made


def _mods(workload: Workload) -> tuple[Mod | None, Mod | None]:
    problem = workload.problem
    # Peers count queries from zero.
    q_idx = Var("q_idx", Type.INT)
    moved: dict[Node, Node] = {}
    if workload.first:
        moved[q_idx] = Call("add", (q_idx, Const(workload.first, Type.INT)), Type.INT)
    score_mod, mask_mod = (
        None if tree is None else substitute(tree, moved) for tree in (problem.score_mod, problem.mask_mod)
    )
    return (
        None if score_mod is None else modification(score_mod, workload, score=True),
        None if mask_mod is None else modification(mask_mod, workload, score=False),
    )


# --- peers ---


class DoesNotApply(Exception):
    """The peer cannot compute this spec at all."""


def emitted_block_mask(function: Any, workload: Workload) -> Any:
    """The block mask of an emitted function, from the function beside it."""
    make = function.__globals__[f"{workload.problem.name}_block_mask"]
    code = make.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    given = {**workload.buffers, **workload.runtime, "device": workload.q.device}
    size = workload.sizes
    sizes = (size["B"], size["HQ"], size["HKV"], size["SQ"], size["SK"])
    return make(*sizes, **{n: value for n, value in given.items() if n in names})


def create_block_mask(workload: Workload) -> Callable[[], Any]:
    """What makes FlexAttention's block mask, compiled; for each batch and head only where the mask differs between
    them."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = _mods(workload)[1]
    used = variables(workload.problem.mask_mod) if workload.problem.mask_mod is not None else ()
    size, device = workload.sizes, workload.q.device
    batch, heads = (size["B"] if "b" in used else None), (size["HQ"] if "h" in used else None)
    build = torch.compile(create_block_mask) if workload.q.is_cuda else create_block_mask
    return lambda: build(mask_mod, batch, heads, size["SQ"], size["SK"], device=str(device))


def _kgen(workload: Workload, function: Any) -> Attention:
    if workload.packing is not None:
        return _kgen_packed(workload, workload.packing, function)
    keywords: dict[str, Any] = {**workload.buffers, **workload.runtime}
    problem, k = workload.problem, workload.k
    if problem.per_batch:
        keywords["kv_lens"] = torch.full((len(k),), k.shape[2], dtype=torch.int32, device=k.device)
    if problem.block_mask:
        keywords["block_mask"] = emitted_block_mask(function, workload)
    if problem.page_size is None:
        return lambda q, k, v: function(q, k, v, **keywords)
    lens = keywords["kv_lens"].cpu()
    pages_k, table = paged(workload.k, lens, problem.page_size)
    pages_v, _ = paged(workload.v, lens, problem.page_size)
    keywords["block_table"] = table.to(k.device)
    return lambda q, k, v: function(q, pages_k, pages_v, **keywords)


def _packed(x: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D]."""
    return x[0].transpose(0, 1)


def _kgen_packed(workload: Workload, packing: Packing, function: Any) -> Attention:
    keywords = {b.name: workload.buffers[b.name] for b in packing.problem.buffers} | workload.runtime
    cu_seqlens = packing.arguments
    return lambda q, k, v: function(_packed(q), _packed(k), _packed(v), *cu_seqlens, **keywords).transpose(
        0, 1
    )[None]


def _varlen(workload: Workload) -> Attention:
    """PyTorch's FlashAttention over packed sequences."""
    packing = workload.packing
    if packing is None or packing.problem.score_mod is not None or packing.problem.sinks:
        raise DoesNotApply
    keywords = _varlen_mask(packing.problem.mask_mod)
    from torch.nn.attention.varlen import varlen_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if workload.group > 1:
            k, v = (x.repeat_interleave(workload.group, 1) for x in (k, v))
        longest = (packing.longest, packing.longest)
        out: Tensor = varlen_attn(
            _packed(q), _packed(k), _packed(v), *packing.arguments, *longest, **keywords
        )
        return out.transpose(0, 1)[None]

    return attention


def _varlen_mask(mask_mod: Node | None) -> dict[str, Any]:
    """How `varlen_attn` spells a mask. Raises `DoesNotApply` for one that it has not got."""
    if mask_mod is None:
        return {}
    # Both sides have the same lengths here, so that a mask is causal if it is for one of them.
    env = {"SQ": 64, "SK": 64, "q_idx": torch.arange(64)[:, None], "kv_idx": torch.arange(64)[None, :]}
    if variables(mask_mod) - env.keys() or reads(mask_mod):
        raise DoesNotApply
    if not torch.equal(evaluate(mask_mod, env, torch), torch.ones(64, 64).tril().bool()):
        raise DoesNotApply
    return {"window_size": (-1, 0)}


def _flex(
    workload: Workload, kernel_options: dict[str, Any] | None = None, mode: str | None = None
) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    score_mod, mask_mod = _mods(workload)
    block_mask = None if mask_mod is None else create_block_mask(workload)()
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    keywords = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": workload.group > 1}
    keywords["kernel_options"] = kernel_options
    if workload.problem.sinks:
        return lambda q, k, v: _with_sinks(compiled(q, k, v, **keywords, return_lse=True), workload)
    return lambda q, k, v: compiled(q, k, v, **keywords)


def _with_sinks(result: tuple[Tensor, Tensor], workload: Workload) -> Tensor:
    """The output as if the sinks had been in the sum, which is how Transformers adds them to FlexAttention."""
    out, lse = result
    sinks = workload.buffers["sinks"][:, None]
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)


def _sdpa(workload: Workload) -> Attention:
    problem = workload.problem
    q_idx, kv_idx = Var("q_idx", Type.INT), Var("kv_idx", Type.INT)
    causal = (Call("ge", (q_idx, kv_idx), Type.BOOL), Call("le", (kv_idx, q_idx), Type.BOOL))
    if problem.sinks or problem.score_mod is not None or problem.mask_mod not in (None, *causal):
        raise DoesNotApply
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # Its causal mask begins at the first key: one query at the last key sees them all.
    last = workload.first == workload.k.shape[2] - 1
    keywords = {"is_causal": problem.mask_mod is not None and not last, "enable_gqa": workload.group > 1}
    return lambda q, k, v: sdpa(q, k, v, **keywords)


def _eager(workload: Workload) -> Attention:
    score_mod, mask_mod = _mods(workload)
    size, device = workload.sizes, workload.q.device
    b, h, q_idx, kv_idx = (
        torch.arange(size[name], device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, name in enumerate(("B", "HQ", "SQ", "SK"))
    )
    mask = None if mask_mod is None else mask_mod(b, h, q_idx, kv_idx)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(workload.group, 1) for t in (k, v))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, b, h, q_idx, kv_idx)
        if mask is not None:
            # Not -inf: a row without a key would be NaN, and so would its gradient.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if workload.problem.sinks:
            column = workload.buffers["sinks"][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        p = torch.softmax(scores, -1)[..., : size["SK"]]
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        return p.to(q.dtype) @ v

    return attention


def prepare(name: str, workload: Workload, functions: Mapping[str, Any]) -> Attention:
    """A peer by name, an emitted one from `functions`. Raises `DoesNotApply` or whatever goes wrong."""
    if name in functions:
        return _kgen(workload, functions[name])
    made: dict[str, Callable[[], Attention]] = {
        "flex": lambda: _flex(workload),
        "flex-autotune": lambda: _flex(workload, mode="max-autotune-no-cudagraphs"),
        "flex-flash": lambda: _flex(workload, {"BACKEND": "FLASH"}),
        "sdpa": lambda: _sdpa(workload),
        "varlen": lambda: _varlen(workload),
        "eager": lambda: _eager(workload),
    }
    return made[name]()


def visible(workload: Workload) -> int:
    """How many (b, h, query, key) the mask shows, counted exactly."""
    size, mask_mod = workload.sizes, workload.problem.mask_mod
    every = size["B"] * size["HQ"] * size["SQ"] * size["SK"]
    if mask_mod is None:
        return every
    device, used = workload.q.device, variables(mask_mod)
    batches, heads = (size["B"] if "b" in used else 1), (size["HQ"] if "h" in used else 1)
    env: dict[str, Any] = {**size, **workload.params, **workload.buffers, "inf": torch.inf}
    env["kv_idx"] = torch.arange(size["SK"], device=device)[None, :]
    count = 0
    for b in range(batches):
        for h in range(heads):
            for start in range(0, size["SQ"], 1024):
                rows = torch.arange(start, min(start + 1024, size["SQ"]), device=device)[:, None]
                mask = evaluate(mask_mod, env | {"b": b, "h": h, "q_idx": workload.first + rows}, torch)
                count += int(mask.expand(len(rows), size["SK"]).sum())
    return count * (size["B"] // batches) * (size["HQ"] // heads)
