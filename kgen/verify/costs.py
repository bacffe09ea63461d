"""Expected durations of the cases of a run, for an even progress bar."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

CASE = 0.15
CHECKS: Mapping[str, float] = {
    "compile-fullgraph": 15.0,
    "opcheck": 7.5,
    "cuda-graph": 2.0,
    "far-rows": 2.0,
    "tiles": 1.5,
    "derivatives": 0.7,
    "launches": 0.6,
    "imports-alone": 0.4,
    "imports-twice": 0.4,
}
"""Expected seconds of a case without a measurement (`CASE`), and of slower checks: one core of a
server.
"""

Key = tuple[str, str]
"""The pass and the name of a case."""


class Costs:
    """The seconds of the cases of a run.

    Estimates come from the same case in other files of the run.
    """

    def __init__(self, cases: Iterable[Key]) -> None:
        self._left = Counter(cases)
        self._spent: dict[Key, float] = defaultdict(float)
        self._runs: Counter[Key] = Counter()

    def done(self, case: Key, seconds: float | None) -> None:
        """Record the end of a case. `seconds` is None if the case lost its worker."""
        self._left[case] -= 1
        self._spent[case] += self._expected(case, self._pace()) if seconds is None else seconds
        self._runs[case] += 1

    def progress(self) -> tuple[float, float]:
        """Return the seconds that were spent, and the seconds of the whole run."""
        spent, pace = sum(self._spent.values()), self._pace()
        left = sum(
            count * self._expected(case, pace) for case, count in self._left.items() if count > 0
        )
        return spent, spent + left

    def _expected(self, case: Key, pace: float) -> float:
        runs = self._runs[case]
        return self._spent[case] / runs if runs else _before(case) * pace

    def _pace(self) -> float:
        """Ratio of measured to expected time on this machine."""
        expected = sum(_before(case) * runs for case, runs in self._runs.items())
        return sum(self._spent.values()) / expected if expected else 1.0


def _before(case: Key) -> float:
    """Expected seconds of a case before any measurement."""
    return CHECKS.get(case[1], CASE)
