"""Ledger of the tried seeds and their outcomes: `seeds.json` (interpreters) and `seeds_cuda.json`
(GPU).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from fuzzing.drawing import drawn
from fuzzing.running import Outcome
from kgen.expr.functions import TABLE

HERE = Path(__file__).parent
PATH = HERE / "seeds.json"
OF_SPECS = ("words", "attention", "edges", "norm", "chunk_output", "linear_attention")
"""Modules that draw specs."""


def place(device: str) -> Path:
    """Return the path of the ledger of a device."""
    return PATH if device == "cpu" else PATH.with_stem(f"{PATH.stem}_{device}")


def generator() -> str:
    """Return a hash of the code that determines the spec of a seed."""
    texts = [(HERE / f"{name}.py").read_bytes() for name in (*OF_SPECS, "drawing")]
    return hashlib.sha256(b"".join([*texts, " ".join(sorted(TABLE)).encode()])).hexdigest()[:16]


def of_family(family: str, first: int, number: int) -> list[int]:
    """Return the next seeds from `first` whose specs belong to a family."""
    found = (seed for seed in count(first) if drawn(seed)["kernel"] == family)
    return list(islice(found, number))


@dataclass(frozen=True)
class OfFamily:
    """The first seeds of a family: their number, the last of them, and counts of outcomes."""

    tried: int = 0
    last: int = -1
    outcomes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Ledger:
    """Seeds from 0 to `tried` of one generator. Another generator draws other specs for the same
    seeds.

    `outcomes` counts the outcomes. `refused` counts error codes. `failed` has the smallest spec of
    each failed seed. `flexed` counts the seeds that were compared with FlexAttention. `before`
    keeps the counts of earlier generators. `families` has the seeds of each `--family`, which
    may be among the others, of this generator only.
    """

    tried: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    flexed: int = 0
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    families: dict[str, OfFamily] = field(default_factory=dict)
    device: str = "cpu"

    @classmethod
    def read(cls, device: str = "cpu") -> Ledger:
        """Return the ledger in the repository. It is empty if its generator draws other specs."""
        path = place(device)
        if not path.exists():
            return cls(device=device)
        found = json.loads(path.read_text(encoding="utf-8"))
        of = found.pop("generator")
        if of == generator():
            families = {n: OfFamily(**own) for n, own in found.pop("families", {}).items()}
            return cls(**found, families=families, device=device)
        return cls(before={**found["before"], of: found["outcomes"]}, device=device)

    def next(self, family: str | None = None) -> int:
        """Return the first seed that was not tried, of all seeds or of those of a family."""
        if family:
            own = self.families.get(family, OfFamily())
            return of_family(family, own.last + 1, 1)[0]
        return self.tried

    def enter(
        self,
        outcomes: Sequence[Outcome],
        failed: Mapping[int, Outcome],
        family: str | None = None,
    ) -> None:
        """Record consecutive seeds, of all or of a family, that continue the recorded ones.

        Of other seeds, record only the failures.
        """
        seeds = [one.seed for one in outcomes]
        if family:
            self._enter_family(family, outcomes)
        elif seeds and seeds == [*range(self.tried, self.tried + len(seeds))]:
            self.tried += len(outcomes)
            self.flexed += sum(one.flexed for one in outcomes)
            self.outcomes = dict(Counter(self.outcomes) + Counter(one.what for one in outcomes))
            codes = Counter(
                one.message.partition(":")[0] for one in outcomes if one.what == "refused"
            )
            self.refused = dict(Counter(self.refused) + codes)
        for one in outcomes:
            self.failed.pop(str(one.seed), None)
        for seed, least in failed.items():
            self.failed[str(seed)] = {
                "what": least.what,
                "message": least.message[:300],
                "spec": least.spec,
            }
        text = json.dumps(self._data(), indent=1, sort_keys=True)
        place(self.device).write_text(text + "\n", encoding="utf-8")

    def _enter_family(self, family: str, outcomes: Sequence[Outcome]) -> None:
        own = self.families.get(family, OfFamily())
        seeds = [one.seed for one in outcomes]
        if seeds and seeds == of_family(family, own.last + 1, len(seeds)):
            counts = Counter(own.outcomes) + Counter(one.what for one in outcomes)
            self.families[family] = OfFamily(own.tried + len(seeds), seeds[-1], dict(counts))

    def _data(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "device"}
        return {"generator": generator(), **fields}
