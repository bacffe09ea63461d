"""The table of docs/transformers.md: through an adapter, models give eager's results, or the adapter refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from apart import interpreted
from architectures import ARCHITECTURES, SPECS, outcomes, spec

from kgen.cli import app
from kgen.kernels.attention.adapt.transformers import adapter
from kgen.spec.load import loads_variants

DOCS = Path(__file__).parents[4] / "docs" / "transformers.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters of all specs."""
    made = tmp_path_factory.mktemp("adapters")
    for name in SPECS:
        for inner, files in adapter(loads_variants(spec(name), "own.yaml")).folders.items():
            (made / inner).mkdir()
            for file, content in files.items():
                (made / inner / file).write_text(content)
    return made


def documented() -> dict[str, dict[str, str]]:
    """The cells of the table in the documentation, by architecture and spec."""
    rows = re.findall(r"^\| (.*) \|.*\|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    table = [row.split(" | ") for row in rows if row.split(" | ")[0] in ARCHITECTURES]
    return {name: dict(zip(SPECS, cells, strict=True)) for name, *cells in table}


def test_the_documentation_has_every_architecture() -> None:
    assert [*documented()] == [*ARCHITECTURES]
    assert len(ARCHITECTURES) >= 25


def test_the_command_prints_the_layers_that_a_spec_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app(["adapt", "full", "--for", "transformers", "-o", str(tmp_path)], prog_name="kgen")
    said = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) not in line]
    (block,) = re.findall(r"^```text\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert said[:-1] == block.splitlines()


def compared(folder: Path, *architectures: str) -> dict[str, dict[str, str]]:
    """What the documentation says, where the results are something else."""
    found = {}
    for name in architectures:
        cells = {s: said.partition(":")[0] for s, said in outcomes(folder, name).items()}
        if cells != documented()[name]:
            found[name] = cells
    return found


SAMPLE = ("Llama", "Mistral", "BERT", "ViT", "T5", "Bloom")


def test_results_are_eagers_or_refused(folder: Path) -> None:
    assert interpreted(compared, folder, *SAMPLE) == {}


@pytest.mark.thorough
def test_all_results_are_eagers_or_refused(folder: Path) -> None:
    assert interpreted(compared, folder, *ARCHITECTURES) == {}
