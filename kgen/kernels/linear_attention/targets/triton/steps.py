"""The launches of kernels, in order: the tensors that each one fills, and its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.plan.tiles import Table, Tile, tile_tables
from kgen.kernels.linear_attention.targets.triton.counts import (
    Blocks,
    Count,
    Factor,
    Made,
    RowBlocks,
    count,
    table_name,
)
from kgen.kernels.linear_attention.targets.triton.gradients import BackwardKernels, learned
from kgen.kernels.linear_attention.targets.triton.kernels import Kernels
from kgen.kernels.linear_attention.targets.triton.signatures import KernelSignature
from kgen.targets.triton import tables as by_chip


@dataclass(frozen=True)
class Step:
    """One launch of a kernel."""

    kernel: str
    name: str
    """The name of the kernel in tables of tiles."""
    grid: Count
    """The number of programs."""
    tensors: tuple[Made, ...]
    """The tensors that the kernel fills."""
    arguments: list[str]
    renamed: tuple[tuple[str, str], ...] = ()
    """The names that have another tensor after the launch, each with the name of that tensor."""
    kept: str | None = None
    """The name of an earlier tensor with the name of the first one."""

    @property
    def programs(self) -> str:
        """The number of programs in Python."""
        return self.grid.in_python(self.name)

    @property
    def table(self) -> str:
        """The name of the tile table."""
        return table_name(self.name)

    @property
    def fills(self) -> list[str]:
        """The names of the tensors that the kernel fills."""
        return [one.name for one in self.tensors]

    @property
    def made(self) -> list[str]:
        """The statements in Python that allocate them."""
        lines = [f"{one.name} = {one.call(self.name)}" for one in self.tensors]
        if self.kept:
            (own,) = self.tensors
            return [f"{self.kept}, {own.name} = {own.name}, {own.call(self.name)}"]
        return lines

    @property
    def after(self) -> list[str]:
        """The statements in Python after the launch."""
        return [f"{name} = {other}" for name, other in self.renamed]


def part_count(kernel: str) -> Count:
    """Return the number of blocks of rows of one head."""
    return count("B", RowBlocks(kernel))


def row_grid(kernel: str) -> Count:
    """Return the number of programs of a kernel of rows of the output."""
    return count("B", RowBlocks(kernel), "HV")


@dataclass(frozen=True)
class TileRow:
    """The tile shape of some chips, or of all other chips if it names none."""

    chips: str
    """The chips, as a Python tuple."""
    tile: str
    """The keyword arguments of a launch."""


@dataclass(frozen=True)
class TileTable:
    """The tile shapes of a kernel by chip."""

    name: str
    rows: list[TileRow]


def tables(plan: LinearAttentionPlan, signatures: Mapping[str, KernelSignature]) -> list[TileTable]:
    """Return the tile tables of the kernels of a plan, with the fields that each kernel reads."""
    found = tile_tables(plan)
    return [
        TileTable(table_name(kernel), _rows(found[kernel], signature.tile))
        for kernel, signature in signatures.items()
    ]


def _rows(table: Table, fields: tuple[str, ...]) -> list[TileRow]:
    rows = by_chip.rows({chip: [tile] for chip, tile in table.items()})
    return [TileRow(str(chips), _spelled(tile, fields)) for chips, tile in rows]


def _spelled(tile: Tile, fields: tuple[str, ...]) -> str:
    used = {n: x for n, x in tile.used.items() if n in (*fields, "num_warps", "num_stages")}
    return ", ".join(f"{name}={value}" for name, value in sorted(used.items()))


class Steps:
    """Build the launches of one plan."""

    def __init__(self, plan: LinearAttentionPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.chunk, self.size = plan.spec.chunk_size, plan.spec.head_dim

    def new(self, name: str, *shape: Factor | Count, dtype: str | None = None) -> Made:
        """Return a tensor in the dtype of q, or in another one."""
        sizes = (one if isinstance(one, Count) else count(one) for one in shape)
        return Made(name, "q", tuple(sizes), dtype=dtype)

    def by_token(self, name: str, *width: int, dtype: str | None = None) -> Made:
        """Return a tensor with values for each token of the chunks of each head."""
        return self.new(name, "slots", "HV", self.chunk, *width, dtype=dtype)

    def made(self) -> dict[str, Made]:
        """Return the tensors of chunks, by name."""
        K, V, chunk = self.size.qk, self.size.v, self.chunk
        ends = self.new("ends", "slots", "HV", K, V, dtype=self.spec.state_dtype)
        found = (
            Made("q_mapped", "q"),
            Made("k_mapped", "k"),
            self.by_token("G", *([K] if self.plan.by_column else []), dtype="fp32"),
            self.by_token("betas", dtype="fp32"),
            self.by_token("P", chunk),
            self.by_token("A", chunk, dtype="fp32"),
            self.by_token("inverse", chunk),
            self.by_token("W", K),
            self.by_token("U", V),
            self.by_token("new", V),
            self.new("states", "slots", "HV", K, V),
            replace(ends, flag="within"),
        )
        return {one.name: one for one in found}

    def step(
        self,
        kernel: str,
        signature: KernelSignature,
        programs: Count,
        made: Mapping[str, Made],
        renamed: tuple[tuple[str, str], ...] = (),
    ) -> Step:
        """Return one launch, which fills the tensors of `made` that the kernel takes."""
        fills = tuple(made[o.name] for o in signature.operands if o.name in made)
        return Step(signature.name, kernel, programs, fills, signature.arguments, renamed)

    def chunks(self, kernels: Kernels) -> Iterator[Step]:
        """Yield the launches of forward up to the states, in order."""
        made, there = self.made(), set[str]()
        heads: tuple[Factor, ...] = ("slots", "HV")
        columns = (Blocks(self.size.qk, "BLOCK_K", "gates"),) if self.plan.by_column else ()
        blocks = count("N", "HV", Blocks(self.size.v, "BLOCK_V", "states"))
        listed = {
            "gates": (kernels.gates, count(*heads, *columns), ()),
            "q_map": (kernels.q_map, count("B", "H", RowBlocks("q_map")), (("q", "q_mapped"),)),
            "k_map": (kernels.k_map, count("B", "H", RowBlocks("k_map")), (("k", "k_mapped"),)),
            "pairs": (kernels.pairs, count(*heads), ()),
            "equations": (kernels.equations, count(*heads), ()),
            "inverse": (kernels.inverse, count(*heads), ()),
            "solve": (kernels.solve, count(*heads), ()),
            "states": (kernels.states, blocks, ()),
        }
        for name, (kernel, programs, renamed) in listed.items():
            if kernel is not None:
                fresh = {n: one for n, one in made.items() if n not in there}
                yield self.step(name, kernel.signature, programs, fresh, renamed)
                there |= {operand.name for operand in kernel.signature.operands}

    def backward(self, kernels: BackwardKernels) -> Iterator[Step]:
        """Yield the launches of backward, in order."""
        made, there = self.made_by_backward(), {"q", "k", "v", "do"}
        heads: tuple[Factor, ...] = ("slots", "HV")
        of_pairs = (self.chunk // 16, Blocks(self.size.qk, "BLOCK_K", "pairs_back"))
        programs = {
            "states_back": count("N", "HV", Blocks(self.size.v, "BLOCK_V", "states_back")),
            "keys_back": count(*heads, Blocks(self.size.qk, "BLOCK_K", "keys_back")),
            "pairs_back": count(*heads, *of_pairs),
            "q_map_back": count("slots", "H"),
            "k_map_back": count("slots", "H"),
        }
        for name, kernel in vars(kernels).items():
            if kernel is not None and name != "finish_back":
                fresh = {n: one for n, one in made.items() if n not in there}
                grid = programs.get(name, count(*heads))
                yield self.step(name, kernel.signature, grid, fresh)
                there |= {operand.name for operand in kernel.signature.operands}

    def first(self, kernels: Kernels, backward: BackwardKernels) -> Iterator[Step]:
        """Yield the launches that pass the gradient of o through norm and gate, in order."""
        kernel = backward.finish_back
        if kernel is None:
            return
        if not self.spec.saves_states:
            yield replace(self.output(kernels), renamed=(("o_raw", "o"),))
        made = {n: one for n, one in self.made_by_backward().items() if n != "do"}
        grid, renamed = row_grid("finish_back"), (("do", "do_raw"),)
        yield self.step("finish_back", kernel.signature, grid, made, renamed)

    def made_by_backward(self) -> dict[str, Made]:
        """Return the tensors of backward, by name."""
        K, V, chunk, column = self.size.qk, self.size.v, self.chunk, self.plan.by_column
        of_pairs = count(Blocks(K, "BLOCK_K", "pairs_back"), plus=1)
        dG = self.new("dG", Blocks(K, "BLOCK_K", "keys_back"), "slots", "HV", chunk, dtype="fp32")
        parts = of_pairs if column and self.plan.delta else count(1)
        varlen = self.spec.varlen
        found = (
            Made("do_raw", "v"),
            self.by_token("dnew", V),
            self.new("dstates", "slots", "HV", K, V),
            self.by_token("dq_parts", K),
            self.by_token("dk_parts", K),
            self.by_token("dW", K),
            self.by_token("dG", K, dtype="fp32") if column else dG,
            self.by_token("dP", chunk, dtype="fp32"),
            self.by_token("dA", chunk, dtype="fp32"),
            self.new("dbetas", parts, "slots", "HV", chunk, dtype="fp32"),
            *(Made(f"d{name}", name, zeros=varlen) for name in ("q", "k", "v")),
        )
        of_buffers = (one for name in self.plan.learned for one in self.gradients_of(name))
        return {one.name: one for one in (*found, *of_buffers)}

    def gradients_of(self, name: str) -> Iterator[Made]:
        """Yield the tensors whose sum is the gradient of a buffer."""
        sources = self.sources(name)
        both = "fp32" if len(sources) > 1 else None
        for source in sources:
            parts = part_count("finish_back") if source.startswith("finish_") else count("slots")
            if self.spec.buffers[name].tokens:
                yield Made(source, name, dtype=both, zeros=self.spec.varlen)
            elif self.shared(name):
                yield self.new(source, parts, "HV", self.size.v, dtype="fp32")
            else:
                yield Made(source, "q", (parts,), name, "fp32")

    def shared(self, name: str) -> bool:
        """Return True if all heads read the same elements of a buffer."""
        return "HV" not in self.spec.buffers[name].shape

    def sources(self, name: str) -> list[str]:
        """Return the names of the tensors whose sum is the gradient of a buffer."""
        gates = learned(self.plan, "decay", "beta")
        skip = learned(self.plan, "skip")
        finish = learned(self.plan, "output_gate", "output")
        return [
            *([f"grad_{name}"] if name in gates else []),
            *([f"skip_{name}"] if name in skip else []),
            *([f"finish_{name}"] if name in finish else []),
        ]

    def sums(self) -> list[str]:
        """Return the statements that add the parts of gradients of buffers."""
        lines = []
        for name in self.plan.learned:
            sources, tokens = self.sources(name), self.spec.buffers[name].tokens
            axes = "(0, 1)" if self.shared(name) else "0"
            terms = [source if tokens else f"{source}.sum({axes})" for source in sources]
            if not sources:  # the derivative is zero everywhere
                lines.append(f"grad_{name} = {name}.new_zeros({name}.shape)")
                continue
            total = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
            if not tokens or len(terms) > 1:
                lines.append(f"grad_{name} = {total}.to({name}.dtype)")
            elif sources != [f"grad_{name}"]:
                lines.append(f"grad_{name} = {total}")
        return lines

    def output(self, kernels: Kernels) -> Step:
        """Return the launch of the output kernel."""
        # The kernel of rows reads only tokens of sequences.
        made = {"o": Made("o", "v", zeros=self.spec.varlen and not self.plan.finishes)}
        programs = count("slots", "HV", Blocks(self.size.v, "BLOCK_V", "output"))
        return self.step("output", kernels.output.signature, programs, made)

    def finish(self, kernels: Kernels) -> Step | None:
        """Return the launch that computes o from `o_raw`, the result of the kernel before it."""
        if kernels.finish is None:
            return None
        made = {"o": Made("o", "v", zeros=self.spec.varlen)}
        step = self.step("finish", kernels.finish.signature, row_grid("finish"), made)
        return replace(step, kept="o_raw")

    def decode(self, kernels: Kernels) -> Step:
        """Return the launch that steps states."""
        assert kernels.decode is not None
        made = Made("o", "v", zeros=self.spec.varlen)
        if kernels.finish is not None:
            # The state takes more bytes than this tensor, so it is not rounded before the norm.
            made = Made("o", "v", dtype="fp32")
        programs = count("N", "HV", Blocks(self.size.v, "BLOCK_V", "decode"))
        return self.step("decode", kernels.decode.signature, programs, {"o": made})

    def held(self, kernels: Kernels) -> list[str]:
        """Return the tensors of forward that later kernels read, in order."""
        steps = list(self.chunks(kernels))
        apart = ("A", "U", "ends")
        made = [name for step in steps for name in step.fills if name not in apart]
        return [*(["seqs"] if self.spec.varlen else []), *made]
