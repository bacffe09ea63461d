"""Stands for `kgen.verify.worker`: says of each case that it is right, and never comes to an end in
one of them.

    python tests/verify/slow_worker.py VERB ...

runs the command with such workers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

ENDLESS = ("waits", "forward", "one-row")
"""The spec, the pass and the case that does not end."""


def main(job: Any, lines: IO[str]) -> int:
    for group, name in job.cases:
        print(json.dumps({"start": (group, name)}), file=lines, flush=True)
        if (job.emitted.spec, group, name) == ENDLESS:
            time.sleep(600)
        row = {"pass": group, "case": name, "ok": True, "error": 1e-3, "eager": 1e-3, "ratio": 1.0}
        row |= {"seconds": 0.1, "message": "", "outputs": {"out": [1e-3, 1.0]}}
        print(json.dumps(row), file=lines, flush=True)
    return 0


def command() -> None:
    """Run the command."""
    from kgen.cli import main as kgen
    from kgen.verify import processes, verifying

    def messages(_: str, *args: Any) -> Any:
        return processes.messages("slow_worker", *args)

    verifying.messages = messages
    kgen()


if __name__ == "__main__":
    if Path(sys.argv[1]).is_file():
        from kgen.verify.processes import serve

        serve(main)
    command()
