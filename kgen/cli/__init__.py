"""The `kgen` command. No other package prints or exits. Verbs import heavy packages when they
run.
"""

import kgen.cli.adapting
import kgen.cli.benching
import kgen.cli.building
import kgen.cli.explaining
import kgen.cli.importing
import kgen.cli.merging
import kgen.cli.new
import kgen.cli.prove
import kgen.cli.rendering
import kgen.cli.reporting
import kgen.cli.tuning  # noqa: F401  each module registers its verb
from kgen.cli.verbs import app, main

__all__ = ["app", "main"]
