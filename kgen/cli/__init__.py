"""The `kgen` command: the only place that prints or exits. Verbs import what is heavy when they run."""

from kgen.cli import importing as _importing  # noqa: F401 - registers its verb
from kgen.cli.verbs import app, main

__all__ = ["app", "main"]
