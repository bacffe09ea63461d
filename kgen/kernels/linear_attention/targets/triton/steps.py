"""The launches of kernels, in order: the tensors that each one fills, and its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.plan.tiles import Table, Tile, tile_tables
from kgen.kernels.linear_attention.targets.triton.gradients import BackwardKernels, learned
from kgen.kernels.linear_attention.targets.triton.kernels import Kernels
from kgen.kernels.linear_attention.targets.triton.signatures import KernelSignature
from kgen.targets.triton import tables as by_chip
from kgen.targets.triton.text import TORCH_DTYPES

PARTS = 'B * _cdiv(T, tile["ROWS"])'
"""The number of blocks of rows of one head."""
ROWS = f"{PARTS} * HV"
"""The number of programs of a kernel of rows of the output."""


@dataclass(frozen=True)
class Step:
    """One launch of a kernel."""

    kernel: str
    programs: str
    """The number of programs."""
    table: str
    """The name of its tile table."""
    fills: list[str]
    """The tensors that the kernel fills."""
    made: list[str]
    """Statements that allocate them."""
    arguments: list[str]
    after: list[str]
    """Statements after the launch."""


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


def table_name(kernel: str) -> str:
    """Return the name of a kernel's tile table."""
    return f"_{kernel.upper()}_TILES"


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

    def new(self, *shape: str | int, dtype: str | None = None) -> str:
        """Return the call that allocates a tensor in the dtype of q, or in another one."""
        of = f", dtype=torch.{dtype}" if dtype else ""
        return f"q.new_empty(({', '.join(map(str, shape))}){of})"

    def by_token(self, *width: int, dtype: str | None = None) -> str:
        """Return the call that allocates values for each token of the chunks of each head."""
        return self.new("slots", "HV", self.chunk, *width, dtype=dtype)

    def made(self) -> dict[str, str]:
        """Return the calls that allocate tensors of chunks, by name."""
        K, V, chunk = self.size.qk, self.size.v, self.chunk
        return {
            "q_mapped": "q.new_empty(q.shape)",
            "k_mapped": "k.new_empty(k.shape)",
            "G": self.by_token(*([K] if self.plan.by_column else []), dtype="float32"),
            "betas": self.by_token(dtype="float32"),
            "P": self.by_token(chunk),
            "A": self.by_token(chunk, dtype="float32"),
            "inverse": self.by_token(chunk),
            "W": self.by_token(K),
            "U": self.by_token(V),
            "new": self.by_token(V),
            "states": self.new("slots", "HV", K, V),
            "ends": (
                f"q.new_empty((slots, HV, {K}, {V}) if within else 0, "
                f"dtype=torch.{TORCH_DTYPES[self.spec.state_dtype]})"
            ),
        }

    def step(
        self,
        kernel: str,
        signature: KernelSignature,
        programs: str,
        made: Mapping[str, str],
        after: tuple[str, ...] = (),
    ) -> Step:
        """Return one launch, which fills the tensors of `made` that the kernel takes."""
        fills = [o.name for o in signature.operands if o.name in made]
        allocated = [f"{name} = {made[name]}" for name in fills]
        table, arguments = table_name(kernel), signature.arguments
        return Step(signature.name, programs, table, fills, allocated, arguments, list(after))

    def chunks(self, kernels: Kernels) -> Iterator[Step]:
        """Yield the launches of forward up to the states, in order."""
        made, there = self.made(), set[str]()
        heads = "slots * HV"
        columns = f' * ({self.size.qk} // tile["BLOCK_K"])' if self.plan.by_column else ""
        blocks = f'N * HV * ({self.size.v} // tile["BLOCK_V"])'
        rows = 'B * H * _cdiv(T, tile["ROWS"])'
        listed = {
            "gates": (kernels.gates, heads + columns, ()),
            "q_map": (kernels.q_map, rows, ("q = q_mapped",)),
            "k_map": (kernels.k_map, rows, ("k = k_mapped",)),
            "pairs": (kernels.pairs, heads, ()),
            "equations": (kernels.equations, heads, ()),
            "inverse": (kernels.inverse, heads, ()),
            "solve": (kernels.solve, heads, ()),
            "states": (kernels.states, blocks, ()),
        }
        for name, (kernel, programs, after) in listed.items():
            if kernel is not None:
                fresh = {n: call for n, call in made.items() if n not in there}
                yield self.step(name, kernel.signature, programs, fresh, after)
                there |= {operand.name for operand in kernel.signature.operands}

    def backward(self, kernels: BackwardKernels) -> Iterator[Step]:
        """Yield the launches of backward, in order."""
        made, there = self.made_by_backward(), {"q", "k", "v", "do"}
        heads, of_tile = "slots * HV", f' * ({self.size.qk} // tile["BLOCK_K"])'
        programs = {
            "states_back": f'N * HV * ({self.size.v} // tile["BLOCK_V"])',
            "keys_back": heads + of_tile,
            "pairs_back": f"{heads} * {self.chunk // 16}{of_tile}",
            "q_map_back": "slots * H",
            "k_map_back": "slots * H",
        }
        for name, kernel in vars(kernels).items():
            if kernel is not None and name != "finish_back":
                fresh = {n: call for n, call in made.items() if n not in there}
                yield self.step(name, kernel.signature, programs.get(name, heads), fresh)
                there |= {operand.name for operand in kernel.signature.operands}

    def first(self, kernels: Kernels, backward: BackwardKernels) -> Iterator[Step]:
        """Yield the launches that pass the gradient of o through norm and gate, in order."""
        kernel = backward.finish_back
        if kernel is None:
            return
        if not self.spec.saves_states:
            output = self.output(kernels)
            yield replace(output, after=["o_raw = o"])
        made = {n: call for n, call in self.made_by_backward().items() if n != "do"}
        yield self.step("finish_back", kernel.signature, ROWS, made, ("do = do_raw",))

    def made_by_backward(self) -> dict[str, str]:
        """Return the calls that allocate tensors of backward, by name."""
        K, V, chunk, column = self.size.qk, self.size.v, self.chunk, self.plan.by_column
        blocks = f'{K} // tile["BLOCK_K"]'
        parts, of_pairs = "1", f'1 + {K} // _tile({table_name("pairs_back")}, arch)["BLOCK_K"]'
        dG = self.new(blocks, "slots", "HV", chunk, dtype="float32")
        betas = of_pairs if column and self.plan.delta else parts
        call = "new_zeros" if self.spec.varlen else "new_empty"
        found = {
            "do_raw": "v.new_empty(v.shape)",
            "dnew": self.by_token(V),
            "dstates": self.new("slots", "HV", K, V),
            "dq_parts": self.by_token(K),
            "dk_parts": self.by_token(K),
            "dW": self.by_token(K),
            "dG": self.by_token(K, dtype="float32") if column else dG,
            "dP": self.by_token(chunk, dtype="float32"),
            "dA": self.by_token(chunk, dtype="float32"),
            "dbetas": self.new(betas, "slots", "HV", chunk, dtype="float32"),
        }
        found |= {f"d{name}": f"{name}.{call}({name}.shape)" for name in ("q", "k", "v")}
        for name in self.plan.learned:
            both = ", dtype=torch.float32" if len(self.sources(name)) > 1 else ""
            whole = f"{name}.{call}({name}.shape{both})"
            for source in self.sources(name):
                parts = PARTS if source.startswith("finish_") else "slots"
                shape = f"{parts}, *{name}.shape"
                if self.shared(name):
                    shape = f"{parts}, HV, {V}"
                part = f"q.new_empty(({shape}), dtype=torch.float32)"
                found[source] = whole if self.spec.buffers[name].tokens else part
        return found

    def shared(self, name: str) -> bool:
        """Return True if all heads read the same elements of a buffer."""
        return "HV" not in self.spec.buffers[name].shape

    def sources(self, name: str) -> list[str]:
        """Return the tensors whose sum is the gradient of a buffer."""
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
        programs = f'slots * HV * ({self.size.v} // tile["BLOCK_V"])'
        # The kernel of rows reads only tokens of sequences.
        zeros = self.spec.varlen and not self.plan.finishes
        made = {"o": f"v.{'new_zeros' if zeros else 'new_empty'}(v.shape)"}
        return self.step("output", kernels.output.signature, programs, made)

    def finish(self, kernels: Kernels) -> Step | None:
        """Return the launch that computes o from `o_raw`, the result of the kernel before it."""
        if kernels.finish is None:
            return None
        call = "new_zeros" if self.spec.varlen else "new_empty"
        step = self.step("finish", kernels.finish.signature, ROWS, {})
        return replace(step, made=[f"o_raw, o = o, v.{call}(v.shape)"])

    def held(self, kernels: Kernels) -> list[str]:
        """Return the tensors of forward that later kernels read, in order."""
        steps = list(self.chunks(kernels))
        apart = ("A", "U", "ends")
        made = [name for step in steps for name in step.fills if name not in apart]
        return [*(["seqs"] if self.spec.varlen else []), *made]
