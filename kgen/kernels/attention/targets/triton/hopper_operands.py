"""What the kernels for Hopper are given and hand on: their parameters and arguments, and the tiles that a producer
publishes to its consumers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.kernels.attention.plan.hopper import HALF, HopperPlan
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.placement import in_tiles
from kgen.kernels.attention.targets.triton.ranges import lists_of
from kgen.targets.code import Code, op, text

Fields = dict[str, Any]


def operands(
    hopper: HopperPlan, kernels: KernelFields, loops: Mapping[str, Fields], fields: Fields
) -> Fields:
    """Lists of operands, by kernel: `params` of its signature, `given` at its launch, what its warps are handed."""
    q, k = (["q", "q_rope"], ["k", "k_rope"]) if hopper.rope else (["q"], ["k"])
    group = ["GQA"] * kernels.plan.grouped
    consumers = hopper.forward.consumers if hopper.forward else 2
    listed = kernels.plan.forward.listed
    counter = ["counter_ptr"] * hopper.dynamic
    counters = ["counters"] * hopper.dynamic
    lists = {x: list(lists_of(x)) if listed else [] for x in ("kv", "q")}
    pointers = {x: [f"{name}_ptr" for name in lists[x]] for x in lists}
    rows = in_tiles(kernels.packed, kernels.kv_head, hopper.dkdv.BLOCK_M if hopper.dkdv else 0)
    gradients = [*["dq"] * (hopper.dq is not None), "dk", "dv"]
    sums = loops["dq"]["row_sums"] if hopper.dq is not None else []
    key_rings = ["kv_ring", *["k_rope_ring"] * bool(hopper.rope)]
    found: Fields = {
        **rows,
        "q": q,
        "k": k,
        "rope": {"width": hopper.rope} if hopper.rope else None,
        "consumers": consumers,
        "problem": [name for name in kernels.problem if name != "GQA"],
        "k_bytes": "NBYTES + k_rope_desc.block_type.nbytes" if hopper.rope else "NBYTES",
        "key_rings": key_rings,
        "held_keys": ["k_held", "k_rope_held"] if hopper.rope else ["k"],
        "query_descs": ["q_desc", "do_desc", *rows["vector_names"], *_descs(q[1:])],  # type: ignore[misc]
        "query_slots": ["q_slots", "do_slots", "lse_slots", "delta_slots", *(f"{x}_slots" for x in q[1:])],
        "lag": _lag(hopper),
        "backward": {
            "operands": [*counters, *["dq_sum"] * (hopper.fused is not None), *gradients, *sums],
            "gradients": gradients,
            "descs": ["q_desc", "k_desc", "v_desc", "do_desc", *_descs(gradients)],
        },
    }
    if hopper.forward is not None:
        found["query_tile"] = _tiles_of_queries(loops, listed, kernels.packed)
    if hopper.dkdv is not None:
        found["key_tile"] = _tiles_of_keys(loops["dkdv"], listed, kernels.packed)
    lag = ["LAG"] * found["lag"]["given"]
    tile = ["BLOCK_M", "BLOCK_N"]
    found["producer"] = {"constexprs": _constexprs([*group, *lag, "GROUP", *tile])}
    if hopper.forward is not None:
        pages, pair, sinks = fields["pages"], hopper.pair is not None, fields["sinks"]
        descs = _descs([*q, *k, "v", "o"])
        found["producer"] |= {
            "extras": [
                *pointers["kv"],
                *["pair_desc", "pair_rings"] * pair,
                *pages["args"],
                *counter,
            ],
            "given": [
                *pointers["kv"],
                *["pair_desc", "(pair_ring_a, pair_ring_b)"] * pair,
                *pages["args"],
                *counter,
            ],
        }
        loops["forward"].update(
            part={2: "half", 3: "third"}[consumers],
            params=[*descs, "lse_ptr", *pointers["kv"], *["pair_desc"] * pair, *pages["params"], *counter]
            + sinks["params"],
            given=[*descs, "lse", *lists["kv"], *["pair_desc"] * pair, *pages["given"]]
            + ["q.new_zeros(1, dtype=torch.int32)"] * hopper.dynamic
            + sinks["args"],
            consumer=[*pointers["kv"][2:], *["pair_ring"] * pair, *sinks["params"]],
            consumer_constexprs=_constexprs([*group, "CONSUMER", "STORE_LSE", *tile]),
            consumers=[
                [
                    "scheduler",
                    *_rings(q),
                    "kv_ring",
                    *pointers["kv"][2:],
                    *([f"pair_ring_{'ab'[n % 2]}"] * pair),
                    *sinks["params"],
                    "out_slots",
                    "o_desc",
                    "lse_ptr",
                    "problem",
                    *group,
                    str(n),
                    "STORE_LSE",
                    *tile,
                ]
                for n in range(consumers)
            ],
            producer=[
                "scheduler",
                _tuple(_descs(q)),
                *_descs([*k, "v"]),
                _tuple(_rings(q)),
                "kv_ring",
                *found["producer"]["given"],
                "problem",
                *group,
                *([found["lag"]["own"]] * len(lag)),
                "GROUP",
                *tile,
            ],
        )
    if hopper.dq is not None:
        own = [*(f"d{x}" for x in q)]
        handed = [*pointers["kv"][2:], *_descs(own), *(f"{x}_ptr" for x in ("lse", "delta", *sums))]
        loops["dq"].update(
            consumer=handed,
            extras=[*pointers["kv"], *counter],
            params=[
                *_descs([*q, *k, "v", "do", *own]),
                *(f"{name}_ptr" for name in ("lse", "delta", *sums)),
                *pointers["kv"],
                *counter,
            ],
            given=[*_descs([*q, *k, "v", "do", *own]), "lse", "delta", *sums, *lists["kv"], *counters],
            consumers=[
                [
                    "scheduler",
                    *_rings([*q, "do"]),
                    *loops["dq"]["rings"],
                    *handed,
                    "problem",
                    *group,
                    str(n),
                    *tile,
                ]
                for n in range(2)
            ],
            consumer_constexprs=_constexprs([*group, "CONSUMER", *tile]),
            producer_params=_constexprs([*group, "GROUP", *tile]),
            produced=[
                "scheduler",
                _tuple(_descs([*q, "do"])),
                *_descs([*k, "v"]),
                _tuple(_rings([*q, "do"])),
                *loops["dq"]["rings"],
                *pointers["kv"],
                *counter,
                "problem",
                *group,
                *(["0"] * (len(lag) * (not hopper.wide))),
                "GROUP",
                *tile,
            ],
        )
    if hopper.dkdv is not None:
        streams, given = _descs([*q, *k, "v", "do"]), _descs([*q, *k, "v", "do"])
        if hopper.dkdv.BLOCK_M < HALF:
            given = [f"short_{x}" if x in ("q_desc", "do_desc") else x for x in given]
        own = _descs([*(f"d{x}" for x in k), "dv"])
        names, rest = rows["vector_names"], [*pointers["q"], *counter]
        loops["dkdv"].update(
            blocks_of=pointers["q"][2:],
            extras=rest,
            params=[*streams, *names, *own, *rest],  # type: ignore[misc]
            given=[*given, *rows["vectors_given"], *own, *lists["q"], *counters],  # type: ignore[misc]
            consumers=[
                ["scheduler", "kv_ring", "q_ring", *pointers["q"][2:], *own, "problem", *group, str(n), *tile]
                for n in range(2)
            ],
            consumer_params=_constexprs([*group, "CONSUMER", *tile]),
            dv_consumer=[
                "scheduler",
                *key_rings,
                "q_ring",
                "factors",
                *pointers["q"][2:],
                own[-1],
                "problem",
                *group,
                *tile,
            ],
            dk_consumer=["scheduler", *key_rings, "q_ring", "factors", *own[:-1], "problem", *group, *tile],
            split_params=_constexprs([*group, *tile]),
            producer_params=_constexprs([*group, "GROUP", *tile]),
            producer=[
                "scheduler",
                *_descs([*k, "v"]),
                "q_descs",
                *key_rings,
                "q_ring",
                *rest,
                "problem",
                *group,
                "GROUP",
                *tile,
            ],
        )
        if hopper.fused is not None:
            vectors = [f"_gluon_rows({x}, {hopper.fused.BLOCK_M})" for x in ("lse", "delta")]
            found["fused"] = {
                "tile": hopper.fused,
                "params": [*streams, *names, *own, "dq_sum_ptr", *rest],  # type: ignore[misc]
                "given": [*streams, *vectors, *own, "dq_sum", *lists["q"], *counters],
                "consumers": [
                    [
                        "scheduler",
                        "kv_ring",
                        "q_ring",
                        "ds_ring",
                        *pointers["q"][2:],
                        *own,
                        "dq_sum_ptr",
                        "problem",
                        *group,
                        str(n),
                        *tile,
                    ]
                    for n in range(2)
                ],
            }
    return found


def _rings(names: list[str]) -> list[str]:
    return [f"{name}_ring" for name in names]


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _descs(names: list[str]) -> list[str]:
    return [f"{name}_desc" for name in names]


def _constexprs(names: list[str]) -> list[str]:
    return [f"{name}: tl.constexpr" for name in names]


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
    last = "n_tiles"
    if loop["has_full"]:
        head = " - n_first_masked" if loop["head"] else ""
        last = f"n_tiles{head} - gl.maximum(gl.cdiv({loop['full_length']}, BLOCK_N), 0)"
    return _tile(told) | {"masks_last": "n_last_masked" in told, "last_masked": last}


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
