"""The launcher of attention in Triton: what `_launcher.j2` names, from argument checks to reductions of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kgen.expr.nodes import Const, Node, Type, Var, reads, substitute, variables
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.kernels.attention.spec import ANY, KV_LENS, Buffer
from kgen.kernels.attention.targets.triton.kernels import buffer_arguments
from kgen.kernels.attention.targets.triton.ranges import lists_of
from kgen.kernels.attention.targets.triton.torch_indices import POSITIONS, torch_index
from kgen.spec.common import REALS, differentiable
from kgen.targets.arguments import (
    NO_BACKWARD,
    NO_DERIVATIVE,
    NOT_ASKED_FOR,
    NOT_LEARNED,
    cast_lines,
    dense,
    derivative_fields,
    divisor_lines,
    number_fields,
)
from kgen.targets.triton.text import TORCH_DTYPES, dtype_words, other_dtype

Check = dict[str, str]
"""A condition that is `wrong`, the `message` about it, and the `error` to raise."""


def _check(wrong: str, message: str, error: str = "ValueError") -> Check:
    return {"wrong": wrong, "message": message, "error": error}


def _dtype_check(name: str, called: str, dtypes: Sequence[str]) -> Check:
    words = f"{called} must be a tensor of {dtype_words(dtypes)}, got {{_dtype({name})}}"
    return _check(other_dtype(name, dtypes), words, "TypeError")


def _differs(name: str, sizes: Sequence[str]) -> str:
    """That a tensor has another shape; an open extent may be anything."""
    if ANY not in sizes:
        return f"{name}.shape != ({', '.join(sizes)}{',' * (len(sizes) == 1)})"
    wrong = [f"{name}.dim() != {len(sizes)}"]
    wrong += [f"{name}.shape[{axis}] != {size}" for axis, size in enumerate(sizes) if size != ANY]
    return " or ".join(wrong)


def real_dtypes(buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """The dtypes of torch that the floating-point buffers must have, by name."""
    return {n: f"torch.{TORCH_DTYPES[b.dtype]}" for n, b in buffers.items() if b.dtype in REALS}


class LauncherFields:
    """Spells the launcher of one plan."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.constants = frozenset(n for n, p in self.spec.params.items() if not p.runtime)
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}

    def called(self, name: str) -> str:
        """What callers say for a name."""
        return self.plan.called.get(name, name)

    def _folded(self, node: Node) -> Node:
        """A tree with compile-time parameters as numbers."""
        return substitute(
            node,
            {
                Var(n, p.scalar): Const(p.value, p.scalar)
                for n, p in self.spec.params.items()
                if p.value is not None
            },
        )

    def fields(self) -> dict[str, object]:
        spec, plan = self.spec, self.plan
        types = {"int": "int", "float": "float"}
        paged = spec.paged_kv is not None
        tables = ["block_table"] if paged else []
        sinks = ("sinks",) * spec.sinks
        operands = ["q", "k", "v", *("cu_seqlens_q", "cu_seqlens_k") * spec.varlen]
        listed = plan.block_mask is not None
        sides = ("kv", "q")[: 1 + plan.backward] if listed else ()
        lists = [name for side in sides for name in lists_of(side)]
        passed = [*operands, *tables, *spec.buffers, *sinks]
        tensors = [*passed, *lists]
        scalars = ["scale", *self.runtime]
        op_params = [f"{t}: Tensor" for t in tensors] + ["scale: float"]
        op_params += [f"{n}: {types[p.type]}" for n, p in self.runtime.items()]
        keywords = [*self.required(), *["block_mask=None"] * listed, "scale=None", "return_lse=False"]
        # In the order in which the score reads them; then those of which nothing is left in it.
        asked = (*(g.buffer for g in plan.gradients), *(n for n, b in spec.buffers.items() if b.grad))
        learned = [*dict.fromkeys(asked), *sinks] if plan.backward else []
        sources_of_gradient = ["q", "k", "v", *learned]
        gradients = plan.gradients if plan.backward else ()
        scattered = [g for g in gradients if g.summed is None and g.along != "pair"]
        problem_args = [a for n, b in spec.buffers.items() for a in buffer_arguments(n, b.shape)]
        problem_args += [*operands[3:], "B", "HQ", *(("TQ", "TK") if spec.varlen else ("SQ", "SK"))]
        problem_args += [*scalars, *["GQA=HQ // HKV"] * plan.grouped]
        needs = " or ".join(["_transformed()", *(f"{x}.requires_grad" for x in sources_of_gradient)])
        checks = self._checks()
        return {
            "tensors": ", ".join(operands),
            "signature": f"{', '.join(operands)}, *, {', '.join(keywords)}",
            "op_params": ", ".join(op_params),
            "op_names": ", ".join(tensors + scalars),
            "call_names": ", ".join([*passed, *["*block_mask[1:]"] * listed, *scalars]),
            "tensor_names": ", ".join(tensors),
            "scalar_names": ", ".join(scalars),
            "gradient_buffer_names": list(self._gradient_buffers()),
            "problem_args": ", ".join(problem_args),
            "default_scale": f"{spec.head_dim.qk} ** -0.5",
            "needs_gradient": needs,
            "needs_lse": f"(torch.is_grad_enabled() and ({needs}))" if plan.backward else None,
            "paged": paged,
            "kv_sizes": self.kv_sizes(),
            "checked_sizes": self._checked_sizes(),
            "kv_shapes": self._kv_shapes(),
            "k_shape": self._k_shape(),
            "buffer_words": self._argument_words(),
            "casts": {
                "operands": cast_lines(dict.fromkeys(("q", "k", "v"), f"torch.{TORCH_DTYPES[spec.dtype]}")),
                "buffers": self.casts(spec.buffers),
            },
            "checks": checks,
            "names_dtypes": paged or any("_dtype(" in check["message"] for check in checks),
            "widest_step": self._widest_step(),
            "gradient_types": f"tuple[{', '.join(['Tensor'] * (3 + len(learned)))}]",
            "gradient_buffers": [f"{name} = {made}" for name, made in self._gradient_buffers().items()],
            "gradient_reductions": self._gradient_reductions(learned),
            "gradient_results": [f"grad_{n}" for n in learned],
            "gradient_names": [f"d{n}" for n in learned],
            "gradient_fakes": [f"{n}.new_empty({n}.shape)" for n in learned],
            "gradient_returns": ", ".join(
                [
                    "dq",
                    "dk",
                    "dv",
                    *("None" for _ in operands[3:]),
                    *(f"d{n}" if n in learned else "None" for n in (*spec.buffers, *sinks, *lists)),
                    *("None" for _ in scalars),
                ]
            ),
            **self._derivatives(sources_of_gradient),
            "dense_check": dense([*operands[3:], *tables, *map(self.called, spec.buffers), *sinks]),
            **number_fields(
                self.runtime, plan.called, [*spec.buffers, *self.runtime], self.divisor_lines(self.runtime)
            ),
            "scatters": bool(scattered),
            "scatter_reads": any(reads(i) for g in scattered for i in g.indices),
        }

    def divisor_lines(self, params: Iterable[str]) -> list[str]:
        """The checks of divisors of both expressions."""
        trees = [self._folded(t) for t in (self.plan.score_mod, self.plan.mask_mod) if t is not None]
        return divisor_lines(self.spec.name, trees, params, self.plan.called)

    def required(self) -> list[str]:
        """The keywords without a default, as callers say them."""
        spec = self.spec
        tables, sinks = ["block_table"] * (spec.paged_kv is not None), ["sinks"] * spec.sinks
        return [*tables, *map(self.called, spec.buffers), *sinks, *map(self.called, self.runtime)]

    def _derivatives(self, learned: list[str]) -> dict[str, object]:
        spec, plan = self.spec, self.plan
        real = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.element is Type.FLOAT)]
        real += ["sinks"] * spec.sinks
        learnable = differentiable(plan.score_mod) if plan.score_mod is not None else frozenset()
        if plan.backward:
            words = {n: NOT_LEARNED if n in learnable else NO_DERIVATIVE for n in real if n not in learned}
        else:
            words = dict.fromkeys(real, NO_BACKWARD if spec.paged_kv else NOT_ASKED_FOR)
        return derivative_fields(real, words, derived=plan.backward, called=plan.called)

    def kv_sizes(self) -> str:
        """Heads of K and V, and the number of keys."""
        if self.spec.paged_kv is None:
            return "k.shape[1], k.shape[2]"
        return f"k.shape[2], block_table.shape[1] * {self.spec.paged_kv.page_size}"

    def _checked_sizes(self) -> str:
        """What a call is checked by: SK only where something has that length, for pages say nothing of it."""
        spec = self.spec
        dims = {dim for buffer in spec.buffers.values() for dim in buffer.shape}
        promised = getattr(spec.lengths.kv, "multiple_of", 1) > 1 or self.plan.self_attention
        if spec.paged_kv is None or "SK" in dims or promised or self.plan.block_mask is not None:
            return f"HKV, SK = {self.kv_sizes()}"
        return "HKV = k.shape[2]"

    def _k_shape(self) -> str:
        if self.spec.varlen:
            return "TK, HKV"
        return f"k.shape[0], {self.spec.paged_kv.page_size}, HKV" if self.spec.paged_kv else "B, HKV, SK"

    def _kv_shapes(self) -> str:
        head, paged = self.spec.head_dim, self.spec.paged_kv
        if self.spec.varlen:
            return f"k [TK, HKV, {head.qk}], v [TK, HKV, {head.v}]"
        if paged is None:
            return f"k [B, HKV, SK, {head.qk}], v [B, HKV, SK, {head.v}]"
        return f"k [pages, {paged.page_size}, HKV, {head.qk}], v [pages, {paged.page_size}, HKV, {head.v}]"

    def _argument_words(self) -> list[str]:
        """What the docstring says of each argument."""
        spec = self.spec
        words = []
        if spec.paged_kv is not None:
            words.append(
                "block_table: [B, n] int32, the pages of each sequence in order, not checked; SK is n pages."
            )
        words += self.argument_words(spec.buffers, ())
        if spec.sinks:
            words.append(f"sinks: [HQ] {dtype_words(REALS)}, logits that join the softmax without a value.")
        words += self.argument_words((), self.runtime)
        if self.plan.block_mask is not None:
            words.append(
                f"block_mask: what {spec.name}_block_mask gives for these sizes; by default it is built at every call."
            )
        if spec.aligned_to_end:
            keys = "kv_lens[b]" if spec.per_batch else "SK"
            words.append(f"Query i is at position {keys} - SQ + i: the last query at the last key.")
        return words

    def argument_words(self, buffers: Iterable[str], scalars: Iterable[str]) -> list[str]:
        """What a docstring says of some buffers and run-time params."""
        words = []
        for name in buffers:
            b = self.spec.buffers[name]
            shape = f"[{', '.join(map(str, b.shape))}] {dtype_words(b.dtypes)}"
            role = ", how many keys each sequence has, at most SK; others are not read" * (name == KV_LENS)
            role += self._used_by(name) * (name != KV_LENS)
            words.append(f"{self.called(name)}: {shape}{', ascending' if b.sorted else ''}{role}.")
        return words + [f"{self.called(n)}: {self.runtime[n].type}{self._used_by(n)}." for n in scalars]

    def _used_by(self, name: str) -> str:
        """The expressions that use a buffer or a parameter, for docstrings."""
        trees = {"score_mod": self.plan.score_mod, "mask_mod": self.plan.mask_mod}
        users = [
            field
            for field, tree in trees.items()
            if tree is not None and name in variables(tree) | {read.buffer for read in reads(tree)}
        ]
        return f", used by {' and '.join(users)}" if users else ", used by no expression"

    def _checks(self) -> list[Check]:
        spec = self.spec
        checks: list[Check] = []

        def check(wrong: str, message: str, error: str = "ValueError") -> None:
            checks.append({"wrong": wrong, "message": message, "error": error})

        if spec.gqa == "any":
            check(
                "HKV == 0 or HQ % HKV",
                "q has {HQ} heads, which is not a multiple of the {HKV} heads of k and v",
            )
        else:
            expected = "HKV" if spec.gqa == 1 else f"{spec.gqa} * HKV"
            check(
                f"HQ != {expected}",
                f"q must have {spec.gqa} head{'s' * (spec.gqa != 1)} for each of k and v, got {{HQ}} and {{HKV}}",
            )
        if spec.varlen:
            self._check_packed(check)
        queries, keys = ("TQ", "TK") if spec.varlen else ("SQ", "SK")
        if spec.paged_kv:
            keys = f"block_table.shape[1] * {spec.paged_kv.page_size}"
        # Kernels reckon with positions, sums and differences of them in 32 bits.
        check(
            f"max({queries}, {keys}) > 2**29",
            f"there may be 2**29 queries and as many keys, got {{{queries}}} and {{{keys}}}",
        )
        checks += self.length_checks() + self.scalar_checks(self.runtime)
        most = self._widest_step()
        check(
            f"max(q.stride(-1), k.stride(-1), v.stride(-1)) > {most}",
            f"elements of a row of q, k and v may not lie more than {most} apart, make it contiguous",
        )
        checks += self.buffer_checks(spec.buffers, "q.device")
        if spec.sinks:
            checks.append(_dtype_check("sinks", "sinks", REALS))
            check(
                "sinks.shape != (HQ,) or sinks.device != q.device",
                "sinks must be [{HQ}] on {q.device}, got {list(sinks.shape)} on {sinks.device}",
            )
        return checks

    def _widest_step(self) -> str:
        """How far apart columns may lie: kernels multiply them by strides in 32 bits."""
        return f"2**{31 - (max(self.spec.head_dim.qk, self.spec.head_dim.v) - 1).bit_length()}"

    def length_checks(self) -> list[Check]:
        """Of what is promised of SQ and SK, or follows from the buffers."""
        checks = []
        for size, length in (("SQ", self.spec.lengths.q), ("SK", self.spec.lengths.kv)):
            multiple = getattr(length, "multiple_of", None)
            if multiple and multiple > 1:
                message = f"{size} must be a multiple of {multiple}, got {{{size}}}"
                checks.append(_check(f"{size} % {multiple}", message))
        if self.plan.self_attention:
            checks.append(_check("SQ != SK", "q and k must be equally long, got {SQ} and {SK}"))
        return checks

    def scalar_checks(self, names: Iterable[str]) -> list[Check]:
        """Of run-time params."""
        # Tile ranges add it to positions in 32 bits.
        return [
            _check(
                f"abs({name}) > 2**30", f"{self.called(name)} must lie within 2**30 of zero, got {{{name}}}"
            )
            for name in names
            if self.runtime[name].type == "int"
        ]

    def casts(self, names: Iterable[str]) -> list[str]:
        """The lines that cast buffers under autocast."""
        return cast_lines(real_dtypes({n: self.spec.buffers[n] for n in names}))

    def buffer_checks(self, names: Iterable[str], device: str) -> list[Check]:
        """Of buffers, which have to be on a device."""
        checks = []
        sequences = "len(cu_seqlens_q) - 1"
        for name in names:
            buffer, called = self.spec.buffers[name], self.called(name)
            # Packed tensors have no batch dimension.
            sizes = [sequences if s == "B" and self.spec.varlen else str(s) for s in buffer.shape]
            checks.append(_dtype_check(name, called, buffer.dtypes))
            if not sizes:
                wrong = f"{name}.dim() or {name}.device != {device}"
                words = f"{called} must be one number, a tensor without dimensions, on {{{device}}}, "
                checks.append(_check(wrong, f"{words}got {{list({name}.shape)}} on {{{name}.device}}"))
                continue
            words = ", ".join(s if s.isdecimal() or s == ANY else f"{{{s}}}" for s in sizes)
            checks.append(
                _check(
                    f"{_differs(name, sizes)} or {name}.device != {device}",
                    f"{called} must be [{words}] on {{{device}}}, got {{list({name}.shape)}} on {{{name}.device}}",
                )
            )
            length = f"{name}.shape[-1]" if sizes[-1] == ANY else sizes[-1]
            last = str(int(length) - 1) if length.isdecimal() else f"({length} - 1)"
            # As columns of q, k and v.
            checks.append(
                _check(
                    f"{last} * {name}.stride(-1) >= 2**31",
                    f"a row of {called} may not span 2**31 elements, make it contiguous",
                )
            )
        return checks

    def _check_packed(self, check: Callable[..., None]) -> None:
        both = ("cu_seqlens_q", "cu_seqlens_k")
        for name in both:
            check(**_dtype_check(name, name, ("int32",)))
        check(
            "cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or len(cu_seqlens_q) < 2",
            "cu_seqlens_q and cu_seqlens_k must both be [N + 1] for N sequences, "
            "got {list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}",
        )
        check(
            f"any(x.device != q.device or not x.is_contiguous() for x in ({', '.join(both)}))",
            "cu_seqlens_q and cu_seqlens_k must be contiguous on {q.device}",
        )

    def _gradient_buffers(self) -> dict[str, str]:
        """What gradients of buffers are summed into, by name."""
        made, packed = dict[str, str](), self.spec.varlen
        for g in self.plan.gradients if self.plan.backward else ():
            if g.along == "pair" and g.summed is not None:
                sizes = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}
                made[f"d_{g.name}"] = f"{g.buffer}.new_empty(({', '.join(sizes[n] for n in g.summed)}))"
            elif g.along == "distance":
                made[f"d_{g.name}"] = "q.new_zeros((B, HQ, SQ + SK), dtype=torch.float32)"
            elif g.along == "pair":
                made[f"d_{g.name}"] = f"torch.zeros({g.buffer}.shape, dtype=torch.float32, device=q.device)"
            else:
                length = "SQ" if g.along == "q" else "SK"
                shape = f"HQ, T{length[1]}" if packed else f"B, HQ, {length}"
                made[f"d_{g.name}"] = f"q.new_zeros(({shape}), dtype=torch.float32)"
        if self.spec.sinks:
            shape = "HQ, _cdiv(TQ, 64)" if packed else "B, HQ, _cdiv(SQ, 64)"
            made["d_sinks"] = f"q.new_zeros(({shape}), dtype=torch.float32)"
        return made

    def _gradient_reductions(self, learned: list[str]) -> list[str]:
        lines, packed = [], self.spec.varlen
        positions = {"q": "q_idx", "kv": "kv_idx"}
        for g in self.plan.gradients if self.plan.backward else ():
            if g.along == "pair":
                continue
            if g.along == "distance":
                lines += self._by_distance(g)
                continue
            if g.summed is None:
                # Of packed sequences each token has its own lengths.
                tensors = POSITIONS | {"SQ", "SK"} if packed else POSITIONS
                index = ", ".join(torch_index(self._folded(i), tensors) for i in g.indices)
                if packed:
                    lines += self._tokens(g)
                    lines.append(f"d_{g.name} = _scatter(d_{g.name}, ({index},), {g.buffer})")
                    continue
                length = "SQ" if g.along == "q" else "SK"
                grid = f"b, h, {positions[g.along]}"
                ranges = f"(torch.arange(n, device=q.device) for n in (B, HQ, {length}))"
                lines.append(f'{grid} = torch.meshgrid(*{ranges}, indexing="ij")')
                lines.append(f"d_{g.name} = _scatter(d_{g.name}, ({index},), {g.buffer})")
                continue
            dims = ["h", positions[g.along]] if packed else ["b", "h", positions[g.along]]
            summed = [i for i, d in enumerate(dims) if d not in g.summed]
            kept = [d for d in dims if d in g.summed]
            total = (
                f"d_{g.name}.sum(({', '.join(map(str, summed))}{',' if len(summed) == 1 else ''}))"
                if summed
                else f"d_{g.name}"
            )
            order = [kept.index(n) for n in g.summed]
            if order != sorted(order):
                total += f".permute({', '.join(map(str, order))})"
            lines.append(f"d_{g.name} = {total}")
        if self.spec.sinks:
            lines.append(f"d_sinks = d_sinks.sum({'1' if packed else '(0, 2)'})")
        for buffer in learned:
            parts = [f"d_{g.name}" for g in self.plan.gradients if g.buffer == buffer]
            parts += ["d_sinks"] if self.spec.sinks and buffer == "sinks" else []
            if not parts:
                lines.append(
                    f"grad_{buffer} = torch.zeros_like({buffer}, memory_format=torch.contiguous_format)"
                )
                continue
            total = " + ".join(parts)
            lines.append(
                f"grad_{buffer} = ({total}).to({buffer}.dtype).contiguous()"
                if len(parts) > 1
                else f"grad_{buffer} = {total}.to({buffer}.dtype).contiguous()"
            )
        return lines

    def _by_distance(self, g: ReadGradient) -> list[str]:
        """The sums by distance, first over what the indices do not have, added to the elements that they belong to."""
        used = frozenset().union(*(variables(i) for i in g.indices))
        sizes = {"b": "B", "h": "HQ"}
        absent = [i for i, n in enumerate(sizes) if n not in used]
        total = f"d_{g.name}.sum({absent})" if absent else f"d_{g.name}"
        ranges = {n: f"torch.arange({size}, device=q.device)" for n, size in sizes.items() if n in used}
        ranges["distance"] = "torch.arange(-SK, SQ, device=q.device)"
        grid = ", ".join(ranges) + "," * (len(ranges) == 1)
        index = ", ".join(torch_index(self._folded(i)) for i in g.indices)
        return [
            f'{grid} = torch.meshgrid({", ".join(ranges.values())}, indexing="ij")',
            f"d_{g.name} = _scatter({total}, ({index},), {g.buffer})",
        ]

    def _tokens(self, g: ReadGradient) -> list[str]:
        """The positions, heads and sequences of packed tokens, which a gradient's indices are made of."""
        x = g.along[0]
        side = {"q": "q", "k": "k"}[x]
        used = frozenset().union(*(variables(i) for i in g.indices))
        lines = [
            f"token_idx = torch.arange(T{side.upper()}, dtype=torch.int32, device=q.device)",
            "h = torch.arange(HQ, device=q.device)[:, None]",
            f"b = torch.bucketize(token_idx, cu_seqlens_{side}[1:], right=True)",
        ]
        position = "q_idx" if x == "q" else "kv_idx"
        if position in used:
            lines.append(f"{position} = token_idx - cu_seqlens_{side}[b]")
        lengths = (("SQ", "q"), ("SK", "k"))
        # Tokens after the last sequence have no length, and nothing to add.
        return lines + [f"{n} = cu_seqlens_{s}.diff()[b.clamp(max=B - 1)]" for n, s in lengths if n in used]
