"""`scripts/repeat` repeats each case, and reports results that differ between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from on_gpu import repeating
from support.interpreters.own_process import interpreted

from kgen.diagnostics import KgenError

SPEC = Path(__file__).parents[1] / "specs" / "rms_norm.yaml"


def test_cases_are_the_first_one_between_and_the_last() -> None:
    assert repeating.some("abcdefg") == ["a", "d", "g"]
    assert repeating.some("ab") == ["a", "b"]
    assert repeating.some("a") == ["a"]


def test_each_case_runs_so_often_and_what_changes_is_found() -> None:
    assert interpreted(_repeated, 3, 0) == ()
    wrong = interpreted(_repeated, 3, 3)
    assert wrong
    assert all("differ from run to run" in message for message in wrong)
    # Three runs cannot show an error in the fourth.
    assert interpreted(_repeated, 3, 4) == ()


def test_cases_that_are_named_run_alone() -> None:
    found = interpreted(_named, ["plain", "odd"])
    assert (found.spec, found.cases, found.wrong) == ("rms_norm", 4, ())


def test_a_case_that_no_spec_has_is_an_error() -> None:
    repeating.require_known(["plain"], [SPEC])
    with pytest.raises(KgenError, match="no case `plane`") as raised:
        repeating.require_known(["plain", "plane"], [SPEC])
    assert "plain" in str(raised.value.diagnostics[0].hint)


def _named(cases: list[str]) -> repeating.Repeated:
    return repeating.repeated(SPEC, 1, "cpu", cases)


def _repeated(runs: int, off: int) -> tuple[str, ...]:
    """Return the failures if run number `off` returns other bits.

    There is no GPU: the patches make the interpreter count as one.
    """
    from kgen.verify import compare

    careful = compare.careful

    def counting(run: Any, inputs: Any, device: str, *more: Any) -> Any:
        count = 0

        def counted() -> Any:
            nonlocal count
            count += 1
            return {name: x + (count == off) for name, x in run().items()}

        found = careful(counted, inputs, "cuda", *more)
        assert count == runs
        return found

    from kgen.kernels.norm.verify import cases

    with (
        mock.patch.object(cases.compare, "careful", counting),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(cases, "case_names", return_value=("plain",)),
    ):
        return repeating.repeated(SPEC, runs, "cpu").wrong
