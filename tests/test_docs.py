"""README and docs agree with the code: tables and excerpts are generated, links resolve, and lists
are complete.

KGEN_UPDATE_GOLDEN=1 writes the generated parts anew, between `<!-- name -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML
from support.docs import evidence, pictures, speed_tables, walkthrough

from kgen.bench.best import is_peer
from kgen.cli import app
from kgen.cli.terminal import EXIT_INTERRUPTED
from kgen.diagnostics import EXIT_BUG, EXIT_MISSING, EXIT_USAGE, EXIT_WRONG
from kgen.expr import printed_size, text_checks
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Type
from kgen.expr.type_rules import TypeRuleError
from kgen.family import NAMES, family
from kgen.kernels.attention.bench.shape import PEERS
from kgen.kernels.attention.spec import SIZES, AttentionSpec, Buffer
from kgen.spec.common import ELEMENTS, ParamSpec

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE = ROOT / "docs/specs.md"
COMMANDS = ROOT / "docs/commands.md"
WALKTHROUGH = ROOT / "docs/walkthrough.md"
HOPPER = ROOT / "docs/hopper.md"
LOG = ROOT / "docs/log"
DECISIONS = ROOT / "docs/decisions"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
STOCK = sorted((ROOT / "specs").glob("*.yaml"))

PART = re.compile(
    r"<!-- "
    r"(spec|loop|stage|specs|functions|summary|speed|lengths|forms|others|decoding|norms|neutral|proofs|evidence)"
    r"(?:: (\S+))? -->\n"
    r"(.*?)<!-- end -->\n",
    re.DOTALL,
)


# --- parts that are made from something else ------------------------


def spec_text(path: str) -> str:
    return f"```yaml\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def forward_loop(path: str) -> str:
    """Return the loop over KV tiles of an emitted file, as printed there."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    start = lines.index("def _forward_tiles(")
    first = next(i for i in range(start, len(lines)) if lines[i].startswith("    for "))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("    return "))
    body = "\n".join(line[4:] for line in lines[first:last])
    return f"```python\n{body}\n```\n"


def spec_table() -> str:
    rows = ["| spec | kernel |", "|---|---|"]
    for path in STOCK:
        summary = YAML(typ="safe").load(path)["summary"]
        rows.append(f"| [`{path.stem}`](../specs/{path.name}) | {summary} |")
    return "\n".join(rows) + "\n"


def function_table() -> str:
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name in TABLE:
        syntax, takes, gives, derivative = function_row(name)
        grouped.setdefault((takes, gives, derivative), []).append(syntax)
    rows = ["| syntax | operands | result | derivative |", "|---|---|---|---|"]
    for cells, members in grouped.items():
        rows.append(
            "| " + " | ".join(c.replace("|", "\\|") for c in (", ".join(members), *cells)) + " |"
        )
    return "\n".join(rows) + "\n"


def function_row(name: str) -> tuple[str, str, str, str]:
    """Return the cells of a function. Functions that differ only in the first cell share a row."""
    row = TABLE[name]
    takes, gives = signature(name)
    written = row.spelled["python"].form.format("x", "y", "z")
    if row.arity[1] is None:
        written = written.replace(")", ", ...)")
    syntax = f"`{written}`" + (" (approximate with `fast_math`)" if row.fast else "")
    return syntax, takes, gives, "0" if row.derivative is None else "yes"


def signature(name: str) -> tuple[str, str]:
    """Return the types of the operands and of the result of a function, from its type rule."""
    row = TABLE[name]
    head = (Type.BOOL,) if name == "where" else ()
    found = {}
    for type_ in (Type.INT, Type.FLOAT, Type.BOOL):
        try:
            found[type_] = row.typed((*head, *[type_] * (row.arity[0] - len(head))))
        except TypeRuleError:
            continue
    words = {Type.INT: "integers", Type.FLOAT: "reals", Type.BOOL: "bools"}
    takes = " or ".join(words[type_] for type_ in found)
    if set(found) == {Type.INT, Type.FLOAT}:
        takes = "numbers"
    elif len(found) == 3:
        takes = "numbers or bools"
    if head:
        takes = f"a bool, then {takes}"
    results = set(found.values())
    gives = (
        "as operands"
        if len(results) > 1
        else {Type.INT: "integer", Type.FLOAT: "real", Type.BOOL: "bool"}[results.pop()]
    )
    return takes, gives


def proof_table() -> str:
    """Return the proofs in the ledger: a row for each file with unknown obligations, and one for
    all others.
    """
    rows = [
        "| file | kernels and tile shapes | proved | unknown | no encoding for |",
        "|---|---|---|---|---|",
    ]
    files = json.loads((ROOT / "generated/verified.json").read_text(encoding="utf-8"))[
        "files"
    ].values()
    found = {
        entry["file"]: entry["records"]["proof"] for entry in files if "proof" in entry["records"]
    }
    whole = [proof for proof in found.values() if not proof["unknown"]]
    kernels, proved = (
        sum(count) for count in zip(*((len(p["kernels"]), p["proved"]) for p in whole), strict=True)
    )
    for file, proof in sorted(found.items()):
        if proof["unknown"]:
            beyond = "; ".join(proof["beyond"]).replace("beyond the encoding: ", "")
            cells = (len(proof["kernels"]), proof["proved"], proof["unknown"], beyond)
            rows.append(f"| `{file}` | {' | '.join(map(str, cells))} |")
    rows.append(f"| {len(whole)} other files | {kernels} | {proved} | 0 | |")
    return "\n".join(rows) + "\n"


MAKERS = {
    "spec": spec_text,
    "loop": forward_loop,
    "stage": walkthrough.stage,
    "specs": lambda _: spec_table(),
    "functions": lambda _: function_table(),
    "speed": lambda _: speed_tables.attention(),
    "lengths": lambda _: speed_tables.lengths(),
    "summary": lambda _: speed_tables.summary(),
    "forms": lambda _: speed_tables.forms(),
    "others": lambda _: speed_tables.others(),
    "decoding": lambda _: speed_tables.decoding(),
    "norms": speed_tables.norms,
    "neutral": lambda _: speed_tables.neutral(),
    "proofs": lambda _: proof_table(),
    "evidence": lambda _: evidence.table(),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    def made(part: re.Match[str]) -> str:
        name, argument, _ = part.groups()
        mark = name + (f": {argument}" if argument else "")
        return f"<!-- {mark} -->\n{MAKERS[name](argument)}<!-- end -->\n"

    wanted = PART.sub(made, text)
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1" and wanted != text:
        page.write_text(wanted, encoding="utf-8")
        text = wanted
    assert text == wanted


def test_parts_are_there() -> None:
    parts = {part[1] for page in PAGES for part in PART.finditer(page.read_text(encoding="utf-8"))}
    assert parts == set(MAKERS)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_current(name: str) -> None:
    path, wanted = pictures.FOLDER / name, pictures.PICTURES[name]()
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        path.write_text(wanted, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == wanted


def _measured(spec: str, pass_: str, peer: str, ms: float, **more: object) -> dict[str, object]:
    row = {"spec": spec, "pass": pass_, "peer": peer, "milliseconds": ms, "ratio": ms / 2.0}
    return {**row, "tflops": 800.0 / ms, "tbps": None, "error": None, **more}


def test_neutral_shapes_are_a_table_of_the_best_peers(tmp_path: Path) -> None:
    assert "no report" in speed_tables.neutral(folder=tmp_path)
    at, missing = {"shape": "4x16x4x2048"}, {"milliseconds": None, "error": "not installed: x"}
    rows = [
        _measured("a", "forward", "kgen", 2.0, **at),
        _measured("a", "forward", "flex", 4.0, **at),
        _measured("a", "forward", "fa4", 3.0, **at),
        _measured("a", "forward", "fa3", 1.0, **{**at, **missing}),
        _measured("a", "backward", "kgen", 2.0, **at),
        _measured("b", "forward", "kgen", 2.0, shape="8x64", tflops=None, tbps=3.5),
        _measured("b", "forward", "copy", 1.0, shape="8x64"),
    ]
    path = tmp_path / speed_tables.NEUTRAL[0]
    facts = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    path.write_text(json.dumps({"reports": [{"facts": facts, "rows": rows}]}), encoding="utf-8")
    assert speed_tables.neutral(folder=tmp_path).splitlines() == [
        "| | |",
        "|---|---|",
        "| GPU | NVIDIA H200 |",
        "| versions | torch 2.11.0, triton 3.6.0 |",
        "| peers | `flex`, `fa4` |",
        "",
        "| spec | size | forward | best peer | backward | best peer |",
        "|---|---|---|---|---|---|",
        "| `a` | 4x16x4x2048 | 400 TFLOP/s | 1.50x fa4 | 400 TFLOP/s |  |",
        "| `b` | 8x64 | 3.50 TB/s |  |  |  |",
    ]


def test_a_row_of_the_chart_has_the_best_peer_of_all_races(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of its bars are from the race of that peer."""
    races = {"one": ("flex", 2.0, 6.0), "two": ("fa4", 2.5, 5.0), "three": ("sdpa", 2.0, 8.0)}
    for name, (peer, own, other) in races.items():
        rows = [
            _measured("a", "forward", "kgen", own),
            _measured("a", "forward", "kgen-triton", 0.5),
            _measured("a", "forward", peer, other, ratio=other / own),
        ]
        text = json.dumps({"reports": [{"spec": "a", "rows": rows}]})
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(speed_tables, "FIGURES", tmp_path)
    pair = speed_tables.best_of_races("a", "forward", [f"{name}.json" for name in races])
    assert pair is not None
    assert (pair.own["milliseconds"], pair.peer["peer"]) == (2.5, "fa4")
    assert speed_tables.best_of_races("a", "backward", ["one.json"]) is None
    assert set(pictures.PEERS) == {
        name for name in PEERS if name not in ("flex-autotune", "eager") and is_peer(name)
    }


# --- claims ------------------------


def test_the_first_page_has_the_figures_of_the_summary() -> None:
    """They are from reports in the repository."""
    rows = [line.split(" | ") for line in speed_tables.summary().splitlines()[2:]]
    cells = {(row[0].strip("| "), row[1]): row[2:] for row in rows}
    forward, worst, backward, *_ = cells["attention, S 8192", "FlexAttention"]
    found = re.findall(r"\*\*([\d.]+)x\*\* \((\d+)\)", f"{forward} {backward} {worst}")
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (ahead, specs), (back, learned) = found
    said = f"forward is {ahead} times as fast as FlexAttention (geometric mean of {specs} specs)"
    assert said in text
    assert f"Backward is {back} times as fast ({learned} specs)" in text
    decoding = re.findall(r"[\d.]+", cells["decoding", "PyTorch SDPA"][0])[0]
    assert f"In decoding, SDPA is {round(100 * (1 - float(decoding)))} % faster than kgen" in text


def test_the_readme_is_short() -> None:
    """The README has two screens of text and one table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 95
    assert len(re.findall(r"^\|", text, re.MULTILINE)) <= 2 + 6


def test_commands_that_are_shown_are_there() -> None:
    """Commands in shell blocks use verbs and options that exist."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = 0
    for page in PAGES:
        for block in re.findall(
            r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            for verb, rest in re.findall(r"^(?:\S*/)?kgen (\w+)([^#\n]*)", block, re.MULTILINE):
                # In a group of verbs, check the options of the verb after it.
                own = getattr(verbs[verb], "commands", {})
                command = own.get((rest.split() or [""])[0], verbs[verb])
                there = {"--help"} | {
                    o for p in command.params for o in (*p.opts, *p.secondary_opts)
                }
                assert {word for word in rest.split() if word.startswith("-")} <= there, (
                    page.name,
                    verb,
                    rest,
                )
                shown += 1
    assert shown > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            to = page.parent / path if path else page
            assert to.exists(), target
            assert not anchor or anchor in anchors(to), target


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    folders = r"(?:kgen|templates|tests|docs|specs|scripts|\.ci)"
    for name in re.findall(rf"`({folders}/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


NUMBERED = sorted(DECISIONS.glob("[0-9]*.md"))
KEPT_NAMES = {"parts-of-sums.md", "registers-on-other-chips.md", "rows-kept-in-l2.md"}
"""Pages that emitted CUDA files name. Each links to a numbered page."""


def test_decisions_are_numbered_and_listed_in_the_index() -> None:
    names = [page.name for page in NUMBERED]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.+)\]\(([\w.-]+)\) \| (\S[^|]*) \|$", index, re.MULTILINE)
    assert [name for _, name, _ in listed] == names
    for title, name, state in listed:
        text = (DECISIONS / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n\n**Status:** {state}"), name
        assert title.startswith(f"{name[:4]}. "), name
        assert re.fullmatch(r"in force(; review)?|replaced by \[.+", state), (name, state)
    assert {page.name for page in DECISIONS.glob("*.md")} == {"README.md", *names, *KEPT_NAMES}


@pytest.mark.parametrize("page", NUMBERED, ids=lambda page: page.name)
def test_decisions_have_one_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads == ["Context", "Decision", "Consequences", "Alternatives rejected"]
    assert len(text.split()) <= 300


def test_emitted_files_name_decisions_that_exist() -> None:
    named = set[str]()
    for path in ROOT.glob("generated/*/*.cu"):
        named |= set(re.findall(r"\(([a-z][a-z0-9-]+\.md)\)", path.read_text(encoding="utf-8")))
    assert named == KEPT_NAMES
    for name in named:
        assert re.search(r"\]\(\d{4}-", (DECISIONS / name).read_text(encoding="utf-8")), name


def test_every_page_of_the_log_is_in_its_index() -> None:
    listed = re.findall(
        r"^\| \[.+\]\(([\w.-]+)\) \|", (LOG / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(p.name for p in LOG.glob("*.md") if p.name != "README.md")


def test_the_log_is_newest_first() -> None:
    for page in LOG.glob("*.md"):
        days = re.findall(
            r"^\*(\d{4}-\d\d-\d\d)\.\*$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert days == sorted(days, reverse=True), page.name
        assert days or page.name == "README.md", page.name


def test_names_of_the_kernels_for_hopper_are_emitted() -> None:
    emitted = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("generated/*/*.py"))
    names = re.findall(r"`(_\w+|[A-Z]+|\w+_ring)`", HOPPER.read_text(encoding="utf-8"))
    assert len(names) > 20
    for name in names:
        assert re.search(rf"\b{name}\b", emitted), name


@pytest.mark.parametrize("page", ["README.md", "docs/support.md"])
def test_targets_are_those_of_the_families(page: str) -> None:
    """If a target computes one part of a kernel, the page names the part."""
    words = {"attention": "attention", "norm": "norms", "chunk_output": "output"}
    words["linear_attention"] = "layers"
    (row,) = re.findall(
        r"^\| targets \| (.*?) \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    )
    said = dict(zip(("triton", "cuda", "cute"), row.split(";"), strict=True))
    assert said.pop("triton") == "Triton for all"
    for target, clause in said.items():
        for name in NAMES:
            found = family(name).targets.get(target)
            word = found.part if found and found.part else words[name]
            assert (word in clause) == (found is not None), (target, word)


def test_every_stage_is_shown() -> None:
    shown = re.findall(r"<!-- stage: (\w+) -->", WALKTHROUGH.read_text(encoding="utf-8"))
    assert shown == list(walkthrough.STAGES)


def test_every_verb_is_listed() -> None:
    verbs = {command.name for command in app.registered_commands}
    verbs |= {group.name for group in app.registered_groups}
    listed = set(
        re.findall(r"^\| `kgen (\w+)` \|", COMMANDS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    assert listed == verbs


def test_exit_codes_are_listed() -> None:
    listed = {
        int(code)
        for code in re.findall(
            r"^\| (\d+) \|", COMMANDS.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }
    assert listed == {0, EXIT_WRONG, EXIT_USAGE, EXIT_MISSING, EXIT_BUG, EXIT_INTERRUPTED}


@pytest.mark.parametrize(
    "model", [AttentionSpec, Buffer, ParamSpec], ids=lambda model: model.__name__
)
def test_every_field_is_described(model: type[AttentionSpec | Buffer | ParamSpec]) -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*)", LANGUAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    assert set(model.model_fields) <= set(rows)


def test_names_and_limits_of_the_language() -> None:
    text = LANGUAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in (*SIZES, *ELEMENTS))
    for number in (text_checks.MAX_LENGTH, printed_size.MAX_NODES, text_checks.MAX_DEPTH):
        assert f"{number:,}" in text


def test_first_example_renders(tmp_path: Path) -> None:
    example = re.search(
        r"^```yaml\n(kernel: .*?)^```",
        LANGUAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert example is not None
    path = tmp_path / "example.yaml"
    path.write_text(example[1], encoding="utf-8")
    command = [sys.executable, "-m", "kgen", "render", "--stdout", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "def causal_alibi(q, k, v, *, slopes" in run.stdout


@pytest.mark.thorough
def test_the_call_of_the_readme_runs() -> None:
    """The call runs as the README shows it: in this folder, on the CPU, in Triton's interpreter."""
    call = re.search(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert call is not None
    environment = os.environ | {"PYTHONPATH": "", "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", call[1]], cwd=ROOT, env=environment, check=True)


def test_scripts_that_are_named_can_be_run() -> None:
    for name in ("scripts/setup", "scripts/quickstart", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
