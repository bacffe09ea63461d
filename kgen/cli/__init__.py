"""The `kgen` command: the only place that prints or exits. Everything heavy is imported by the verb that needs it."""

from kgen.cli.verbs import app, main

__all__ = ["app", "main"]
