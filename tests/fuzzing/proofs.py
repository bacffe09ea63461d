"""Random specs that are planned and proved. No kernel runs.

Masks and scores of attention come from both generators of expressions, with random passes, lengths,
heads and block masks. Each of these kernels is proved for one random tile shape: many specs find
more than all shapes of one spec. Kernels of linear attention are proved for all their shapes.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from fuzzing import expressions, linear_attention
from fuzzing.attention import draw, without_unused
from fuzzing.running import LIMIT, Slow, where, within, written
from kgen.diagnostics import KgenError
from kgen.expr.functions import TABLE
from kgen.kernels.attention.prove.claims import INT32
from kgen.kernels.attention.prove.obligations import obligations
from kgen.kernels.attention.prove.setting import Blocks, Extent
from kgen.kernels.linear_attention.prove import obligations as of_linear_attention
from kgen.prove.obligations import Obligation, Verdict, decide
from kgen.spec.load import Loaded, loads

HERE = Path(__file__).parent
RECORD = HERE / "proofs.json"
Family = Literal["attention", "linear_attention"]
MODULES: Mapping[Family, tuple[str, ...]] = {
    "attention": ("proofs", "expressions", "attention", "words"),
    "linear_attention": ("proofs", "linear_attention", "attention", "words"),
}
"""Modules that draw the specs of a family."""
TIMEOUT = 2.0
"""Time limit per obligation, in seconds."""

What = Literal["proved", "unknown", "refuted", "refused", "crash", "slow"]


@dataclass(frozen=True)
class Proof:
    """Outcome of a seed.

    `verdicts` counts obligations. `found` names the ones that are not proved, with the reason.
    """

    seed: int
    what: What
    spec: str
    seconds: float
    verdicts: Mapping[str, int] = field(default_factory=dict)
    found: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if kgen has a bug."""
        return self.what in ("refuted", "crash", "slow")

    def row(self) -> dict[str, Any]:
        """Return the outcome as a row of a report."""
        return asdict(self)


def drawn(seed: int, family: Family = "attention") -> dict[str, Any]:
    """Return the spec of a seed: random fields, for attention mostly with edge-case expressions."""
    rng = random.Random(f"{seed} proved")
    if family == "linear_attention":
        return linear_attention.draw(rng)
    spec = draw(rng)
    if rng.random() < 0.25:
        return _with_rows(spec, rng)
    edges = expressions.drawn(rng)
    while spec.get("varlen") and _of_lengths(edges):
        edges = expressions.drawn(rng)
    for name in ("score_mod", "mask_mod", "buffers", "params", "block_mask"):
        spec.pop(name, None)
    fields = edges.fields()
    if spec.get("varlen") or "paged_kv" in spec:
        fields.pop("lengths", None)
    spec |= fields
    if edges.mask is not None and not spec.get("varlen") and "decode" not in spec.get("passes", ()):
        spec |= rng.choice(({}, {}, {"block_mask": "always"}, {"block_mask": "never"}))
    return _with_rows(without_unused(spec, ("score_mod", "mask_mod")), rng)


def _with_rows(spec: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Keep reads by row in bounds. With queries aligned to the end, `q_idx` is a position among the
    keys.

    The buffer gets as many elements as there are keys, or it is read at the row.
    """
    newest = "decode" in spec.get("passes", ()) or "paged_kv" in spec
    if spec.get("align", "end" if newest else "start") != "end":
        return spec
    for name, buffer in spec.get("buffers", {}).items():
        if buffer["shape"] == ["SQ"] and rng.random() < 0.5:
            for field in {"score_mod", "mask_mod"} & {*spec}:
                spec[field] = spec[field].replace(f"{name}[q_idx]", f"{name}[q_idx - (SK - SQ)]")
        else:
            buffer["shape"] = ["SK" if size == "SQ" else size for size in buffer["shape"]]
    return spec


def _of_lengths(edges: expressions.Drawn) -> bool:
    """True if a buffer is as long as a sequence. Packed sequences have no such buffers."""
    return any({"SQ", "SK"} & {*map(str, buffer["shape"])} for buffer in edges.buffers.values())


def tried(seed: int, spec: Mapping[str, Any] | None = None, family: Family = "attention") -> Proof:
    """Prove a spec, by default the spec of the seed. The seed also chooses the tile shapes."""
    spec = drawn(seed, family) if spec is None else spec
    text, began = written(spec), time.perf_counter()
    found: list[str] = []
    verdicts: Counter[str] = Counter()

    def outcome(what: What, *more: str) -> Proof:
        seconds = round(time.perf_counter() - began, 2)
        return Proof(seed, what, text, seconds, dict(verdicts), (*found, *(m[:2000] for m in more)))

    try:
        with within(LIMIT):
            _prove(loads(text, "drawn.yaml"), random.Random(f"{seed} shapes"), verdicts, found)
    except KgenError as error:
        first = error.diagnostics[0]
        return outcome("refused", f"{first.code}: {first.message}")
    except Slow as error:
        return outcome("slow", f"more than {LIMIT} seconds: {where(error.__traceback__)}")
    except Exception as error:
        return outcome(
            "crash", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        )
    for verdict in (Verdict.REFUTED, Verdict.UNKNOWN):
        if verdicts[verdict.value]:
            return outcome(verdict.value)
    return outcome("proved")


def _prove(loaded: Loaded, rng: random.Random, verdicts: Counter[str], found: list[str]) -> None:
    for obligation in _obligations(loaded, rng):
        decision = decide(obligation, TIMEOUT)
        verdicts[decision.verdict.value] += 1
        if decision.verdict is not Verdict.PROVED:
            place = f"{decision.verdict.value}: {obligation.kernel}: {obligation.what}"
            found.append(f"{place}: {decision.message}"[:2000])


def _obligations(loaded: Loaded, rng: random.Random) -> Iterator[Obligation]:
    if loaded.spec.kernel == "linear_attention":
        yield from of_linear_attention.obligations(loaded)
        return
    for obligation in obligations(loaded, Extent(_one_of(rng))):
        if obligation.what != INT32:  # masks that overflow 32 bits as written are out of contract
            yield obligation


def _one_of(rng: random.Random) -> Callable[[list[Blocks]], list[Blocks]]:
    return lambda shapes: [rng.choice(shapes)]


# --- many ------------------------


def run(
    seeds: Sequence[int],
    jobs: int,
    kept: Path | None,
    heard: Callable[[int], None],
    family: Family = "attention",
) -> list[Proof]:
    """Return the outcomes of some seeds in their order.

    `kept` stores one line per seed. Seeds in it are skipped.
    """
    done = {proof.seed: proof for proof in read(kept)}
    left = [seed for seed in seeds if seed not in done]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, proof in enumerate(pool.map(partial(tried, family=family), left), 1):
            done[proof.seed] = proof
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(proof.row()) + "\n")
            heard(number + len(seeds) - len(left))
    return [done[seed] for seed in seeds]


def read(kept: Path | None) -> list[Proof]:
    """Return the outcomes in a file."""
    if kept is None or not kept.exists():
        return []
    rows = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
    return [Proof(**{**row, "found": tuple(row["found"])}) for row in rows]


def record_of(family: Family) -> Path:
    """Return the path of the record of a family."""
    return RECORD if family == "attention" else RECORD.with_stem(f"{RECORD.stem}_{family}")


def generator(family: Family = "attention") -> str:
    """Return a hash of the code that determines the spec of a seed."""
    texts = [(HERE / f"{name}.py").read_bytes() for name in MODULES[family]]
    return hashlib.sha256(b"".join([*texts, " ".join(sorted(TABLE)).encode()])).hexdigest()[:16]


def enter(proofs: Sequence[Proof], path: Path = RECORD, family: Family = "attention") -> None:
    """Record consecutive seeds from 0: counts, failures, and the seeds with unknown obligations.

    Ignore other seeds.
    """
    if not proofs or [proof.seed for proof in proofs] != [*range(len(proofs))]:
        return
    obligations = sum((Counter(proof.verdicts) for proof in proofs), Counter[str]())
    data = {
        "generator": generator(family),
        "tried": len(proofs),
        "specs": Counter(proof.what for proof in proofs),
        "obligations": obligations,
        "unknown": [proof.seed for proof in proofs if proof.what == "unknown"],
        "failed": {str(proof.seed): [proof.spec, *proof.found] for proof in proofs if proof.failed},
    }
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def told(proofs: Iterable[Proof]) -> str:
    """Return the counts of specs and of obligations as text."""
    specs, obligations = Counter[str](), Counter[str]()
    for proof in proofs:
        specs[proof.what] += 1
        obligations.update(proof.verdicts)
    counted = (
        ", ".join(f"{n} {what}" for what, n in sorted(of.items())) for of in (specs, obligations)
    )
    return "specs: {}; obligations: {}".format(*counted)
