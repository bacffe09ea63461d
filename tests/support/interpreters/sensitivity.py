"""Factors of 1.01 in one product or result of a stock spec's kernels, and the quick cases that find
them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kgen.spec.load import load
from kgen.verify.families import Subject, family_of, problem_of
from support.interpreters.own_process import interpreted

ROOT = Path(__file__).resolve().parents[3]

NOTHING = "there is nothing to multiply"
EMPTY = dict.fromkeys(("no-keys", "no-queries", "no-tokens", "no-sequences"), NOTHING)


@dataclass(frozen=True)
class Planted:
    """A factor in the kernels of a spec: replace every `right` by `wrong`.

    `unseen` lists the cases of the pass that cannot find the factor, with the reason.
    """

    spec: str
    group: str
    right: str
    wrong: str
    unseen: Mapping[str, str] = field(default_factory=dict)
    sample: tuple[str, ...] = ()
    """The cases that run at every change."""

    def text(self) -> str:
        """Return the text of the file with the factor."""
        text = (ROOT / "generated" / self.spec / "triton.py").read_text()
        assert self.right in text, f"no {self.right!r} in {self.spec}"
        return text.replace(self.right, self.wrong)

    def found(self, folder: Path, cases: Iterable[str] = ()) -> dict[str, list[str]]:
        """Return the messages of each case. The default is all quick cases."""
        path = folder / "triton.py"
        shutil.copyfile(ROOT / "generated" / self.spec / "_launch.py", folder / "_launch.py")
        path.write_text(self.text())
        return interpreted(_found, self.spec, self.group, path, tuple(cases))


def _found(spec: str, group: str, path: Path, cases: tuple[str, ...]) -> dict[str, list[str]]:
    from kgen.verify import interpreter
    from kgen.verify.toolchain import import_file

    interpreter.mend()
    problem = problem_of(load(ROOT / "specs" / f"{spec}.yaml"))
    subject = Subject(problem, "triton", path, import_file(path, spec), "cpu")
    family = family_of(problem)
    return {
        name: [check.message for check in family.run_case(subject, group, name) if not check.ok]
        for name in cases or family.case_names(problem, group, True)
    }


QK = "qk = tl.dot(q, tl.trans(k))"
NOT_ASKED = {"k-alone": "this gradient is not asked for"}
NO_STATES = {
    "no-token": NOTHING,
    "very-steep": "what comes from the states has decayed to less than float32 adds",
}
NO_TOKEN = {"no-token": NOTHING}
LITTLE = {
    "steep": "what comes from the states is in few rows, and little beside the rounding there"
}

PLANTED = {
    "qk of forward": Planted(
        "causal_alibi", "forward", QK, f"{QK} * 1.01", EMPTY, ("one", "q-shorter")
    ),
    "qk of decoding": Planted(
        "decode_gqa", "forward", QK, f"{QK} * 1.01", EMPTY | {"decode-no-keys": "there are no keys"}
    ),
    "scale of dq": Planted(
        "causal_alibi", "backward", "(dq * scale).to", "(dq * scale * 1.01).to", EMPTY | NOT_ASKED
    ),
    "scale of dk": Planted(
        "causal_alibi", "backward", "(dk * scale).to", "(dk * scale * 1.01).to", EMPTY
    ),
    "P of dv": Planted(
        *("causal_alibi", "backward", "tl.dot(p.to(do.dtype), do, dv)"),
        "tl.dot((p * 1.01).to(do.dtype), do, dv)",
        EMPTY | NOT_ASKED | {"lse-alone": "dv is zero"},
    ),
    "dS of dq": Planted(
        *(
            "causal_alibi",
            "backward",
            "p * (dp - delta[:, None])",
            "p * (dp - delta[:, None]) * 1.01",
        ),
        EMPTY | NOT_ASKED,
        ("one", "large", "scale"),
    ),
    "dS of dk": Planted(
        *(
            "causal_alibi",
            "backward",
            "p * (dp - delta[None, :])",
            "p * (dp - delta[None, :]) * 1.01",
        ),
        EMPTY,
        ("one-key-large", "off-tile"),
    ),
    "states of o": Planted(
        *("retention_output", "forward", "out = out * tl.exp2("),
        "out = 1.01 * out * tl.exp2(",
        NO_STATES | LITTLE,
        ("one-chunk", "tail"),
    ),
    "scores of o": Planted(
        "retention_output", "forward", "p = qk * tl.exp2(", "p = 1.01 * qk * tl.exp2(", NO_TOKEN
    ),
    "states of gated o": Planted(
        *("gated_delta_output", "forward", "out = out * tl.exp2("),
        "out = 1.01 * out * tl.exp2(",
        NO_STATES,
    ),
    "scores of gated o": Planted(
        "gated_delta_output", "forward", "p = qk * tl.exp2(", "p = 1.01 * qk * tl.exp2(", NO_TOKEN
    ),
    "states of gated dq": Planted(
        *("gated_delta_output", "backward", "(do * factor).to", "(do * factor * 1.01).to"),
        NO_STATES,
    ),
    "dS of gated dq and dk": Planted(
        *("gated_delta_output", "backward", "ds = dp * tl.exp2(", "ds = 1.01 * dp * tl.exp2("),
        NO_TOKEN,
    ),
    "output of 8 bits": Planted(
        *("rms_norm_fp8", "forward", "out = out * (1.0 / scale)", "out = out * (1.01 / scale)"),
        {
            **dict.fromkeys(("zeros", "zero-weight"), "the output is zero"),
            "no-rows": "there is no output",
            "one-element": (
                "the largest element of a row is at the end of the range, which clamps it"
            ),
        },
        ("one-row", "vector", "broadcast", "stepped"),
    ),
}
