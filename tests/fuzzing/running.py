"""Try one seed: render a random spec, compare it with another spelling, and compare its kernels
with float64.
"""

from __future__ import annotations

import io
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from ruamel.yaml import YAML
from support.running.linting import gone_after_loops
from support.specs.rewriting import rewritten

from fuzzing.drawing import drawn
from kgen.diagnostics import KgenError
from kgen.expr.unparse import show
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, loads

LIMIT = 120
"""Time limit per seed, in seconds."""


What = Literal["right", "refused", "crash", "slow", "spelling", "reference", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a seed.

    | outcome | meaning |
    |---|---|
    | `right` | all comparisons passed |
    | `refused` | kgen refused the spec with an error that a user can correct |
    | `crash` | exception in kgen |
    | `slow` | time limit exceeded |
    | `spelling` | another spelling gives a different kernel |
    | `reference` | the reference differs from FlexAttention |
    | `wrong` | wrong numbers |
    """

    seed: int
    what: What
    message: str
    spec: str
    seconds: float
    flexed: bool = False
    """True if the reference was also compared with FlexAttention."""
    device: str = "cpu"
    """Device of the kernels: `cpu` (interpreters) or `cuda`."""

    @property
    def failed(self) -> bool:
        """True if kgen has a bug."""
        return self.what not in ("right", "refused")

    def row(self) -> dict[str, Any]:
        """Return the outcome as a row of a report."""
        return asdict(self)


class Failed(Exception):
    """A bug in kgen."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Slow(Exception):
    pass


def tried(seed: int, spec: Mapping[str, Any] | None = None, device: str = "cpu") -> Outcome:
    """Try a spec, by default the spec of the seed. The seed also determines its calls."""
    spec = drawn(seed) if spec is None else spec
    text, began, flexed = written(spec), time.perf_counter(), False

    def outcome(what: str, message: str = "") -> Outcome:
        seconds = round(time.perf_counter() - began, 2)
        return Outcome(seed, what, message[:2000], text, seconds, flexed, device)

    try:
        with within(LIMIT):
            loaded = loads(text, "drawn.yaml")
            flexed = asked_flex(loaded, random.Random(f"{seed} flex"))
            _try(loaded, spec, random.Random(f"{seed} called"), device)
    except KgenError as error:
        first = error.diagnostics[0]
        return outcome("refused", f"{first.code}: {first.message}")
    except Slow:
        return outcome("slow", f"more than {LIMIT} seconds: {where(sys.exc_info()[2])}")
    except Failed as error:
        return outcome(error.what, str(error))
    except Exception as error:
        return outcome(
            "crash", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        )
    return outcome("right")


def written(spec: Mapping[str, Any]) -> str:
    """Return the spec as YAML."""
    out = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.representer.ignore_aliases = lambda data: True
    yaml.dump(dict(spec), out)
    return out.getvalue()


def asked_flex(loaded: Loaded, rng: random.Random) -> bool:
    """Compare the reference with FlexAttention.

    Return False if FlexAttention cannot express the spec.
    """
    if loaded.spec.kernel != "attention":
        return False
    from fuzzing import flexed
    from kgen.kernels.attention.verify.inputs import Case, fit
    from kgen.verify.families import problem_of

    problem = problem_of(loaded)
    if not flexed.says_it(problem):
        return False
    case = fit(
        problem,
        Case("flex", rng.randrange(1, 40), rng.randrange(1, 70), batch=2, heads_kv=2),
        rng.randrange(4),
    )
    if (apart := flexed.difference(loaded, problem, case)) > flexed.BOUND:
        raise Failed("reference", f"{apart:.1e} from FlexAttention's output in {case}")
    return True


def _try(loaded: Loaded, spec: Mapping[str, Any], rng: random.Random, device: str) -> None:
    (file,) = render_spec(loaded, single=True).values()
    if respelled := _in_other_words(loaded, spec, rng):
        (other,) = render_spec(loads(respelled, "drawn.yaml"), single=True).values()
        if _code(other) != _code(file):
            raise Failed("spelling", respelled)
    if gone := gone_after_loops(file):
        raise Failed("crash", f"for Triton, not for Python: {gone}")
    _run(loaded, file, rng, device)


def _in_other_words(loaded: Loaded, spec: Mapping[str, Any], rng: random.Random) -> str | None:
    """Return the spec with masks and scores in another random spelling, or None if it has
    neither.
    """
    if loaded.spec.kernel != "attention" or not loaded.trees:
        return None
    words = {name: show(rewritten(rng, tree)) for name, tree in loaded.trees.items()}
    return written({**spec, **words})


def _code(text: str) -> str:
    """Return the code without the module docstring, which quotes the spec."""
    _, _, rest = text.partition('"""')
    return rest.partition('"""')[2]


def _run(loaded: Loaded, file: str, rng: random.Random, device: str) -> None:
    """Run the kernels of a GPU, or the portable kernels and then the Hopper kernels in their
    interpreters.
    """
    import torch

    from kgen.verify import compare, interpreter
    from kgen.verify.families import Subject, family_of, problem_of
    from kgen.verify.toolchain import import_file

    torch.set_num_threads(1)
    if device == "cpu":
        interpreter.mend()
    problem = problem_of(loaded)
    drawing, family = import_module(f"fuzzing.{loaded.spec.kernel}"), family_of(problem)
    cases = tuple(drawing.cases(problem, rng))
    steps = tuple(drawing.steps(problem, rng)) if hasattr(drawing, "steps") else ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.py"
        path.write_text(file, encoding="utf-8")
        apart = device == "cpu" and ("_hopper_kernel[" in file or "_hopper_kernel," in file)
        for hopper in (False, True)[: 1 + apart]:
            module = (_for_hopper if hopper else import_file)(
                path, f"kgen_drawn_{rng.random()}".replace(".", "_")
            )
            subject = Subject(problem, "triton", path, module, device)
            with ExitStack() as patched:
                says_nothing = _says_nothing(compare.check)
                patched.enter_context(mock.patch.object(compare, "check", says_nothing))
                patched.enter_context(mock.patch.object(family, "cases", return_value=cases))
                if steps:
                    patch = mock.patch.object(family, "decode_cases", return_value=steps)
                    patched.enter_context(patch)
                for group in family.groups(problem):
                    for case in steps if steps and group == "decode" else cases:
                        wrong = [
                            c.message
                            for c in family.run_case(subject, group, case.name)
                            if not c.ok
                        ]
                        if wrong:
                            kernels = (
                                "Hopper" if hopper else "portable" if device == "cpu" else device
                            )
                            raise Failed("wrong", f"{kernels} {group} {case}: {'; '.join(wrong)}")
            sys.modules.pop(module.__name__, None)


def _says_nothing(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return `check` that also accepts results without a meaningful comparison.

    The reference overflows the dtype, or it is zero, so relative errors are undefined. In 16 bits,
    kernels give 6e-8 for tanh(0).
    """

    def checked(name: str, got: Any, want: Any, eager: Any, allowed: Any, traits: Any) -> Any:
        import torch

        found, dtype = check(name, got, want, eager, allowed, traits), traits.dtype
        most = torch.finfo(dtype).max / 2 if dtype in (torch.float16, torch.bfloat16) else torch.inf
        beyond = (want.abs() > most).any() and not got.isnan().any()
        nothing = found.eager == 0.0 and found.error < 1e-5
        return replace(found, ok=True) if beyond or nothing else found

    return checked


def _for_hopper(path: Path, name: str) -> Any:
    """Import an emitted file whose Hopper kernels run in the Gluon interpreter."""
    from kgen.kernels.attention.schedules.hopper.verify import imported

    return imported(path, name)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def where(trace: Any) -> str:
    frames = [frame for frame in traceback.extract_tb(trace) if "/kgen/" in frame.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1][:5])


# --- smaller ------------------------


def smaller(found: Outcome, budget: int = 60) -> tuple[dict[str, Any], Outcome]:
    """Drop fields and parts of expressions. Return the smallest spec that fails in the same way."""
    spec = drawn(found.seed)
    for _ in range(budget):
        for candidate in _candidates(spec):
            again = tried(found.seed, candidate, found.device)
            budget -= 1
            if again.what == found.what:
                spec, found = candidate, again
                break
            if budget <= 0:
                return spec, found
        else:
            return spec, found
    return spec, found


def _candidates(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield slightly smaller specs."""
    needed = ("kernel", "name", "dtype", "head_dim", "norm", "width")
    for key in spec:
        if key not in needed:
            yield _tidied({k: v for k, v in spec.items() if k != key})
    for key, value in spec.items():
        if isinstance(value, str) and _is_expression(key):
            for part in _parts(value):
                yield _tidied({**spec, key: part})


def _parts(text: str) -> Iterator[str]:
    """Yield the parts in brackets, and the text without one operand."""
    begins: list[int] = []
    for i, c in enumerate(text):
        if c == "(":
            begins.append(i)
        elif c == ")":
            begin = begins.pop()
            inner = text[begin + 1 : i]
            if 0 < len(inner) < len(text) - 2:
                yield inner
                yield text[:begin] + "(" + "1" + ")" + text[i + 1 :]
    for match in re.finditer(r" (and|or|\+|-|\*) ", text):
        yield text[: match.start()]
        yield text[match.end() :]


def _tidied(spec: dict[str, Any]) -> dict[str, Any]:
    from fuzzing.attention import without_unused

    return without_unused(dict(spec), [*filter(_is_expression, spec)])


def _is_expression(key: str) -> bool:
    return key.endswith(("_mod", "_map")) or key in ("decay", "beta", "skip")
