"""`targets` of a spec: a key for each folder in `targets/` of its family, with the options that the folder brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_validator

from kgen.diagnostics import did_you_mean, shown
from kgen.family import family, known_targets
from kgen.spec.problems import SpecModel, problem


class NoOptions(SpecModel):
    """Options of the target: none so far."""


class Targets(SpecModel):
    """What to emit."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The options of a target; None where the spec does not ask for it."""


def targets_model(kernel: str, module: str) -> type[Targets]:
    """The model of a family, for the module that calls it `Targets`."""
    fields: Any = {
        name: (target.options.get() | None, Field(default=None, description=target.emits))
        for name, target in family(kernel).targets.items()
    }

    def check(cls: type[Targets], value: Any) -> Any:
        return _checked(value, kernel)

    validators: Any = {"check": model_validator(mode="before")(classmethod(check))}  # type: ignore[arg-type]
    return create_model(
        "Targets",
        __base__=Targets,
        __doc__=Targets.__doc__,
        __module__=module,
        __validators__=validators,
        **fields,
    )


def _checked(value: Any, kernel: str) -> Any:
    """Every target is one of the family, and there is one."""
    if not isinstance(value, dict):
        return value
    supported = family(kernel).targets
    words = " and ".join(f"`{name}`" for name in supported) + (" is" if len(supported) == 1 else " are")
    for name in value:
        if name in supported:
            continue
        if name in known_targets():
            message = f"the target `{name}` is not supported yet for {kernel}"
            hint = f"remove it: {words} supported"
            raise problem("unsupported-target", message, hint, at=(name,), key=True)
        hint = did_you_mean(name, supported) or f"{words} supported"
        raise problem("unknown-target", f"there is no target {shown(name)}", hint, at=(name,), key=True)
    if not value:
        hint = f"write `targets: {{{next(iter(supported))}: {{}}}}`"
        raise problem("missing-key", "a spec needs at least one target", hint)
    # `triton:` with nothing after it asks for the target without options.
    return {name: {} if options is None else options for name, options in value.items()}
