"""The table of docs/transformers.md: with an adapter, models give the results of eager, or the
adapter refuses.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, SPECS, TOKENS, outcomes, spec
from support.interpreters.own_process import interpreted

from kgen.cli import app
from kgen.kernels.attention.adapt.transformers import adapter
from kgen.spec.load import loads_variants
from kgen.verify import interpreter

DOCS = Path(__file__).parents[4] / "docs" / "transformers.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters of all specs."""
    made = tmp_path_factory.mktemp("adapters")
    for name in SPECS:
        for inner, files in adapter(loads_variants(spec(name), "own.yaml")).folders.items():
            (made / inner).mkdir()
            for file, content in files.items():
                (made / inner / file).write_text(content)
    return made


def documented() -> dict[str, dict[str, str]]:
    """Return the cells of the table in the docs, by architecture and spec."""
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
    (block,) = re.findall(
        r"^```text\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert said[:-1] == block.splitlines()


def compared(folder: Path, *architectures: str) -> dict[str, dict[str, str]]:
    """Return the rows of the table that differ from the results."""
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


HARD = {
    "queries after a cache": ("Llama", ("causal", "full"), False),
    "queries after a cache, padded": ("Llama", ("causal", "full"), True),
    "a window and a cache": ("Mistral", ("window",), False),
    "a window and a cache, padded": ("Mistral", ("window",), True),
    "other positions": ("GPT-NeoX", ("causal", "full"), True),
    "learned positions": ("OPT", ("causal", "full"), True),
}
"""Cases: an architecture, the specs that fit it, and True for padding before the second
sequence.
"""


def after_a_cache(folder: Path) -> dict[str, float]:
    """Return the difference from eager if the second call has several queries after cached ones."""
    sys.path.insert(0, str(folder))
    interpreter.mend()
    return {
        f"{case}, {spec}": _after_a_cache(architecture, spec, padded)
        for case, (architecture, specs, padded) in HARD.items()
        for spec in specs
    }


def _after_a_cache(architecture: str, name: str, padded: bool) -> float:
    importlib.import_module(f"table_{name}_transformers")
    model = ARCHITECTURES[architecture].built().eval()
    torch.manual_seed(1)
    ids = torch.randint(3, 32, (2, TOKENS))
    there = torch.ones_like(ids)
    there[1, : 3 * padded] = 0
    found = []
    for implementation in ("eager", f"table_{name}"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(ids[:, :5], attention_mask=there[:, :5], use_cache=True)
            cache = first.past_key_values
            found.append(model(ids[:, 5:], attention_mask=there, past_key_values=cache).logits)
    wanted, got = found
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.thorough
def test_several_queries_after_a_cache_give_eagers_logits(folder: Path) -> None:
    found = interpreted(after_a_cache, folder)
    assert len(found) == sum(len(specs) for _, specs, _ in HARD.values())
    assert {case: error for case, error in found.items() if not error < 3e-5} == {}


REQUESTS = {
    "packed sequences": (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)},
        "packed_sequence_mask",
    ),
    "a mask of pairs": (
        {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS)},
        "got a mask of pairs",
    ),
    "tokens between padding": (
        {"attention_mask": torch.ones(2, TOKENS).index_fill(1, torch.tensor(4), 0)},
        "not between",
    ),
    "all keys": ({"is_causal": False}, "bidirectional_mask_function"),
}
"""Cases: arguments of a Llama, and words of the error with the causal spec."""


def requests(folder: Path) -> dict[str, str]:
    """Return the errors of a Llama with the causal spec."""
    sys.path.insert(0, str(folder))
    interpreter.mend()
    importlib.import_module("table_causal_transformers")
    model = ARCHITECTURES["Llama"].built().eval()
    model.set_attn_implementation("table_causal")
    found = {}
    for case, (arguments, _) in REQUESTS.items():
        with pytest.raises(ValueError, match="table_causal: ") as error:
            model(torch.full((2, TOKENS), 5), use_cache=False, **arguments)
        found[case] = str(error.value)
    return found


def test_requests_that_a_causal_spec_does_not_fit_are_refused(folder: Path) -> None:
    found = interpreted(requests, folder)
    assert {case: said for case, said in found.items() if REQUESTS[case][1] not in said} == {}
