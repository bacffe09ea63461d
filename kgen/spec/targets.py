"""The field `targets` of a spec: a key for each folder in `targets/` of the family, with the
options of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_validator

from kgen.diagnostics import did_you_mean, shown
from kgen.family import family, known_targets
from kgen.spec.problems import SpecModel, problem


class NoOptions(SpecModel):
    """The target has no options."""


class Targets(SpecModel):
    """The targets to emit."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the options of a target; None if the spec does not list it."""


def targets_model(kernel: str, module: str) -> type[Targets]:
    """Return the model of a family. `module` is the module that binds it to the name `Targets`."""
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
    """Check that there is a target, and that the family has every target."""
    if not isinstance(value, dict):
        return value
    supported = family(kernel).targets
    words = " and ".join(f"`{name}`" for name in supported) + (
        " is" if len(supported) == 1 else " are"
    )
    for name in value:
        if name in supported:
            continue
        if name in known_targets():
            message = f"`kernel: {kernel}` does not support the target `{name}`"
            hint = f"remove it: {words} supported"
            raise problem("unsupported-target", message, hint, at=(name,), key=True)
        hint = did_you_mean(name, supported) or f"{words} supported"
        raise problem(
            "unknown-target", f"there is no target {shown(name)}", hint, at=(name,), key=True
        )
    if not value:
        hint = f"write `targets: {{{next(iter(supported))}: {{}}}}`"
        raise problem("missing-key", "a spec needs at least one target", hint)
    # `triton:` without a value selects the target with default options.
    return {name: {} if options is None else options for name, options in value.items()}
