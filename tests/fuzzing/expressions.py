"""Random masks and scores at the edge cases of the passes, and the buffers and params that they
name.

`fuzzing.words` draws tame expressions of the whole language. The forms here decide which tiles a
kernel visits and masks:
- `abs` compared with 0, 1 and negative numbers
- choices and `!=` between conditions on queries, next to another `or`
- thresholds above every length, infinite and zero factors, divisors of either sign
- reads of sorted buffers, and `h_kv`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fuzzing.words import COMPARISONS, INT, Words
from kgen.expr.nodes import Type

FLOAT, BOOL = Type.FLOAT, Type.BOOL
EDGES = (
    -1,
    0,
    0,
    0,
    1,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    512,
    4096,
    1000000,
)
"""Constants of comparisons: around zero, around tile sizes, and above every length."""
DIVISORS = (2, 3, 4, 7, 8, 16, 64, 128, 256, 1000)
BUFFERS: Mapping[str, Mapping[str, Any]] = {
    "doc": {"shape": ["SK"], "dtype": "int32", "sorted": True},
    "docs": {"shape": ["B", "SK"], "dtype": "int32", "sorted": True},
    "u": {"shape": ["SQ"], "dtype": "int32"},
    "kind": {"shape": ["SK"], "dtype": "int32"},
    "wide": {"shape": ["SK"], "dtype": "int64", "sorted": True},
    "n": {"shape": ["B"], "dtype": "int32"},
    "t": {"shape": ["HKV"], "dtype": "int32"},
    "flag": {"shape": ["B", "SK"], "dtype": "bool"},
    "seen": {"shape": ["SQ"], "dtype": "bool"},
    "slopes": {"shape": ["HQ"], "dtype": "fp32"},
    "gains": {"shape": ["HKV"], "dtype": "fp32"},
    "table": {"shape": ["HQ", 7], "dtype": "fp32"},
    "rows": {"shape": ["SQ"], "dtype": "fp32"},
    "columns": {"shape": ["SK"], "dtype": "fp32"},
}
AT = {
    "doc": ("q_idx", "kv_idx"),
    "docs": ("b, q_idx", "b, kv_idx"),
    "u": ("q_idx", "kv_idx"),
    "kind": ("kv_idx", "q_idx"),
    "wide": ("kv_idx", "q_idx"),
    "n": ("b",),
    "t": ("h_kv",),
    "flag": ("b, kv_idx",),
    "seen": ("q_idx",),
    "slopes": ("h",),
    "gains": ("h_kv",),
    "table": (
        "h, abs(q_idx - kv_idx)",
        "h, min(abs(q_idx - kv_idx), 6)",
        "h, clamp(kv_idx - q_idx, 0, 6)",
        "h, q_idx - kv_idx",
    ),
    "rows": ("q_idx",),
    "columns": ("kv_idx",),
}
"""Indices with which each buffer is read. If lengths differ, some of these reads are out of
bounds.
"""
PARAMS: Mapping[str, tuple[Any, ...]] = {
    "window": (0, 1, 7, 40, 128, 5000),
    "step": (1, 2, 16, 100),
    "back": (-7, -1, 0, 3, 64),
    "cap": (0.5, 2.0, 20.0),
    "gain": (-2.0, -0.5, 0.0, 0.25, 1.0),
}
WHOLE = ("window", "step", "back")
PLAIN = ("abs({x}) {c} {n}", "abs({x}) {c} {n}", "{n} {c} abs({x})", "not abs({x}) {c} {n}")
ABSOLUTE = (
    *("2 * abs({x}) {c} {n}", "-abs({x}) {c} {n}", "abs({x}) {c} {y}", "{n} <= abs({x}) <= {y}"),
    *("abs({x}) - {y} {c} {n}", "abs({x}) // {d} {c} {n}", "abs({x}) % {d} {c} {n}"),
    *("max(abs({x}), {y}) {c} {n}", "max({x}, -({x})) {c} {n}", "min({x}, {y}) {c} {n}"),
    *("max({x}, {n}) {c} {y}", "clamp({x}, {n}, {y}) {c} {n}", "abs(abs({x}) - {n}) {c} 1"),
    *(
        "where({x} >= 0, {x}, -({x})) {c} {n}",
        "abs(({x}) / {d}) {c} {n}",
        "floor(({x}) / {d}) {c} {n}",
    ),
    "abs(float({x})) {c} 0.0",
)
"""Comparisons of an absolute value, and conditions that choose a sign."""

HIDING = (
    *("{s} + where({m}, 0.0, -inf)", "where({m}, 0, -inf) + {s}", "where({m}, {s}, -inf) - {x}"),
    *("min({s}, where({m}, {x}, -inf))", "max(where({m}, {s}, -inf), where({o}, {s}, -inf))"),
    *("where({o}, where({m}, {s}, -inf), {s} + {x})", "where({c}, {x}, where({m}, -inf, {s}))"),
    *("2.0 * where({m}, {s}, -inf)", "where(score > {x}, where({m}, {s}, -inf), -inf)"),
    *("where({c}, where(False, {s}, -inf), {s})", "where({c}, -inf, {s} + where({m}, {x}, -inf))"),
)
"""Scores that are minus infinity at some pairs, which is equivalent to a mask."""


@dataclass(frozen=True)
class Drawn:
    """A mask, a score or both, with the buffers and params that they name.

    `gqa` is a number or `any`.
    """

    mask: str | None
    score: str | None
    gqa: int | str
    buffers: Mapping[str, Mapping[str, Any]]
    params: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of a spec that change the meaning of positions: `align` and `lengths`."""

    def fields(self) -> dict[str, Any]:
        """Return these fields of an attention spec.

        The caller adds a name, a dtype and a head dim.
        """
        texts = {"score_mod": self.score, "mask_mod": self.mask}
        parts = {
            "buffers": {k: dict(v) for k, v in self.buffers.items()},
            "params": dict(self.params),
        }
        return {
            "gqa": self.gqa,
            **self.more,
            **{name: part for name, part in parts.items() if part},
            **{name: text for name, text in texts.items() if text is not None},
        }


def drawn(rng: random.Random) -> Drawn:
    """Draw a mask with probability 2/3, and a score with the same probability."""
    what = rng.randrange(3)
    names = rng.sample([*PARAMS], rng.choice((0, 1, 2)))
    buffers = rng.sample([*BUFFERS], rng.choice((0, 0, 1, 2, 3)))
    draw = _Edges(rng, names, buffers)
    mask = draw.about_zero() if rng.random() < 0.15 else draw.mask(rng.choice((0, 1, 1, 2, 2, 3)))
    mask = None if what == 1 else mask
    score = draw.score(rng.choice((0, 1, 1, 2))) if what != 0 else None
    if score is not None:
        # A separate generator, so that other seeds keep their expressions.
        score = _Edges(random.Random(score), names, buffers).hiding(score)
    said = _words(f"{mask} {score}")
    more: dict[str, Any] = {}
    if rng.random() < 0.2 and not any(BUFFERS[n]["shape"][0] == "SQ" for n in buffers if n in said):
        more["align"] = "end"
    if rng.random() < 0.1:
        more["lengths"] = {"kv": {"per_batch": True}}
    return Drawn(
        mask,
        score,
        rng.choice((1, 1, 1, 2, 3, "any")),
        {name: BUFFERS[name] for name in BUFFERS if name in said},
        {name: _param(rng, name) for name in PARAMS if name in said},
        more,
    )


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def _param(rng: random.Random, name: str) -> Any:
    if rng.random() < 0.3:
        return {"type": "int" if name in WHOLE else "float", "runtime": True}
    return rng.choice(PARAMS[name])


class _Edges:
    """Generator of expressions over some names."""

    def __init__(self, rng: random.Random, params: list[str], buffers: list[str]) -> None:
        self.rng = rng
        self.params = params
        self.buffers = buffers
        names = dict.fromkeys(
            ("q_idx", "kv_idx", "q_idx", "kv_idx", "h", "b", "h_kv", "SQ", "SK"), INT
        )
        names |= {name: INT if name in WHOLE else FLOAT for name in params}
        self.tame = Words(rng, names)

    def mask(self, depth: int) -> str:
        """Draw a condition on pairs."""
        rng = self.rng
        if depth <= 0:
            return self.about_zero() if rng.random() < 0.3 else self.condition()
        forms: list[Callable[[], str]] = [
            lambda: f"({self.mask(depth - 1)} {rng.choice(('and', 'or'))} {self.mask(depth - 1)})",
            lambda: f"({self.mask(depth - 1)} {rng.choice(('and', 'or'))} {self.mask(depth - 1)})",
            lambda: f"(not {self.mask(depth - 1)})",
            lambda: f"where({self.one_sided()}, {self.mask(depth - 1)}, {self.mask(depth - 1)})",
            lambda: f"({self.mask(depth - 1)} if {self.one_sided()} else {self.mask(depth - 1)})",
            lambda: f"({self.one_sided()} {rng.choice(('!=', '=='))} {self.mask(depth - 1)})",
            lambda: (
                f"(({self.one_sided()} != {self.one_sided()}) and ({self.one_sided()} or "
                f"{self.mask(depth - 1)}))"
            ),
            lambda: (
                f"(where({self.one_sided()}, {self.one_sided()}, {self.one_sided()}) and"
                f" ({self.one_sided()} or {self.mask(depth - 1)}))"
            ),
            lambda: self.tame.truth(depth),
        ]
        return rng.choice(forms)()

    def condition(self) -> str:
        """Draw a comparison or a flag."""
        drawn, rng = self.rng.random(), self.rng
        flags = [name for name in self.buffers if BUFFERS[name]["dtype"] == "bool"]
        if drawn < 0.05:
            reals = f"({self.real(1)} {rng.choice(COMPARISONS[:4])} {self.real(0)})"
            return rng.choice(("True", "False", reals, reals))
        if flags and drawn < 0.2:
            return self.read(rng.choice(flags))
        if drawn < 0.35:
            return self.one_sided()
        if drawn < 0.6:
            return self.about_zero()
        if drawn < 0.7:
            return f"({self.edge()} <= {self.integer(1)} < {self.integer(0)})"
        return (
            f"({self.integer(1)} {rng.choice(COMPARISONS)} {self.integer(rng.choice((0, 0, 1)))})"
        )

    def one_sided(self) -> str:
        """Draw a comparison of a query or a key with a number."""
        rng = self.rng
        x = rng.choice(("q_idx", "q_idx", "kv_idx"))
        form = rng.choice(
            (
                "{x} {c} {n}",
                "{x} {c} {n}",
                "{x} {c} {n}",
                "{n} {c} {x}",
                "{x} // {d} {c} {n}",
                "{x} % {d} {c} {m}",
                "{s} - {x} {c} {n}",
            )
        )
        return (
            "("
            + form.format(
                x=x,
                c=rng.choice(COMPARISONS),
                n=self.edge(),
                m=rng.choice((0, 1)),
                d=rng.choice(DIVISORS),
                s=rng.choice(("SQ", "SK")),
            )
            + ")"
        )

    def about_zero(self) -> str:
        """Draw a comparison of an absolute value."""
        rng = self.rng
        form = rng.choice((*PLAIN, *PLAIN, *ABSOLUTE))
        values = {
            "x": self.difference(),
            "y": self.integer(0),
            "n": rng.choice((-1, 0, 0, 0, 1, 1, 2, 5)),
        }
        return "(" + form.format(c=rng.choice(COMPARISONS), d=rng.choice(DIVISORS), **values) + ")"

    def difference(self) -> str:
        """Draw an integer that changes its sign."""
        rng = self.rng
        whole = [
            n for n in self.buffers if BUFFERS[n]["dtype"] in ("int32", "int64") and len(AT[n]) > 1
        ]
        if whole and rng.random() < 0.4:
            name = rng.choice(whole)
            a, b = rng.sample(AT[name], 2)
            return f"{name}[{a}] - {name}[{b}]"
        form = rng.choice(
            (
                *(
                    "q_idx - kv_idx",
                    "q_idx - kv_idx",
                    "kv_idx - q_idx",
                    "q_idx - kv_idx + {n}",
                    "q_idx - {n}",
                ),
                *(
                    "kv_idx - {n}",
                    "q_idx // {d} - kv_idx // {d}",
                    "q_idx % {d} - kv_idx % {d}",
                    "2 * q_idx - kv_idx",
                ),
                *(
                    "(kv_idx - q_idx) // {d}",
                    "q_idx + kv_idx - {n}",
                    "q_idx + SK - SQ - kv_idx",
                    "{y} - {z}",
                ),
            )
        )
        d, n = rng.choice(DIVISORS), self.edge()
        return form.format(n=n, d=d, y=self.integer(0), z=self.integer(0))

    def integer(self, depth: int) -> str:
        """Draw an integer expression whose values are far from the limits of 32 bits."""
        rng = self.rng
        if depth <= 0:
            leaves: list[Callable[[], str]] = [
                lambda: rng.choice(("q_idx", "kv_idx")),
                lambda: rng.choice(("q_idx", "kv_idx")),
                self.edge,
                lambda: rng.choice(("h", "b", "h_kv", "SQ", "SK", "SQ - 1", "SK - SQ")),
            ]
            whole = [n for n in self.buffers if BUFFERS[n]["dtype"] in ("int32", "int64")]
            leaves += [lambda: self.read(rng.choice(whole))] * (2 * bool(whole))
            return rng.choice(leaves)()
        if rng.random() < 0.4:
            return f"({self.difference()})"
        if rng.random() < 0.15:
            return self.tame.integer(depth)
        d = rng.choice((*DIVISORS, *DIVISORS, -1, -3, -16))
        form = rng.choice(
            (
                *(
                    "({a} + {b})",
                    "({a} - {b})",
                    "{d} * {a}",
                    "({a} // {d})",
                    "({a} % {d})",
                    "({a} - {a} % {d})",
                ),
                *(
                    "abs({a})",
                    "min({a}, {b})",
                    "max({a}, {b})",
                    "clamp({a}, {n}, {b})",
                    "where({c}, {a}, {b})",
                    "int({a} / {d})",
                ),
                *(
                    "({a} >> 3)",
                    "({a} << 2)",
                    "({a} & 63)",
                    "({a} & -16)",
                    "({a} // {d} // 8)",
                    "({a} // {d} * {d})",
                ),
            )
        )
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        return form.format(a=a, b=b, d=d, n=self.edge(), c=self.one_sided())

    def edge(self) -> str:
        """Draw a number to compare with."""
        whole = [name for name in self.params if name in WHOLE]
        if whole and self.rng.random() < 0.3:
            return self.rng.choice(whole)
        return str(self.rng.choice(EDGES))

    def read(self, name: str) -> str:
        """Draw a read of a buffer, mostly at its regular index."""
        places = AT[name]
        place = places[0] if self.rng.random() < 0.4 else self.rng.choice(places)
        if self.rng.random() < 0.1 and "," not in place:
            place = f"{place} {self.rng.choice(('- 3', '+ 1', '// 2'))}"
        return f"{name}[{place}]"

    def score(self, depth: int) -> str:
        """Draw a modified score."""
        rng = self.rng
        form = rng.choice(
            (
                *(
                    "score",
                    "score + {x}",
                    "score - {x}",
                    "{x} + score",
                    "score * {y}",
                    "score * {y} + {x}",
                    "score / {d}",
                ),
                *(
                    "cap * tanh(score / cap)",
                    "{x} - {y} * ({z} - score)",
                    "where({m}, score, -inf)",
                    "where({m}, score + {x}, -inf)",
                ),
                *(
                    "where({m}, -inf, score)",
                    "where({m}, score, {x})",
                    "{n} * score",
                    "-(-score - {x})",
                    "max(score, {x})",
                ),
                *(
                    "score + {x} - {x}",
                    "2.0 * (score + {x})",
                    "20.0 * tanh((score + {x}) / 20.0)",
                    "score * score + {x}",
                    "where({m}, where({o}, score, -inf), -inf)",
                ),
            )
        )
        if "cap" in form and "cap" not in self.params:
            form = form.replace("cap", "8.0")
        return form.format(
            x=self.real(depth + 1),
            y=self.real(depth),
            z=self.real(0),
            d=rng.choice(("2.0", "h + 1", "SK", "-4")),
            n=rng.choice((-1, 0, 1, 2)),
            m=self.mask(min(depth, 1)),
            o=self.mask(0),
        )

    def hiding(self, score: str) -> str:
        """Return the score, or sometimes a score that is minus infinity where a condition holds."""
        if self.rng.random() >= 0.12:
            return score
        masks = {"m": self.mask(1), "o": self.mask(0), "c": self.one_sided()}
        return self.rng.choice(HIDING).format(s=f"({score})", x=self.real(0), **masks)

    def real(self, depth: int) -> str:
        """Draw a real number, which may be infinite or zero."""
        rng = self.rng
        names = [name for name in self.params if name not in WHOLE]
        reads = [name for name in self.buffers if BUFFERS[name]["dtype"] == "fp32"]
        if depth <= 0:
            leaves: list[Callable[[], str]] = [
                lambda: rng.choice(("0.0", "0.5", "-0.25", "1.0", "2.0", "0.1"))
            ]
            leaves += [lambda: rng.choice(names)] * bool(names)
            leaves += [lambda: self.read(rng.choice(reads))] * (2 * bool(reads))
            leaves.append(lambda: f"float({rng.choice(('h', 'q_idx', 'kv_idx', 'SK', 'h_kv'))})")
            return rng.choice(leaves)()
        if rng.random() < 0.15:
            return self.tame.real(depth)
        form = rng.choice(
            (
                *(
                    "{a} * {i}",
                    "{a} * {i}",
                    "({a} + {b})",
                    "({a} - {b})",
                    "{a} * {b}",
                    "{a} * {i} - {a} * {j}",
                    "-({a})",
                ),
                *(
                    "{a} * abs{i}",
                    "{a} * abs{i}",
                    "{a} * abs({a})",
                    "where({m}, {a}, {b})",
                    "{a} / {d}",
                    "{i} / {d}",
                ),
                *(
                    "{a} / {i}",
                    "log(float({k}))",
                    "1 / ({k})",
                    "exp2(-{a})",
                    "{a} * min({i}, {j})",
                    "sqrt(abs({a}))",
                ),
                *(
                    "floor({i} / 4.0)",
                    "tanh({a} * {i})",
                    "{a} * log(float({k}))",
                    "max({a}, {b})",
                    "min({a}, 0.0)",
                ),
                "{a} * {i} ** 2",
            )
        )
        counts = ["q_idx", "kv_idx", "SK", "q_idx - kv_idx", "h + 1"] + ["n[b]"] * (
            "n" in self.buffers
        )
        return form.format(
            a=self.real(depth - 1),
            b=self.real(depth - 1),
            i=f"({self.difference() if rng.random() < 0.7 else self.integer(1)})",
            j=self.integer(0),
            k=rng.choice(counts),
            m=self.condition(),
            d=rng.choice(("2", "-3", "64.0", "h + 1", "SK", "HQ")),
        )
