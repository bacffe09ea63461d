"""Samples name existing values of tests."""

from __future__ import annotations

import pytest
from support.running.sampling import EVERY_CHANGE, SAMPLES


def test_what_is_in_a_sample_is_there(request: pytest.FixtureRequest) -> None:
    """Check each test of which all values were collected. The samples stay as recorded."""
    found: dict[str, set[str]] = {}
    for item in request.session.items:
        place, _, value = item.nodeid.removeprefix("tests/").partition("[")
        if item.get_closest_marker("thorough") is None:
            found.setdefault(place, set()).add(value.removesuffix("]"))
    for name in SAMPLES.keys() & found.keys():
        assert found[name] == SAMPLES[name]
    if len(request.session.items) >= 3000:
        assert {name for name in SAMPLES if SAMPLES[name]} <= found.keys()
        assert all(any(name.startswith(place) for name in found) for place in EVERY_CHANGE)
