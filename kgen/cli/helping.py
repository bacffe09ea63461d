"""Help of the command: the verbs in the order of use, each with its full summary."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

ORDER = (
    *(
        "new",
        "import",
        "list",
        "explain",
        "render",
        "prove",
        "compile",
        "verify",
        "status",
        "bench",
        "tune",
    ),
    *("report", "build", "adapt", "ledger", "schema", "doctor"),
)
"""Every verb, in the order in which a project needs it."""


class InOrder(TyperGroup):
    """The group of all verbs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of help and completion."""
        return sorted(self.commands, key=ORDER.index)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first paragraph of each verb's help. Wrap a long one; Typer would truncate
        it.
        """
        verbs = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_paragraph(verb.help or "")) for name, verb in verbs])


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())
