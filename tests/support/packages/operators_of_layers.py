"""Launches of the operators of linear attention, in Python and in C++, on a simulated driver:
`operators_of_layers.py FOLDER NAME ARCH`.

Prints the number of launches, and their differences, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kgen.spec.load import load
from support.packages.c_calls import differences
from support.packages.c_layers import LAYER_CASES, layer_launches
from support.packages.c_on_paper import loaded_package
from support.packages.operators_on_paper import Loaded, loaded_operators


class Operators:
    """The operators of a package, called as the functions in C."""

    def __init__(self, loaded: Loaded, name: str) -> None:
        self.module, self.workspace = loaded.module, torch.empty(0, dtype=torch.uint8)
        self.arguments = SimpleNamespace()
        own = getattr(torch.ops, self.module._forward_op.namespace)
        # The emitted file calls this operator only through autograd.
        self.backward = getattr(own, f"{name}_backward", None)
        self.results: tuple[torch.Tensor, ...] = ()

    def call(self, pass_: str, given: Mapping[str, Any]) -> int:
        """Call the operator of a pass with the arguments of C."""
        found = {name.removesuffix("_"): x for name, x in given.items()}
        if pass_ == "forward":
            final, within = found["final_state"], found["chunk_states"]
            asked = {"final": final is not None, "within": within is not None, "keep": True}
            self.results = self._called(self.module._forward_op, found | asked)
        elif pass_ == "decode":
            found["states"] = found["token_states"]
            self._called(self.module._decode_op, found)
        else:
            assert self.backward is not None
            operator = self.backward.default
            names = [one.name for one in operator._schema.arguments]
            kept = [name for name in names if name not in found]
            saved = dict(zip(kept, self.results[3:], strict=True))
            self._called(operator, found | saved)
        return 0

    def _called(self, operator: Any, given: Mapping[str, Any]) -> Any:
        return operator(*[given[one.name] for one in operator._schema.arguments])

    def error(self) -> str:
        """Return the last error: operators raise theirs."""
        return ""


def launches(folder: Path, name: str, arch: int) -> tuple[int, list[str]]:
    """Return the number of launches, and the differences between those of C++ and Python."""
    loaded = loaded_operators(folder, name, arch=arch, runs=False)
    spec, operators = load(folder / f"{name}.yaml"), Operators(loaded, name)
    launcher = loaded_package(folder / name, f"{name}_on_paper")
    count, found = 0, []
    for case in LAYER_CASES:
        want, got = layer_launches(loaded.paper, operators, launcher, spec, case, arch)
        assert want.keys() == got.keys()
        count += sum(map(len, want.values()))
        found += differences(want, got)
    return count, found


if __name__ == "__main__":
    print(json.dumps(launches(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
