"""The `kgen` command: the only place that prints or exits. Verbs import what is heavy when they run."""

import kgen.cli.importing
import kgen.cli.prove  # noqa: F401  both register their verbs
from kgen.cli.verbs import app, main

__all__ = ["app", "main"]
