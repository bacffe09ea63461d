"""Pages, docstrings, comments and help texts follow "How we write" in CONTRIBUTING.md.

`plain_words.json` has the number of violations that each file still contains. KGEN_UPDATE_GOLDEN=1
lowers the numbers; KGEN_UPDATE_GOLDEN=force also raises them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.docs.plain_words import count_words, files, violations

ROOT = Path(__file__).resolve().parents[1]
COUNTS = Path(__file__).parent / "plain_words.json"
LONG = " ".join(["word"] * 26)
FITS = " ".join(["word"] * 25)


def test_no_file_gets_worse() -> None:
    """Each file has exactly its number of violations, so that the list only shrinks."""
    recorded: dict[str, int] = json.loads(COUNTS.read_text(encoding="utf-8"))
    found = {path.relative_to(ROOT).as_posix(): violations(path) for path in files(ROOT)}
    counts = {name: len(ones) for name, ones in found.items() if ones}
    update = os.environ.get("KGEN_UPDATE_GOLDEN")
    if update in ("1", "force"):
        recorded = updated(recorded, counts, force=update == "force")
        COUNTS.write_text(
            json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", encoding="utf-8"
        )
    worse = [
        f"{name}:{one}"
        for name, ones in found.items()
        if len(ones) > recorded.get(name, 0)
        for one in ones
    ]
    assert not worse, "see How we write in CONTRIBUTING.md:\n" + "\n".join(worse)
    better = [name for name, count in recorded.items() if counts.get(name, 0) < count]
    assert not better, f"lower the counts with KGEN_UPDATE_GOLDEN=1: {better}"


def updated(recorded: dict[str, int], counts: dict[str, int], *, force: bool) -> dict[str, int]:
    """Return the list to record. Without `force`, no count is above the recorded one."""
    if force:
        return counts
    lowered = {name: min(count, recorded.get(name, 0)) for name, count in counts.items()}
    return {name: count for name, count in lowered.items() if count}


def test_the_list_only_shrinks() -> None:
    recorded, counts = {"less": 3, "more": 1, "none": 2}, {"less": 1, "more": 4, "new": 1}
    assert updated(recorded, counts, force=False) == {"less": 1, "more": 1}
    assert updated(recorded, counts, force=True) == counts


def rules(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [f"{one.line} {one.rule}" for one in violations(path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{LONG}.", ["1 26 words, at most 25"]),
        (f"{FITS}. {FITS}.", []),
        (f"# Title\n\n- {FITS}\n- {FITS}\n\n1. {FITS}\n2. {FITS}\n", []),
        (f"| a | {LONG} |\n| b | {FITS} |\n", ["1 26 words, at most 25"]),
        (f"```sh\n{LONG} told\n```\n<!-- {LONG} -->\n`{LONG}`.\n[{FITS}](a b c.md)\n", []),
        (f"Text\n\n    {LONG} told\n\nText\n", []),
        ("The rank is told\nthe size. `told` is a variable.", ["1 forbidden: told"]),
        ("Two lines ahead\nof the loop.", ["1 forbidden: ahead of"]),
        ("Told by rank 0.", ["1 forbidden: told"]),
        ("Set HOME. The left-handed rule. Besides, homes and wantson.", []),
        ("If given, use it.", ["1 forbidden: given"]),
        ("Given a spec, build a given kernel of the given size.", []),
        ("The time meets the limit. The ranks meet.", ["1 forbidden: meet"]),
        ("It prints what it sees.", ["1 forbidden: what"]),
        ("What is a tile? Decide what to do.", []),
        ("It is no longer there, now.", ["1 forbidden: no longer", "1 forbidden: now"]),
    ],
)
def test_pages(text: str, found: list[str], tmp_path: Path) -> None:
    assert rules(tmp_path, "page.md", text) == found


def test_the_changelog_may_tell_history(tmp_path: Path) -> None:
    assert rules(tmp_path, "CHANGELOG.md", "The option is no longer there. It asked twice.") == [
        "1 forbidden: asked"
    ]


SOURCE = '''"""{module}"""

import typer

# {comment}
X = 1  # {trailing}
"""{attribute}"""
TEXT = """What is told to a user {long} {long}."""


@verb("x")
def function(x: int = typer.Option(help=f"{option} {{X}}.")) -> None:
    """{verb}"""

    async def inner() -> None:
        """{function}"""
'''
PLAIN = {
    "module": "Read files.",
    "comment": "A TMA box has at most 256 rows.",
    "trailing": "one per warp",
    "attribute": "Rows per tile.",
    "option": "Use this file",
    "verb": "Render specs.",
    "function": "Return the row-wise sum, or None.\\n\\n    Raise `ValueError` without rows.",
    "long": "word " * 30,
}


def twenty_one(word: str) -> str:
    return " ".join([word] * 21)


@pytest.mark.parametrize(
    ("field", "text", "found"),
    [
        ("module", "Read files.", []),
        ("module", "What reads files.", ["1 begins with 'what'", "1 forbidden: what"]),
        ("module", f"{twenty_one('word')}.", ["1 21 words, at most 20"]),
        ("module", "Read files:\n\n    " + "code " * 30 + "\n\nThe end.", []),
        (
            "module",
            f"Fields:\n\n| a | b |\n|---|---|\n| x | {twenty_one('word')} |\n",
            ["1 21 words, at most 20"],
        ),
        ("module", f"Fields:\n\n| a | b |\n|---|---|\n| x | {'word ' * 20} |\n| y | z |\n", []),
        ("comment", twenty_one("word"), ["5 21 words, at most 20"]),
        ("comment", "The caller is\n# asked.", ["5 forbidden: asked"]),
        ("comment", f"noqa {twenty_one('word')}", []),
        ("trailing", "mended", ["6 forbidden: mend"]),
        ("attribute", "Whether rows are sorted.", ["7 begins with 'whether'"]),
        ("attribute", "Whetherness.", []),
        ("option", " ".join(["word"] * 12), ["12 13 words, at most 12"]),
        ("option", " ".join(["word"] * 11), []),
        ("verb", " ".join(["word"] * 13), ["13 13 words, at most 12"]),
        ("function", "One that reads.", ["16 begins with 'one that'"]),
        ("function", "One row per block.", []),
        ("function", "Those of a row.", ["16 begins with 'those'"]),
        ("function", " ".join(["word"] * 20), []),
    ],
)
def test_python(field: str, text: str, found: list[str], tmp_path: Path) -> None:
    assert rules(tmp_path, "module.py", SOURCE.format(**{**PLAIN, field: text})) == found


def test_templates(tmp_path: Path) -> None:
    text = '''{# Beside the loop. #}
{% if asked %}
"""{{ told }} is a summary."""
# The tile {{ home }} is
# handed over.
{% endif %}
x = said  // wants
// Rows by itself.
'''
    assert rules(tmp_path, "template.j2", text) == [
        "1 forbidden: beside",
        "4 forbidden: handed",
        "8 forbidden: by itself",
    ]


def test_headers_and_scripts(tmp_path: Path) -> None:
    assert rules(
        tmp_path, "x.h", "/* One block\n   wants it. */\nint told; // asked\n// It said so.\n"
    ) == [
        "1 forbidden: wants",
        "4 forbidden: said",
    ]
    assert rules(tmp_path, "x", "#!/bin/sh\n# The dearest rank.\nsaid=1\n") == [
        "2 forbidden: dearest"
    ]


@pytest.mark.parametrize(
    ("sentence", "words"), [("a multi-word X and path/to/x.py", 5), ("S = Q @ K + 1", 4), ("", 0)]
)
def test_words(sentence: str, words: int) -> None:
    assert count_words(sentence) == words


def test_the_files_are_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in files(ROOT)}
    assert len(names) > 800
    assert {
        "README.md",
        "docs/specs.md",
        "kgen/cli/verbs.py",
        "scripts/test",
        Path(__file__).name,
    } - names == {Path(__file__).name}
