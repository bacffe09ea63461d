"""What the kernels for Hopper are given and hand on: their parameters and arguments, and the tiles that a producer
publishes to its consumers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.kernels.attention.plan.hopper import HALF, HopperPlan, HopperTile
from kgen.kernels.attention.targets.triton.hopper_streams import Stream
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.placement import in_tiles
from kgen.kernels.attention.targets.triton.ranges import lists_of
from kgen.targets.code import Code, op, text

Fields = dict[str, Any]


class _Shared:
    """What several kernels are given."""

    def __init__(self, hopper: HopperPlan, kernels: KernelFields) -> None:
        plan = kernels.plan
        self.hopper = hopper
        self.rows = in_tiles(kernels.packed, kernels.kv_head, hopper.dkdv.BLOCK_M if hopper.dkdv else 0)
        rope = hopper.rope > 0
        self.q, self.k = ["q", *["q_rope"] * rope], ["k", *["k_rope"] * rope]
        self.key_rings = ["kv_ring", *["k_rope_ring"] * rope]
        self.group = ["GQA"] * plan.grouped
        self.consumers = hopper.forward.consumers if hopper.forward else 2
        self.counter, self.counters = ["counter_ptr"] * hopper.dynamic, ["counters"] * hopper.dynamic
        self.lists = {x: list(lists_of(x)) if plan.forward.listed else [] for x in ("kv", "q")}
        self.pointers = {x: [f"{name}_ptr" for name in names] for x, names in self.lists.items()}
        self.query_descs = ["q_desc", "do_desc", *self.rows["vector_names"], *_descs(self.q[1:])]
        self.lag = _lag(hopper)

    def constexprs(self, *more: str) -> list[str]:
        """What is known when a kernel is compiled."""
        return [*self.group, *more, "BLOCK_M", "BLOCK_N"]


def operands(
    hopper: HopperPlan, kernels: KernelFields, loops: Mapping[str, Fields], fields: Fields
) -> Fields:
    """Lists of operands, by kernel: `params` of its signature, `given` at its launch; and what each of its warpgroups
    is handed, operands and what is known when it is compiled."""
    shared = _Shared(hopper, kernels)
    listed = kernels.plan.forward.listed
    gradients = [*["dq"] * (hopper.dq is not None), "dk", "dv"]
    sums = loops["dq"]["row_sums"] if hopper.dq is not None else []
    found: Fields = {
        **shared.rows,
        "q": shared.q,
        "k": shared.k,
        "rope": {"width": hopper.rope} if hopper.rope else None,
        "consumers": shared.consumers,
        "problem": [name for name in kernels.problem if name != "GQA"],
        "k_bytes": "NBYTES + k_rope_desc.block_type.nbytes" if hopper.rope else "NBYTES",
        "key_rings": shared.key_rings,
        "held_keys": ["k_held", "k_rope_held"] if hopper.rope else ["k"],
        "query_descs": shared.query_descs,
        # Vectors of packed sequences begin anywhere, and TMA at multiples of 16 bytes: the producer writes them.
        "query_writers": 2 if kernels.packed else 1,
        "query_rings": [
            f"_slots({desc}, SLOTS)" if desc.endswith("_desc") else "_vector_slots(BLOCK_M, SLOTS)"
            for desc in shared.query_descs
        ],
        "query_bytes": " + ".join(
            [
                "2 * q_desc.block_type.nbytes",
                *["2 * lse_desc.block_type.nbytes"] * (not kernels.packed),
                *["q_rope_desc.block_type.nbytes"] * bool(hopper.rope),
            ]
        ),
        "query_slots": [f"{x}_slots" for x in ("q", "do", "lse", "delta", *shared.q[1:])],
        "lag": shared.lag,
        "backward": {
            "operands": [*shared.counters, *["dq_sum"] * (hopper.fused is not None), *gradients, *sums],
            "gradients": gradients,
            "descs": _descs(["q", "k", "v", "do", *gradients]),
        },
    }
    if hopper.forward is not None:
        found["query_tile"] = _tiles_of_queries(loops, listed, kernels.packed)
        found["producer"], of_forward = _of_forward(
            shared, fields["streams"], fields["pages"], fields["sinks"]
        )
        loops["forward"].update(of_forward)
    if hopper.dq is not None:
        loops["dq"].update(_of_dq(shared, loops["dq"]["rings"], sums))
    if hopper.dkdv is not None:
        found["key_tile"] = _tiles_of_keys(loops["dkdv"], listed, kernels.packed)
        loops["dkdv"].update(_of_dkdv(shared))
    if hopper.fused is not None:
        found["fused"] = _of_fused(shared, loops["dkdv"]["producer"])
    return found


@dataclass(frozen=True)
class Warpgroup:
    """What a function of a warpgroup, or of several, is given."""

    operands: list[str]
    constexprs: list[str]
    """Known when it is compiled."""
    own: list[str] = field(default_factory=list)
    """Operands of which each warpgroup has another."""
    made: Mapping[str, str] = field(default_factory=dict)
    """What the kernel has for an operand, if not a variable of its name."""

    @property
    def params(self) -> list[str]:
        """Operands are one tuple: `warp_specialize` is given short lists."""
        return ["operands", *self.own, *(f"{name}: tl.constexpr" for name in self.constexprs)]

    @property
    def handed(self) -> list[str]:
        return [self.made.get(name, name) for name in self.operands]

    def partitions(self, function: str, name: str, n: int = 1, **given: str) -> list[Fields]:
        """Entries of `warp_specialize` for `n` warpgroups, whose operands the kernel has as `name`; `given` are other
        arguments, in which `{n}` is the number of the warpgroup and `{letter}` a letter of it."""

        def entry(number: int) -> Fields:
            of = {"n": number, "letter": "abc"[number]}
            rest = [given.get(other, other).format(**of) for other in (*self.own, *self.constexprs)]
            return {"function": function, "given": [name, *rest]}

        return [entry(number) for number in range(n)]


def _specialized(tile: HopperTile | None) -> Fields:
    """Warps and registers of all warpgroups but the first."""
    assert tile is not None
    others = tile.consumers - 1
    which, all_of = ("second consumer", 504) if others == 1 else ("other consumers", 512)
    return {
        "warps": [4] * tile.consumers,
        "registers": [tile.consumer_registers] * others + [tile.producer_registers],
        "rest": f"the {which} and the producer; the first consumer has the rest of {all_of}",
    }


def _of_forward(
    shared: _Shared, streams: list[Stream], pages: Fields, sinks: Fields
) -> tuple[Warpgroup, Fields]:
    """The producer of queries' tiles, which may serve dq too, and forward."""
    q, k, lists, counter = shared.q, shared.k, shared.pointers["kv"], shared.counter
    streamed = _descs([s.name for s in streams])
    descs, lag = _descs([*q, *k, "v", "o"]), ["LAG"] * shared.lag["given"]
    extras = [*lists, *streamed, *(f"{s.name}_rings" for s in streams), *pages["args"], *counter]
    producer = Warpgroup(
        ["scheduler", "q_descs", *_descs([*k, "v"]), "q_rings", "kv_ring", *extras, "problem"],
        shared.constexprs(*lag, "GROUP"),
        made={
            "q_descs": _tuple(_descs(q)),
            "q_rings": _tuple(_rings(q)),
            **{f"{s.name}_rings": _tuple(s.rings) for s in streams},
        },
    )
    consumer = Warpgroup(
        [
            "scheduler",
            *_rings(q),
            "kv_ring",
            *lists[2:],
            *sinks["params"],
            "out_slots",
            "o_desc",
            "lse_ptr",
            "problem",
        ],
        shared.constexprs("CONSUMER", "STORE_LSE"),
        _rings([s.name for s in streams]),
    )
    given = [*descs, "lse", *shared.lists["kv"], *streamed, *pages["given"]]
    zero = ["q.new_zeros(1, dtype=torch.int32)"] * shared.hopper.dynamic
    return producer, {
        "part": {2: "half", 3: "third"}[shared.consumers],
        "params": [*descs, "lse_ptr", *lists, *streamed, *pages["params"], *counter, *sinks["params"]],
        "given": [*given, *zero, *sinks["args"]],
        "options": ["launch_pdl=True"] * shared.hopper.dynamic,
        "handed": [("consumer", consumer.handed), ("producer", producer.handed)],
        "consumer": consumer,
        **_specialized(shared.hopper.forward),
        "partitions": [
            *consumer.partitions(
                "_hopper_consumer",
                "consumer",
                shared.consumers,
                CONSUMER="{n}",
                **{f"{s.name}_ring": f"{s.name}_ring_{{letter}}" for s in streams},
            ),
            *producer.partitions("_hopper_producer", "producer", LAG=shared.lag["own"]),
        ],
    }


def _of_dq(shared: _Shared, rings: list[str], sums: list[str]) -> Fields:
    q, k, lists, counter = shared.q, shared.k, shared.pointers["kv"], shared.counter
    own, held, wide = [f"d{x}" for x in q], [*q, "do"], shared.hopper.wide
    descs = _descs([*q, *k, "v", "do", *own])
    vectors = [f"{x}_ptr" for x in ("lse", "delta", *sums)]
    consumer = Warpgroup(
        ["scheduler", *_rings(held), *rings, *lists[2:], *_descs(own), *vectors, "problem"],
        shared.constexprs("CONSUMER"),
    )
    lag = ["LAG"] * (shared.lag["given"] and not wide)
    producer = Warpgroup(
        ["scheduler", "q_descs", *_descs([*k, "v"]), "q_rings", *rings, *lists, *counter, "problem"],
        shared.constexprs(*lag, "GROUP"),
        made={"q_descs": _tuple(_descs(held)), "q_rings": _tuple(_rings(held))},
    )
    return {
        "params": [*descs, *vectors, *lists, *counter],
        "given": [*descs, "lse", "delta", *sums, *shared.lists["kv"], *shared.counters],
        "handed": [("consumer", consumer.handed), ("producer", producer.handed)],
        "consumer": consumer,
        "producer": producer,
        **_specialized(shared.hopper.dq),
        "partitions": [
            *consumer.partitions("_dq_hopper_consumer", "consumer", 2, CONSUMER="{n}"),
            *producer.partitions("_dq_hopper_producer" if wide else "_hopper_producer", "producer", LAG="0"),
        ],
    }


def _of_dkdv(shared: _Shared) -> Fields:
    q, k, lists, split = shared.q, shared.k, shared.pointers["q"], shared.hopper.split_dkdv
    dkdv = shared.hopper.dkdv
    assert dkdv is not None
    streams = _descs([*q, *k, "v", "do"])
    short = ("q_desc", "do_desc") if dkdv.BLOCK_M < HALF else ()
    own, rest = _descs([*(f"d{x}" for x in k), "dv"]), [*lists, *shared.counter]
    of_queries = [*shared.key_rings, "q_ring"]
    given = [f"short_{x}" if x in short else x for x in streams]
    producer = Warpgroup(
        ["scheduler", *_descs([*k, "v"]), "q_descs", *of_queries, *rest, "problem"],
        shared.constexprs("GROUP"),
        made={"q_descs": _tuple(shared.query_descs)},
    )
    consumer = Warpgroup(
        ["scheduler", "kv_ring", "q_ring", *lists[2:], *own, "problem"], shared.constexprs("CONSUMER")
    )
    # Where one consumer has dv, and the other dk.
    dv = Warpgroup(["scheduler", *of_queries, "factors", *lists[2:], own[-1], "problem"], shared.constexprs())
    dk = Warpgroup(["scheduler", *of_queries, "factors", *own[:-1], "problem"], shared.constexprs())
    consumers = {"dv_consumer": dv, "dk_consumer": dk} if split else {"consumer": consumer}
    if split:
        partitions = dv.partitions("_dv_hopper_consumer", "dv_consumer")
        partitions += dk.partitions("_dk_hopper_consumer", "dk_consumer")
    else:
        partitions = consumer.partitions("_dkdv_hopper_consumer", "consumer", 2, CONSUMER="{n}")
    return {
        "params": [*streams, *shared.rows["vector_names"], *own, *rest],
        "given": [*given, *shared.rows["vectors_given"], *own, *shared.lists["q"], *shared.counters],
        "producer": producer,
        **consumers,
        "handed": [(name, of.handed) for name, of in (consumers | {"producer": producer}).items()],
        **_specialized(dkdv),
        "partitions": [*partitions, *producer.partitions("_dkdv_hopper_producer", "producer")],
    }


def _of_fused(shared: _Shared, producer: Warpgroup) -> Fields:
    fused, lists = shared.hopper.fused, shared.pointers["q"]
    assert fused is not None
    streams, own = _descs(["q", "k", "v", "do"]), _descs(["dk", "dv"])
    vectors = [f"_gluon_rows({x}, {fused.BLOCK_M})" for x in ("lse", "delta")]
    consumer = Warpgroup(
        ["scheduler", "kv_ring", "q_ring", "ds_ring", *lists[2:], *own, "dq_sum_ptr", "problem"],
        shared.constexprs("CONSUMER", "DQ"),
    )
    return {
        "tile": fused,
        "params": [*streams, *shared.rows["vector_names"], *own, "dq_sum_ptr", *lists, *shared.counter],
        "given": [*streams, *vectors, *own, "dq_sum", *shared.lists["q"], *shared.counters],
        "handed": [("consumer", consumer.handed), ("producer", producer.handed)],
        "consumer": consumer,
        **_specialized(fused),
        "partitions": [
            *consumer.partitions("_backward_hopper_consumer", "consumer", 2, CONSUMER="{n}"),
            *producer.partitions("_dkdv_hopper_producer", "producer"),
        ],
    }


def _rings(names: list[str]) -> list[str]:
    return [f"{name}_ring" for name in names]


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _descs(names: list[str]) -> list[str]:
    return [f"{name}_desc" for name in names]


def _lag(hopper: HopperPlan) -> Fields:
    """How many tiles V's stream is behind K's: one where the values of a tile meet P beside the next one's scores. The
    producer is told where it serves dq, too, which needs K and V together."""
    own = "1" if hopper.forward is not None and hopper.forward.chained else "0"
    return {"own": own, "given": hopper.dq is not None and not hopper.wide}


def start_of_keys(j: Code, lo: Code, listed: bool) -> Code:
    """Where the j-th tile of keys begins that a tile of queries meets."""
    if listed:
        return op("_listed({0}, {1}, BLOCK_N)", j, "kv_blocks")
    return op("_last_first({0}, {1}, {2}, BLOCK_N)", j, lo, "n_tiles")


def start_of_queries(loop: Fields, lo: Code, listed: bool) -> Code:
    """Where the j-th tile of queries begins that a tile of keys meets."""
    if listed:
        return op("_listed(j, {0}, BLOCK_M)", "q_blocks")
    first = "n_first_masked" if loop["head"] else "0"
    masked = "n_masked" if loop["has_full"] else "n_tiles"
    return op("_masked_first(j, {0}, {1}, {2}, {3}, BLOCK_M)", lo, first, masked, "n_tiles")


def begins(loop: Fields, name: str) -> Code:
    """Where the range of a tile begins, as its consumers know it."""
    return text("0") if loop["lo"] == text("0") else op("{0}", name)


def _tiles_of_queries(loops: Mapping[str, Fields], listed: bool, packed: bool) -> Fields:
    """What the producer tells of a tile of queries: what forward or dq asks for."""
    loop = loops["forward"]
    used = frozenset[str]().union(*(loops[name]["asks"] for name in ("forward", "dq") if name in loops))
    told = {"q_start": "q_start", "b_h": "b_h"}
    told |= {"row": "row"} if listed else {"kv_lo": str(loop["lo"])} if "kv_lo" in used else {}
    told |= {name: name for name in ("n_first_masked", "n_last_masked") if name in used} | {
        "n_tiles": "n_tiles"
    }
    told |= {name: name for name in ("q_begin", "SQ", "SK")} if packed else {}
    return _tile(told) | {"masks_last": "n_last_masked" in told}


def _tiles_of_keys(loop: Fields, listed: bool, packed: bool) -> Fields:
    """What the producer tells of a tile of keys."""
    told = {"kv_start": "kv_start", "b_h": "b * HQ + h"}
    told |= {"row": "row"} if listed else {} if loop["lo"] == text("0") else {"q_lo": str(loop["lo"])}
    told |= {"n_first_masked": "n_first_masked"} if loop["head"] and not listed else {}
    told |= {"n_masked": "n_masked"} if loop["has_full"] else {}
    told |= {"n_tiles": "n_tiles"}
    told |= {name: name for name in ("kv_begin", "SQ", "SK")} if packed else {}
    return _tile(told)


def _tile(told: Mapping[str, str]) -> Fields:
    names = list(told)
    return {
        "fields": names,
        "rest": names[1:],
        "count": len(names),
        "given": list(told.values()),
        "size": 8 if len(names) <= 8 else 16,
    }
