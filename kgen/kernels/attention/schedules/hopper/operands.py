"""Parameters of the Hopper kernels, the operands of their warpgroups, and the published tiles of a
producer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import Param
from kgen.kernels.attention.lowered.params import row_max_of
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.schedules.hopper.keys import KeysLoop
from kgen.kernels.attention.schedules.hopper.plan import HALF, HopperPlan, HopperTile
from kgen.kernels.attention.schedules.hopper.queries import MASKED_TILES, QueriesLoop
from kgen.kernels.attention.schedules.hopper.reads import Pages
from kgen.kernels.attention.schedules.hopper.records import Record, record
from kgen.kernels.attention.schedules.hopper.rows import Rows, rows_of, vectors_of
from kgen.kernels.attention.schedules.hopper.streams import Stream
from kgen.targets.code import GLUON, Assign, Code, If, Run, Statement, op, row, spell, text
from kgen.targets.folding import Bracketed

ARGS = "args"
"""The operands of a warpgroup, in its function."""
PROBLEM = "problem"
"""The sizes, numbers and buffers of a call, in every function of a warpgroup."""


@dataclass(frozen=True)
class Partition:
    """An entry of `warp_specialize`."""

    function: str
    given: list[str]


@dataclass(frozen=True)
class Warpgroup:
    """The parameters of a function of one or several warpgroups."""

    operands: Record
    """The operands. The kernel has them in a variable of that name, and the function in `args`."""
    constexprs: list[str]
    """The compile-time parameters."""
    own: list[str] = field(default_factory=list)
    """Operands that differ between warpgroups."""

    @property
    def defined(self) -> Bracketed:
        """The statement that defines the class of its operands."""
        return self.operands.defined

    @property
    def params(self) -> list[str]:
        """The parameters in the signature."""
        return [ARGS, PROBLEM, *self.own, *(f"{name}: tl.constexpr" for name in self.constexprs)]

    def partitions(self, function: str, n: int = 1, **given: str) -> list[Partition]:
        """Return the `warp_specialize` entries for `n` warpgroups.

        `given` has the arguments other than the operands. In its values, `{n}` is the number of the
        warpgroup, and `{letter}` its letter.
        """

        def entry(number: int) -> Partition:
            letter = "abc"[number]
            others = (*self.own, *self.constexprs)
            rest = [given.get(other, other).format(n=number, letter=letter) for other in others]
            return Partition(function, [self.operands.variable, PROBLEM, *rest])

        return [entry(number) for number in range(n)]


@dataclass(frozen=True)
class Warpgroups:
    """All warpgroups of a kernel: their operands, and the warps and registers of all except the
    first.
    """

    handed: list[Record]
    partitions: list[Partition]
    warps: list[int]
    registers: list[int]
    others: str
    """The warpgroups except the first, in words."""
    registers_in_all: int
    """Registers per thread, summed over all warpgroups: 504 or 512."""


@dataclass(frozen=True)
class KernelOperands:
    """The parameters of a kernel, and the operands of its warpgroups."""

    params: list[Param]
    groups: Warpgroups
    producer: Warpgroup
    consumer: Warpgroup
    dk_consumer: Warpgroup | None = field(default=None, kw_only=True)
    """The consumer of dk, if the other consumer has dv."""

    @property
    def declared(self) -> list[str]:
        """The parameters in the signature."""
        return [p.declared for p in self.params]

    @property
    def given(self) -> list[str]:
        """The arguments of the launch."""
        return [p.argument for p in self.params if p.argument is not None]


@dataclass(frozen=True)
class Constant(Assign):
    """A compile-time constant in a function of a warpgroup."""

    def lines(self, language: str = GLUON) -> list[str]:
        return [f"{self.name}: tl.constexpr = {spell(self.value, language)}"]


@dataclass(frozen=True)
class Lag:
    """`LAG`, the number of tiles by which V follows K.

    It is one if P @ V of a tile runs during the scores of the next tile.
    """

    own: int
    """The lag of forward."""
    given: bool
    """True if the lag is a parameter: the producer also serves dq, which needs K and V together."""

    @property
    def words(self) -> str:
        """The loads of a producer, and the lag, in words, for a docstring."""
        if self.given:
            return "Q (in dq also dO), and its K and V tiles. V follows K by LAG tiles"
        return "Q, and the K and V tiles that it attends to"

    @property
    def constant(self) -> list[Statement]:
        """The statement that defines `LAG` in the producer, unless it is a parameter."""
        return [] if self.given else [Constant(("LAG",), (text(str(self.own)),))]

    @property
    def counter_wait(self) -> Statement:
        """The statement that waits before the producer uses the tile counter."""
        if not self.given:
            return _wait("the kernel that zeroes the counter may still run")
        early = _wait(
            "forward (LAG > 0) starts early: the kernel that zeroes the counter may still run"
        )
        return If(row("gt", "LAG", 0), (early,))

    @property
    def last_wait(self) -> list[Statement]:
        """The final wait of a producer that also serves dq."""
        why = (
            "dq overlaps the dk and dv kernel. Wait for its end, "
            "because later kernels wait only for the dq kernel"
        )
        return [_wait(why)] if self.given else []


def _wait(why: str) -> Run:
    """Return the statement that waits for the kernel before this one."""
    return Run(op("gdc_wait()"), note=why)


class Operands:
    """The parameters that several kernels share."""

    def __init__(self, plan: HopperPlan, kernels: Lowering) -> None:
        of = kernels.plan
        rope = ["q_rope"] if plan.rope else []
        self.plan = plan
        self.packed = kernels.packed
        self.rows: Rows = rows_of(
            kernels.packed, kernels.kv_head, plan.dkdv.BLOCK_M if plan.dkdv else 0
        )
        self.problem = record(
            "Problem", PROBLEM, [name for name in kernels.problem if name != "GQA"]
        )
        self.q, self.k = ["q", *rope], ["k", *(["k_rope"] if plan.rope else [])]
        self.key_rings = ["kv_ring", *(["k_rope_ring"] if plan.rope else [])]
        self.consumers = plan.forward.consumers if plan.forward else 2
        self.lists = {x: _tensors(lists_of(x)) if of.forward.listed else [] for x in ("kv", "q")}
        vectors = [p.name for p in self.rows.vector_params]
        self.query_descs = ["q_desc", "do_desc", *vectors, *(f"{x}_desc" for x in rope)]
        chained = plan.forward is not None and plan.forward.chained
        self.lag = Lag(int(chained), plan.dq is not None and not plan.dq_rings_apart)
        self.group = ["GQA"] if of.grouped else []
        self.row_max = row_max_of(kernels)

    @property
    def reach(self) -> dict[str, str]:
        """Expressions for the call, the block lists and the sinks in the function of a
        warpgroup, by name.
        """
        own = _names([*self.lists["kv"], *self.lists["q"], *SINKS])
        return self.problem.reach | record("", ARGS, own).reach

    def counter(self, tensor: str) -> list[Param]:
        """Return the parameter of the tile counter, if programs take tiles from a counter."""
        return [Param("counter_ptr", tensor)] if self.plan.dynamic else []

    def constexprs(self, *more: str) -> list[str]:
        """Return the compile-time parameters of a kernel."""
        return [*self.group, *more, "BLOCK_M", "BLOCK_N"]

    def forward(self, streams: list[Stream], pages: Pages, sinks: list[Param]) -> KernelOperands:
        """Return the operands of forward, and of the producer of tiles of queries, which may also
        serve dq.
        """
        tile = self.plan.forward
        assert tile is not None
        lists, streamed = self.lists["kv"], _descs([s.name for s in streams])
        descs, counter = _descs([*self.q, *self.k, "v", "o"]), self.counter(_NEW_COUNTER)
        params = [
            *descs,
            Param("lse_ptr", "lse"),
            *self.row_max,
            *lists,
            *streamed,
            *pages.params,
            *counter,
            *sinks,
        ]
        extras = [*_names([*lists, *streamed]), *(f"{s.name}_rings" for s in streams)]
        extras += _names([*pages.params, *counter])
        operands = record(
            "QueryProducer",
            "producer",
            [
                "scheduler",
                "q_descs",
                *_names(_descs([*self.k, "v"])),
                "q_rings",
                "kv_ring",
                *extras,
            ],
            {
                "q_descs": _tuple(_names(_descs(self.q))),
                "q_rings": _tuple(_rings(self.q)),
                **{f"{s.name}_rings": _tuple(s.rings) for s in streams},
            },
        )
        producer = Warpgroup(operands, self.constexprs(*self._lag_given(), "GROUP"))
        rings = [*_rings(self.q), "kv_ring"]
        stored = ["out_slots", "o_desc", "lse_ptr", *_names(self.row_max)]
        options = ["STORE_LSE", *(["STORE_MAX"] if self.row_max else [])]
        consumer = Warpgroup(
            _consumer(
                "Forward", ["scheduler", *rings, *_names(lists[2:]), *_names(sinks), *stored]
            ),
            self.constexprs("CONSUMER", *options),
            _rings([s.name for s in streams]),
        )
        of_streams = {f"{s.name}_ring": f"{s.name}_ring_{{letter}}" for s in streams}
        partitions = consumer.partitions(
            "_hopper_consumer", self.consumers, CONSUMER="{n}", **of_streams
        )
        partitions += producer.partitions("_hopper_producer", LAG=str(self.lag.own))
        groups = _warpgroups(tile, [consumer, producer], partitions)
        return KernelOperands(params, groups, producer, consumer)

    def dq(self, rings: list[str], sums: list[str]) -> KernelOperands:
        """Return the operands of dq, which has its own producer if K and V have separate rings."""
        tile, apart = self.plan.dq, self.plan.dq_rings_apart
        assert tile is not None
        lists, counter = self.lists["kv"], self.counter("counters")
        own, held = _descs([f"d{x}" for x in self.q]), [*self.q, "do"]
        vectors = _tensors(["lse", "delta", *sums])
        descs = _descs([*self.q, *self.k, "v", "do"])
        stored = [*_names(own), *_names(vectors)]
        consumer = Warpgroup(
            _consumer("Dq", ["scheduler", *_rings(held), *rings, *_names(lists[2:]), *stored]),
            self.constexprs("CONSUMER"),
        )
        streamed, more = _names(_descs([*self.k, "v"])), _names([*lists, *counter])
        operands = record(
            "DqProducer" if apart else "QueryProducer",
            "producer",
            ["scheduler", "q_descs", *streamed, "q_rings", *rings, *more],
            {"q_descs": _tuple(_names(_descs(held))), "q_rings": _tuple(_rings(held))},
        )
        producer = Warpgroup(operands, self.constexprs(*self._lag_given(), "GROUP"))
        partitions = consumer.partitions("_dq_hopper_consumer", 2, CONSUMER="{n}")
        function = "_dq_hopper_producer" if apart else "_hopper_producer"
        partitions += producer.partitions(function, LAG="0")
        groups = _warpgroups(tile, [consumer, producer], partitions)
        return KernelOperands(
            [*descs, *own, *vectors, *lists, *counter], groups, producer, consumer
        )

    def dkdv(self) -> KernelOperands:
        """Return the operands of dk and dv: each consumer has half of the keys, or one of the
        gradients.
        """
        tile = self.plan.dkdv
        assert tile is not None
        lists, short = self.lists["q"], tile.BLOCK_M < HALF
        streams = [
            Param(p.name, f"short_{p.name}") if short and p.name in ("q_desc", "do_desc") else p
            for p in _descs([*self.q, *self.k, "v", "do"])
        ]
        own = _descs([*(f"d{x}" for x in self.k), "dv"])
        params = [*streams, *self.rows.vector_params, *own, *lists, *self.counter("counters")]
        producer = self._producer_of_keys()
        if self.plan.split_dkdv:
            return self._split(tile, params, own, producer)
        consumer = Warpgroup(
            _consumer("Dkdv", ["scheduler", "kv_ring", "q_ring", *_names([*lists[2:], *own])]),
            self.constexprs("CONSUMER"),
        )
        partitions = consumer.partitions("_dkdv_hopper_consumer", 2, CONSUMER="{n}")
        partitions += producer.partitions("_dkdv_hopper_producer")
        groups = _warpgroups(tile, [consumer, producer], partitions)
        return KernelOperands(params, groups, producer, consumer)

    def _producer_of_keys(self) -> Warpgroup:
        """Return the producer of tiles of keys."""
        more = _names([*self.lists["q"], *self.counter("counters")])
        descs = _names(_descs([*self.k, "v"]))
        names = ["scheduler", *descs, *self.query_descs, *self.key_rings, "q_ring", *more]
        return Warpgroup(record("KeyProducer", "producer", names), self.constexprs("GROUP"))

    def _split(
        self, tile: HopperTile, params: list[Param], own: list[Param], producer: Warpgroup
    ) -> KernelOperands:
        """Return the operands of the kernel in which one consumer has dv, and the other dk."""
        ahead, (*dk_descs, dv_desc) = (
            ["scheduler", *self.key_rings, "q_ring", "factors"],
            _names(own),
        )
        lists = _names(self.lists["q"][2:])
        dv = Warpgroup(
            record("DvConsumer", "dv_consumer", [*ahead, *lists, dv_desc]), self.constexprs()
        )
        dk = Warpgroup(record("DkConsumer", "dk_consumer", [*ahead, *dk_descs]), self.constexprs())
        partitions = [
            *dv.partitions("_dv_hopper_consumer"),
            *dk.partitions("_dk_hopper_consumer"),
            *producer.partitions("_dkdv_hopper_producer"),
        ]
        groups = _warpgroups(tile, [dv, dk, producer], partitions)
        return KernelOperands(params, groups, producer, dv, dk_consumer=dk)

    def fused(self) -> KernelOperands:
        """Return the operands of the kernel of dq, dk and dv."""
        tile, lists = self.plan.fused, self.lists["q"]
        assert tile is not None
        own, sums = _descs(["dk", "dv"]), [Param("dq_sum_ptr", "dq_sum")]
        ahead = [*_descs(["q", "k", "v", "do"]), *vectors_of(self.packed, tile.BLOCK_M)]
        names = ["scheduler", "kv_ring", "q_ring", "ds_tiles", *_names([*lists[2:], *own, *sums])]
        consumer = Warpgroup(_consumer("Backward", names), self.constexprs("CONSUMER", "DQ"))
        producer = self._producer_of_keys()
        partitions = consumer.partitions("_backward_hopper_consumer", 2, CONSUMER="{n}")
        partitions += producer.partitions("_dkdv_hopper_producer")
        params = [*ahead, *own, *sums, *lists, *self.counter("counters")]
        groups = _warpgroups(tile, [consumer, producer], partitions)
        return KernelOperands(params, groups, producer, consumer)

    def _lag_given(self) -> list[str]:
        return ["LAG"] if self.lag.given else []


_NEW_COUNTER = "q.new_zeros(1, dtype=torch.int32)"


def _consumer(kernel: str, names: list[str]) -> Record:
    return record(f"{kernel}Consumer", "consumer", names)


def _warpgroups(
    tile: HopperTile, handed: list[Warpgroup], partitions: list[Partition]
) -> Warpgroups:
    """Return the warps and registers of all warpgroups except the first."""
    others = tile.consumers - 1
    which, all_of = ("second consumer", 504) if others == 1 else ("other consumers", 512)
    return Warpgroups(
        handed=[group.operands for group in handed],
        partitions=partitions,
        warps=[4] * tile.consumers,
        registers=[tile.consumer_registers] * others + [tile.producer_registers],
        others=f"the {which} and the producer",
        registers_in_all=all_of,
    )


def _descs(names: list[str]) -> list[Param]:
    return [Param(f"{name}_desc", f"{name}_desc") for name in names]


SINKS = [Param("sinks_ptr", "sinks"), Param("stride_sinks", "*sinks.stride()")]
"""The parameters of sinks."""


def _tensors(names: list[str] | tuple[str, ...]) -> list[Param]:
    """Return the pointer parameters of tensors."""
    return [Param(f"{name}_ptr", name) for name in names]


def _names(params: list[Param]) -> list[str]:
    return [p.name for p in params]


def _rings(names: list[str]) -> list[str]:
    return [f"{name}_ring" for name in names]


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


@dataclass(frozen=True)
class Told:
    """A field of a published tile, with its value in the producer."""

    name: str
    value: Code | str


@dataclass(frozen=True)
class PublishedTile:
    """A tile that a producer publishes to its consumers."""

    told: list[Told]

    @property
    def fields(self) -> list[str]:
        """The names of its fields in consumers."""
        return [one.name for one in self.told]

    @property
    def rest(self) -> list[str]:
        """The names of its fields without its start."""
        return self.fields[1:]

    @property
    def count(self) -> int:
        """The number of its fields."""
        return len(self.told)

    @property
    def given(self) -> list[Code | str]:
        """The values of its fields in the producer."""
        return [one.value for one in self.told]

    @property
    def size(self) -> int:
        """Number of values in a slot of the scheduler."""
        return 8 if self.count <= 8 else 16

    @property
    def masks_last(self) -> bool:
        """True if it has the number of masked tiles at the end of its range."""
        return "n_last_masked" in self.fields


def tiles_of_queries(forward: QueriesLoop, dq: QueriesLoop | None, packed: bool) -> PublishedTile:
    """Return the published fields of a tile of queries: the fields that forward or dq needs."""
    used = forward.asks if dq is None else forward.asks | dq.asks
    told = [Told("q_start", "q_start"), Told("b_h", "b_h")]
    if forward.range.listed:
        told.append(Told("row", "row"))
    elif "kv_lo" in used:
        told.append(Told("kv_lo", forward.range.lo))
    told += [Told(name, name) for name in MASKED_TILES if name in used]
    told.append(Told("n_tiles", "n_tiles"))
    return PublishedTile(told + _lengths("q_begin", packed))


def tiles_of_keys(loop: KeysLoop, packed: bool) -> PublishedTile:
    """Return the published fields of a tile of keys."""
    told = [Told("kv_start", "kv_start"), Told("b_h", "b * problem.HQ + h")]
    if loop.range.listed:
        told.append(Told("row", "row"))
    elif not loop.range.from_start:
        told.append(Told("q_lo", loop.range.lo))
    if loop.range.head is not None and not loop.range.listed:
        told.append(Told("n_first_masked", "n_first_masked"))
    if loop.range.has_full:
        told.append(Told("n_masked", "n_masked"))
    told.append(Told("n_tiles", "n_tiles"))
    return PublishedTile(told + _lengths("kv_begin", packed))


def _lengths(begin: str, packed: bool) -> list[Told]:
    """Return the fields for the starts and lengths of packed sequences."""
    return [Told(name, name) for name in (begin, "SQ", "SK")] if packed else []
