"""Random attention specs, and sizes to call them with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from fuzzing.edges import add_edges
from fuzzing.words import BOOL, FLOAT, INT, Words
from kgen.kernels.attention.verify.inputs import Case, fit

SHAPES = (
    *(
        ("HQ",),
        ("B",),
        ("SQ",),
        ("SK",),
        ("B", "HQ"),
        ("HQ", "SQ"),
        ("HQ", "SK"),
        ("B", "SK"),
        ("B", "SQ"),
    ),
    *(
        ("HQ", "SQ", "SK"),
        ("B", "HQ", "SQ", "SK"),
        ("SQ", "SK"),
        (5,),
        ("HQ", 7),
        ("B", 3, 4),
        (4, "SK"),
    ),
)
AXES = {"B": "b", "HQ": "h", "SQ": "q_idx", "SK": "kv_idx"}
KINDS = {"fp32": FLOAT, "bf16": FLOAT, "fp16": FLOAT, "int32": INT, "int64": INT, "bool": BOOL}
HEADS = (16, 32, 64, 64, 128, 128, 24, 80, 96, 160, {"qk": 96, "v": 64}, {"qk": 192, "v": 128})
LENGTHS = (0, 1, 2, 7, 16, 33, 64, 65, 100, 128, 129, 200, 257)
FEW = (0, 1, 5, 9, 33, 40, 65, 70, 130)
MASKS = (
    *("q_idx >= kv_idx", "q_idx - kv_idx < {n} and q_idx >= kv_idx", "abs(q_idx - kv_idx) <= {n}"),
    *(
        "q_idx >= kv_idx or kv_idx < {n}",
        "q_idx // {n} == kv_idx // {n}",
        "(q_idx - kv_idx) % {n} == 0",
    ),
    *(
        "kv_idx <= q_idx + SK - SQ",
        "q_idx // {n} >= kv_idx // {n}",
        "kv_idx < SK - {n}",
        "q_idx < {n}",
    ),
    *(
        "(q_idx >> 4) >= (kv_idx >> 4)",
        "((q_idx ^ kv_idx) & {n}) == 0",
        "(~q_idx | kv_idx) < (kv_idx << 1)",
    ),
)
SCORES = (
    "score",
    "score + {x}",
    "score * {x}",
    "{x} * tanh(score / {c})",
    "{c} * tanh(score / {c})",
    "{y}",
    "score - {x}",
)


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a spec. The schema accepts most of them."""
    varlen = rng.random() < 0.2
    decodes = not varlen and rng.random() < 0.15
    spec: dict[str, Any] = {
        "kernel": "attention",
        "name": "drawn",
        "dtype": rng.choice(("bf16", "fp16", "bf16", "fp32")),
    }
    spec["head_dim"] = rng.choice(HEADS)
    spec["gqa"] = rng.choice((1, 1, 2, 3, "any"))
    if decodes:
        spec["passes"] = rng.choice(
            (["forward", "decode"], ["forward", "backward", "decode"], ["decode"])
        )
        if spec["passes"][1:2] != ["backward"] and rng.random() < 0.4:
            spec["paged_kv"] = {"page_size": rng.choice((16, 64))}
    elif rng.random() < 0.2:
        spec["passes"] = ["forward"]
    if varlen:
        spec["varlen"] = True
    elif "paged_kv" not in spec and rng.random() < 0.25:
        key = {"multiple_of": rng.choice((1, 8, 128))} | (
            {"per_batch": True} if rng.random() < 0.6 else {}
        )
        spec["lengths"] = {
            "q": rng.choice(("any", {"multiple_of": rng.choice((8, 128))})),
            "kv": key,
        }
    if not varlen and not decodes and rng.random() < 0.15:
        spec["sinks"] = True
    if rng.random() < 0.15:
        spec["align"] = rng.choice(("start", "end"))
    if rng.random() < 0.3:
        add_edges(rng, spec)
        if not varlen and not decodes and "mask_mod" in spec and rng.random() < 0.2:
            spec["block_mask"] = rng.choice(("always", "never"))
        return spec
    spec |= _names(rng, varlen)
    words = _words(rng, spec)
    if rng.random() < 0.75:
        spec["score_mod"] = _score(rng, words)
    if rng.random() < 0.75:
        spec["mask_mod"] = _mask(rng, words)
        if not varlen and not decodes and rng.random() < 0.2:
            spec["block_mask"] = rng.choice(("always", "never"))
    return without_unused(spec, ("score_mod", "mask_mod"))


def cases(problem: Any, rng: random.Random) -> list[Case]:
    """Draw three cases."""
    found = []
    for number in range(3):
        sq, sk = rng.choice(LENGTHS), rng.choice(LENGTHS)
        if problem.decodes and rng.random() < 0.7:
            sq = rng.choice((1, 2, 5))
        layout = rng.choice(("contiguous", "contiguous", "bshd", "guarded", "padded"))
        packed: tuple[tuple[int, int], ...] = ()
        if problem.varlen:
            packed = tuple(
                (rng.choice((0, 1, 5, 33, 70)), rng.choice((0, 1, 9, 40, 65, 130)))
                for _ in range(rng.choice((1, 3, 4)))
            )
            sq, sk = (max(1, *(pair[i] for pair in packed), 1) for i in (0, 1))
        case = Case(
            *(
                f"{problem.name}-{number}-{rng.random()}",
                sq,
                sk,
                rng.choice((0, 1, 2, 3, 1, 2, 3)),
                rng.choice((1, 2)),
            ),
            layout=layout,
            dout=rng.choice(("contiguous", "strided")),
            lse=rng.random() < 0.5,
            edge=rng.randrange(3),
            packed=packed,
            hidden=bool(problem.key_conjuncts) and not problem.varlen and rng.random() < 0.3,
        )
        found.append(fit(problem, case, number))
    return found


def _names(rng: random.Random, varlen: bool) -> dict[str, Any]:
    buffers, params = {}, {}
    shapes = [s for s in SHAPES if not (varlen and {"SQ", "SK"} & {*s})]
    for name in rng.sample(
        ("slopes", "table", "doc", "lens", "flag", "kind"), rng.choice((0, 1, 1, 2, 3))
    ):
        dtype = rng.choice([*KINDS])
        buffer: dict[str, Any] = {"shape": [*rng.choice(shapes)], "dtype": dtype}
        if KINDS[dtype] is FLOAT and rng.random() < 0.3:
            buffer["grad"] = True
        if KINDS[dtype] is INT and rng.random() < 0.5:
            buffer["sorted"] = True
        buffers[name] = buffer
    for name in rng.sample(("window", "cap", "gain", "offset"), rng.choice((0, 0, 1, 2))):
        whole = name in ("window", "offset")
        value = rng.choice((1, 7, 40, 128)) if whole else rng.choice((0.5, 2.0, 20.0))
        at_run_time = {"type": "int" if whole else "float", "runtime": True}
        params[name] = at_run_time if rng.random() < 0.3 else value
    return {k: v for k, v in (("buffers", buffers), ("params", params)) if v}


def _words(rng: random.Random, spec: Mapping[str, Any]) -> Words:
    names = dict.fromkeys(("q_idx", "kv_idx", "q_idx", "kv_idx", "h", "b", "SQ", "SK", "HQ"), INT)
    for name in spec.get("params", {}):
        names[name] = INT if name in ("window", "offset") else FLOAT
    buffers = {
        name: (KINDS[b["dtype"]], [AXES.get(size, "") for size in b["shape"]])
        for name, b in spec.get("buffers", {}).items()
    }
    return Words(rng, names, buffers)


def _score(rng: random.Random, words: Words) -> str:
    scored = Words(words.rng, {**words.names, "score": FLOAT}, words.buffers, rounded=("score",))
    form = rng.choice(SCORES)
    return form.format(
        x=words.real(rng.choice((1, 2, 3))), c=rng.choice(("2.0", "20.0", "50.0")), y=scored.real(3)
    )


def _mask(rng: random.Random, words: Words) -> str:
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.6:
            parts.append(
                f"({rng.choice(MASKS).format(n=rng.choice((1, 2, 5, 16, 33, 64, 128, 200)))})"
            )
        else:
            parts.append(words.truth(rng.choice((0, 1, 2))))
    text = parts[0]
    for part in parts[1:]:
        text = f"({text} {rng.choice(('and', 'and', 'or'))} {part})"
    return text


def without_unused(spec: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Remove the buffers and params that no expression names, which kgen refuses."""
    said = " ".join(spec.get(field, "") for field in fields)
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in said).split())
    for section in ("buffers", "params"):
        kept = {name: value for name, value in spec.pop(section, {}).items() if name in words}
        if kept:
            spec[section] = kept
    return spec
