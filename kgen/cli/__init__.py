"""The `kgen` command: the only place that prints or exits. Verbs import what is heavy when they run."""

import kgen.cli.adapting
import kgen.cli.benching
import kgen.cli.building
import kgen.cli.explaining
import kgen.cli.importing
import kgen.cli.merging
import kgen.cli.new
import kgen.cli.prove
import kgen.cli.reporting
import kgen.cli.tuning  # noqa: F401  all register their verbs
from kgen.cli.verbs import app, main

__all__ = ["app", "main"]
