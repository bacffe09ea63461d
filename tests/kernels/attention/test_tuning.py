"""The search for tile shapes, with a stand-in for the process that compiles and times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen import tuning
from kgen.kernels.attention.bench.shape import Shape
from kgen.kernels.attention.plan import tuned
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tiles import candidates, tile_tables
from kgen.kernels.attention.plan.tuned import Class, Tile
from kgen.kernels.attention.tune.job import TuneJob
from kgen.kernels.attention.tune.tuning import tune_specs
from kgen.render.rendering import render_spec
from kgen.sizes import SHARED_MEMORY
from kgen.spec.load import load
from kgen.tuning import TuneOptions
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages

ROOT = Path(__file__).resolve().parents[3]
BIG, SMALL, OTHER = Tile(128, 128, 8, 3, True), Tile(64, 64, 4, 3, True), Tile(64, 32, 4, 2)
CLASS = Class(90, 16, 128, 128, "triangle", "plain", "forward")


def spec(name: str, folder: Path) -> Any:
    text = f"kernel: attention\nname: {name}\ndtype: bf16\nhead_dim: 128\n"
    (folder / f"{name}.yaml").write_text(text + "mask_mod: q_idx >= kv_idx\npasses: [forward]\n")
    loaded = load(folder / f"{name}.yaml")
    (folder / "generated" / name).mkdir(parents=True, exist_ok=True)
    for file, content in render_spec(loaded).items():
        (folder / "generated" / name / file).write_text(content)
    return loaded


def timer(cost: Callable[[str, Tile], float]) -> Callable[[TuneJob], Iterator[dict[str, Any]]]:
    """Return a stand-in worker: everything compiles, and a tile takes `cost` milliseconds."""

    def tried(job: TuneJob) -> Iterator[dict[str, Any]]:
        for number, (_, tile) in enumerate(job.trials):
            yield {"start": number}
            found = (
                {"shared": 1000}
                if job.capability
                else {"milliseconds": cost(job.problem.name, tile)}
            )
            yield {"trial": number, "error": None, **found}

    return tried


def tune(
    tmp_path: Path, cost: Callable[[str, Tile], float], *names: str, table: Path | None = None
) -> list[dict[str, Any]]:
    loaded = [spec(name, tmp_path) for name in names]
    return tune_specs(loaded, tmp_path / "generated", table=table, tried=timer(cost))


def winners(table: Path) -> dict[Class, Tile]:
    """Return the rows of the table for tiles with any kind of loads."""
    return {
        known_as: tile for known_as, tile in tuned.read(table).items() if known_as.loads == "any"
    }


def test_the_fastest_enters_the_table(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    rows = tune(tmp_path, lambda _, tile: 1.0 if tile == SMALL else 2.0, "one", table=table)
    assert winners(table) == {CLASS: SMALL}
    assert [row["tile"] for row in rows if row["chosen"]] == ["64x64, 4 warps, 3 stages, TMA"]
    assert [row["milliseconds"] for row in rows] == sorted(row["milliseconds"] for row in rows)


def test_specs_of_one_class_decide_together(tmp_path: Path) -> None:
    costs = {"one": {SMALL: 1.0, BIG: 1.1}, "two": {SMALL: 30.0, BIG: 10.0}}
    table = tmp_path / "tiles.json"
    tune(tmp_path, lambda name, tile: costs[name].get(tile, 99.0), "one", "two", table=table)
    assert winners(table) == {CLASS: BIG}


def test_noise_does_not_change_the_table(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    tuned.write({CLASS: BIG}, table)
    tune(tmp_path, lambda _, tile: {SMALL: 1.0, BIG: 1.005}.get(tile, 2.0), "one", table=table)
    assert winners(table) == {CLASS: BIG}
    tune(tmp_path, lambda _, tile: {SMALL: 1.0, BIG: 1.02}.get(tile, 2.0), "one", table=table)
    assert winners(table) == {CLASS: SMALL}


def test_rows_of_other_classes_stay(tmp_path: Path) -> None:
    table, other = tmp_path / "tiles.json", Class(90, 32, 64, 64, "band", "bias", "dq")
    tuned.write({other: OTHER}, table)
    tune(tmp_path, lambda _, tile: 1.0 + (tile != SMALL), "one", table=table)
    assert winners(table) == {other: OTHER, CLASS: SMALL}


def test_the_fastest_by_pointers_enters_too(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    costs = {SMALL: 1.0, OTHER: 1.5}
    tune(tmp_path, lambda _, tile: costs.get(tile, 2.0), "one", table=table)
    assert tuned.read(table) == {CLASS: SMALL, replace(CLASS, loads="pointers"): OTHER}


def test_what_fails_is_dropped_and_the_rest_goes_on(tmp_path: Path) -> None:
    """One tile does not compile, one is too large, one kills the worker, and one hangs."""
    loaded = spec("one", tmp_path)
    tiles = candidates(plan_attention(loaded).problem, "forward", 90)
    broken, large, deadly = tiles[:3]

    def tried(job: TuneJob) -> Iterator[dict[str, Any]]:
        for number, (_, tile) in enumerate(job.trials):
            yield {"start": number}
            if job.capability:
                error = "no" if tile == broken else None
                yield {"trial": number, "error": error, "shared": 10**6 if tile == large else 0}
            else:
                assert tile not in (broken, large)
                if tile == deadly:
                    raise WorkerError("killed by SIGSEGV")
                yield {"trial": number, "error": None, "milliseconds": 1.0}

    rows = tune_specs([loaded], tmp_path / "generated", TuneOptions(write=False), tried=tried)
    assert len(rows) == len(tiles)
    errors = sorted(row["error"] for row in rows if row["error"])
    assert [e.split()[0] for e in errors] == ["killed", "needs", "no"]
    assert sum(row["milliseconds"] == 1.0 for row in rows) == len(tiles) - 3


def test_a_worker_that_dies_at_once_ends_the_search(tmp_path: Path) -> None:
    begun = []

    def tried(job: TuneJob) -> Iterator[dict[str, Any]]:
        begun.append(job)
        raise WorkerError("exit status 1")
        yield {}

    rows = tune_specs(
        [spec("one", tmp_path)], tmp_path / "generated", TuneOptions(write=False), tried=tried
    )
    assert all("exit status 1" in row["error"] for row in rows)
    assert len(begun) == 1


def test_other_families_are_named(tmp_path: Path) -> None:
    other = load(ROOT / "specs" / "retention_output.yaml")
    (row,) = tuning.tune_specs([other], tmp_path, TuneOptions(write=False))
    assert (row["spec"], row["chosen"], row["error"]) == (
        other.spec.name,
        False,
        "has no kernel with a tile table",
    )


def test_table_on_disk(tmp_path: Path) -> None:
    """Rows are sorted, one per line. The bytes do not depend on the order of insertion."""
    other = Class(90, 16, 64, 64, "all", "plain", "dq")
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    tuned.write({CLASS: BIG, other: SMALL}, first)
    tuned.write({other: SMALL, CLASS: BIG}, second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_text().splitlines()) == 4
    assert tuned.read(first) == {CLASS: BIG, other: SMALL}
    second.write_text(json.dumps({"format": 2, "rows": []}))
    tuned.read.cache_clear()
    with pytest.raises(ValueError, match="format 2"):
        tuned.read(second)


def test_the_table_in_the_box_is_as_it_would_be_written(tmp_path: Path) -> None:
    copy = tmp_path / "tiles.json"
    tuned.write(tuned.read(), copy)
    assert copy.read_bytes() == tuned.PATH.read_bytes()


def test_nearest() -> None:
    def of(mask: str, score: str, kernel: str = "forward") -> Class:
        return Class(90, 16, 128, 128, mask, score, kernel)

    table = {of("all", "plain"): BIG, of("triangle", "bias"): SMALL}
    assert tuned.nearest(of("triangle", "bias"), table) == SMALL
    # the score counts more than the mask
    assert tuned.nearest(of("triangle", "plain"), table) == BIG
    assert tuned.nearest(of("band", "bias"), table) == SMALL
    # `reads` is closer to `bias` than to `plain`
    assert tuned.nearest(of("all", "reads"), table) == SMALL
    assert tuned.nearest(of("all", "plain", "dq"), table) is None


def test_nearest_of_packed_sequences() -> None:
    def of(mask: str, score: str, packed: bool) -> Class:
        return Class(90, 16, 128, 128, mask, score, "forward", packed=packed)

    table = {of("band", "bias", packed=True): SMALL, of("triangle", "plain", packed=False): BIG}
    assert (
        tuned.nearest(of("triangle", "plain", packed=True), table) == SMALL
    )  # packing counts more than mask and score
    assert tuned.nearest(of("band", "bias", packed=False), table) == BIG
    del table[of("band", "bias", packed=True)]
    assert tuned.nearest(of("triangle", "plain", packed=True), table) == BIG


def test_candidates_fit() -> None:
    problem = plan_attention(load(ROOT / "specs" / "gemma2.yaml")).problem
    for kernel in ("forward", "dq", "dkdv"):
        found = candidates(problem, kernel, 90)
        assert found
        assert len(set(found)) == len(found)
    assert not any(tile.TMA for tile in candidates(problem, "forward", 80))


def test_timed_tiles_are_for_newer_chips_alone() -> None:
    problem = plan_attention(load(ROOT / "specs" / "causal.yaml")).problem
    tables = tile_tables(problem)
    for table in (tables.forward, tables.dq, tables.dkdv):
        assert not any(tile.TMA for chip, tiles in table.items() for tile in tiles if chip < 90)
        assert not any(tiles[-1].TMA for tiles in table.values())
        assert set(table) <= set(SHARED_MEMORY)


@pytest.mark.parametrize("name", ["varlen_causal", "varlen_alibi"])
def test_packed_sequences_have_tiles_of_their_own(name: str) -> None:
    problem = plan_attention(load(ROOT / "specs" / f"{name}.yaml")).problem
    tables = tile_tables(problem)
    for kernel, table in (("forward", tables.forward), ("dq", tables.dq), ("dkdv", tables.dkdv)):
        timed = problem.timed_as(90, kernel)
        assert timed.packed
        assert timed in tuned.read()
        assert table[90][0] == tuned.read()[timed]
        assert not table[90][-1].TMA
        assert {tile.TMA for tile in candidates(problem, kernel, 90)} == {True, False}


@pytest.mark.parametrize("name", ["varlen_alibi", "block_sparse", "relative_bias"])
def test_the_worker_compiles(name: str) -> None:
    """Compile for packed sequences with offsets, and for block masks and learned buffers with
    additional kernels.
    """
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    trials = tuple(
        (kernel, Tile(64, 32, 4, 2, tma)) for kernel in ("forward", "dkdv") for tma in (True, False)
    )
    path = ROOT / "generated" / name / "triton.py"
    job = TuneJob(problem_of(loaded), path, Shape(1, 2, 256), trials, 90)
    found = [
        line
        for line in messages(
            "kgen.kernels.attention.tune.worker", job, 120.0, {"TRITON_INTERPRET": None}
        )
        if "trial" in line
    ]
    assert [(line["trial"], line["error"]) for line in found] == [
        (i, None) for i in range(len(trials))
    ]
    assert all(line["registers"] and line["shared"] for line in found)
