"""Comparison of the forms of many seeds (see `fuzzing.forms`), and the record of the compared
seeds.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fuzzing.forms import Differs, compare
from kgen.expr.functions import TABLE
from kgen.expr.text_checks import ExpressionError

HERE = Path(__file__).parent
RECORD = HERE / "expressions.json"
AT_ONCE = 200
"""Seeds per call of a worker process."""
THOROUGH = 4
"""One of this number of seeds also compares the slow forms."""


@dataclass(frozen=True)
class Compared:
    """Outcome of a seed: `right`, `refused` (with the error's code), the form that fails, or
    `crash` (an exception of kgen).
    """

    seed: int
    what: str
    message: str = ""

    @property
    def failed(self) -> bool:
        """True if kgen has a bug."""
        return self.what != "right" and not self.what.startswith("refused")


def compared(seed: int) -> Compared:
    try:
        compare(seed, thorough=seed % THOROUGH == 0)
    except ExpressionError as error:
        return Compared(seed, f"refused: {error.code}")
    except Differs as error:
        return Compared(seed, error.form, str(error))
    except Exception:
        return Compared(seed, "crash", traceback.format_exc(limit=-6))
    return Compared(seed, "right")


def generator() -> str:
    """Return a hash of the code that determines the expressions and points of a seed."""
    texts = [(HERE / f"{name}.py").read_bytes() for name in ("expressions", "setting", "words")]
    return hashlib.sha256(b"".join([*texts, " ".join(sorted(TABLE)).encode()])).hexdigest()[:16]


@dataclass
class Record:
    """Outcomes of the seeds from 0 to `tried` of one generator, and the messages of the seeds that
    failed.
    """

    tried: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORD) -> Record:
        """Return the record in the repository.

        It is empty if its generator draws other expressions.
        """
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**found) if found.pop("generator") == generator() else cls()

    def enter(self, those: Sequence[Compared], path: Path = RECORD) -> None:
        """Record seeds that continue the recorded ones.

        Of other seeds, record only the failures.
        """
        if [one.seed for one in those] == [*range(self.tried, self.tried + len(those))]:
            self.tried += len(those)
            self.outcomes = dict(Counter(self.outcomes) + Counter(one.what for one in those))
        for one in those:
            self.failed.pop(str(one.seed), None)
            if one.failed:
                self.failed[str(one.seed)] = one.message[:2000]
        data = {"generator": generator(), **vars(self)}
        path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run(first: int, count: int, jobs: int, tell: Callable[[int], None]) -> Iterator[list[Compared]]:
    """Compare seeds in several processes.

    Yield the results in order. `tell` receives the number of finished seeds.
    """
    parts = [
        range(at, min(at + AT_ONCE, first + count)) for at in range(first, first + count, AT_ONCE)
    ]
    done = 0
    with ProcessPoolExecutor(jobs, initializer=_alone) as pool:
        for found in pool.map(_compared, parts):
            done += len(found)
            tell(done)
            yield found


def _alone() -> None:
    torch.set_num_threads(1)


def _compared(seeds: Sequence[int]) -> list[Compared]:
    return [compared(seed) for seed in seeds]


def told(those: Sequence[Compared]) -> Any:
    """Return the counts by outcome."""
    return ", ".join(
        f"{n} {what}" for what, n in sorted(Counter(one.what for one in those).items())
    )
