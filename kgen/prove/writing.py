"""Proofs of specs before their files are written.

Plans are compared with their specs at points. If z3 is installed, it also decides masks, scores,
and the pairs of positions that kernels compute, once each. The cache of the output folder stores
results, by a hash of all inputs of the proof.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic, RefutedError
from kgen.family import Target, family
from kgen.render import cache
from kgen.render.rendering import blaming
from kgen.spec.too_large import too_large
from kgen.targets import asked_targets

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

SECONDS = 2.0
"""Time limit for one obligation."""
BUDGET = 10.0
"""Seconds of CPU time for all obligations of a spec. A busy machine proves as much as an idle
one.
"""
WITHOUT = "`--no-prove` writes the kernels as they are"


@dataclass(frozen=True)
class Proof:
    """Numbers of proved and unknown obligations of a spec, and the name of the first unknown one
    (`why`).

    `late`: time was up before all obligations were decided.
    """

    proved: int = 0
    unknown: int = 0
    why: str = ""
    late: bool = False


def checkable(loaded: Loaded, targets: Collection[str] | None = None) -> list[Target]:
    """Return the written targets of a spec whose kernels have obligations."""
    known = family(loaded.spec.kernel).targets
    written = [name for name in asked_targets(loaded) if targets is None or name in targets]
    return [known[name] for name in written if known[name].pairs is not None]


def prove_written(
    specs: Iterable[Loaded], targets: Collection[str] | None, generated: Path, *, keep: bool
) -> list[tuple[Loaded, Proof]]:
    """Prove the kernels of specs before they are written. `keep`: store the results next to
    `generated`.

    Raise `RefutedError` with a counterexample for each spec whose kernels are wrong.
    """
    found: list[tuple[Loaded, Proof]] = []
    wrong: list[Diagnostic] = []
    for loaded in specs:
        if not (asked := checkable(loaded, targets)):
            continue
        key = _key(loaded, asked)
        if (kept := _read(key, generated)) is not None:
            found.append((loaded, kept))
            continue
        refuted = list[str]()
        spec = f"spec `{loaded.spec.name}` ({loaded.path.name})"
        with blaming(spec, "proving", WITHOUT), too_large(loaded):
            proof = _proved(loaded, asked, refuted)
        if refuted:
            wrong.append(_diagnostic(loaded, refuted))
            continue
        found.append((loaded, proof))
        if keep:
            cache.keep("proof", key, json.dumps(asdict(proof)), generated)
    if wrong:
        raise RefutedError(wrong)
    return found


def _proved(loaded: Loaded, targets: Sequence[Target], refuted: list[str]) -> Proof:
    begun = time.thread_time()
    for target in targets:
        refuted += target.points(loaded) if target.points is not None else ()
    if refuted or not has_z3():
        return Proof()
    return _by_z3(loaded, targets, refuted, begun + BUDGET)


def has_z3() -> bool:
    """True if z3 is installed."""
    return find_spec("z3") is not None


def _by_z3(loaded: Loaded, targets: Sequence[Target], refuted: list[str], until: float) -> Proof:
    from kgen.prove.obligations import Verdict, decide

    proved, unknown = 0, list[str]()
    obligations = chain.from_iterable(
        target.pairs(loaded) for target in targets if target.pairs is not None
    )
    for obligation in obligations:
        about = f"{obligation.kernel}: {obligation.what}"
        if (left := until - time.thread_time()) <= 0:
            return Proof(proved, len(unknown) + 1, (*unknown, about)[0], late=True)
        found = decide(obligation, min(SECONDS, left))
        if found.verdict is Verdict.REFUTED:
            refuted.append(f"{about}: {found.message}")
            return Proof()
        if found.verdict is Verdict.UNKNOWN:
            unknown.append(about)
        else:
            proved += 1
    return Proof(proved, len(unknown), unknown[0] if unknown else "")


def _diagnostic(loaded: Loaded, refuted: Sequence[str]) -> Diagnostic:
    message = (
        f"kgen's kernels of `{loaded.folder}` are wrong, and nothing is written. Refuted: "
        f"{refuted[0]}"
    )
    hint = f"this is a bug in kgen, please report it with the spec; {WITHOUT}"
    return Diagnostic("refuted", message, file=str(loaded.path), hint=hint)


# --- kept results ------------------------


def _key(loaded: Loaded, targets: Sequence[Target]) -> str:
    """Return the cache key: a hash of the parsed spec, the code of kgen and the version of z3."""
    prover = version("z3-solver") if has_z3() else "points"
    places = [f"{target.pairs} {target.points}" for target in targets]
    called = json.dumps(sorted(loaded.called.items()))
    return cache.digest(
        "\0".join([prover, cache.fingerprint(), loaded.spec.model_dump_json(), called, *places])
    )


def _read(key: str, generated: Path) -> Proof | None:
    text = cache.recalled("proof", key, generated)
    if text is None:
        return None
    try:
        return Proof(**json.loads(text))
    except (ValueError, TypeError):
        return None


def unknowns(proofs: Iterable[tuple[Loaded, Proof]]) -> Iterator[str]:
    """Yield a line for each spec with unknown obligations."""
    for loaded, proof in proofs:
        if proof.unknown:
            counted = f"{proof.unknown} of {proof.proved + proof.unknown} obligations are unknown"
            if proof.late:
                counted = (
                    f"time is up after {BUDGET:g} seconds of CPU time, {proof.proved} "
                    "obligations are proved"
                )
            yield f"not all proved: {loaded.folder}: {counted}, first: {proof.why}"
