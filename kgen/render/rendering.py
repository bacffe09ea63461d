"""Render a loaded spec to the texts of its files, in memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render import environment
from kgen.render.header import digest, stamp, stamp_shared
from kgen.render.layout import laid_out, laid_out_in_c
from kgen.render.program import program
from kgen.spec.names import named_apart, refusal
from kgen.spec.user_text import UserText
from kgen.targets.template import Template, names, parts

if TYPE_CHECKING:
    from jinja2.runtime import Context

    from kgen.spec.load import Loaded
    from kgen.targets import Source


Change: TypeAlias = "Callable[[Loaded, Source], Source]"
"""A function that returns the source to render instead of a source of a spec."""


class InternalError(Exception):
    """A bug in kgen, found while it worked on a spec. The cause is chained."""


@contextmanager
def blaming(spec: str, doing: str = "rendering", hint: str = "") -> Iterator[None]:
    """Turn any exception except `KgenError` into an `InternalError` that names the spec, with a
    `hint`.
    """
    try:
        yield
    except (KgenError, InternalError):
        raise
    except Exception as error:
        text = f"while {doing} {spec}: {type(error).__name__}: {error}"
        raise InternalError(f"{text}; {hint}" if hint else text) from error


def render_spec(
    loaded: Loaded, targets: Collection[str] | None = None, *, single: bool = False
) -> dict[str, str]:
    """Return the texts of the files of a spec by filename, for all its targets or for `targets`.

    With `single`, return the file `<name>.py` that needs no other. Raises `KgenError` if there is
    none.
    """
    return _rendered(loaded, targets, single)[1]


def render_variants(
    variants: Sequence[Loaded],
    targets: Collection[str] | None = None,
    *,
    single: bool = False,
    remark: Callable[[str], None] = lambda said: None,
    change: Change = lambda loaded, source: source,
) -> dict[str, dict[str, str]]:
    """Return the files of all variants of a spec, by folder.

    With all targets, this includes the folder of the spec, whose function selects a variant.
    `remark` is called with each remark of each source. `change` returns the source that is
    rendered instead of a source of a variant.
    """
    first = variants[0]
    if single and len(variants) > 1:
        message = (
            f"`{first.spec.name}` lists several dtypes or head dims; `--single` needs exactly one"
        )
        hint = f"render its folder, or copy the folder `{first.folder}`"
        raise KgenError(Diagnostic("no-single-file", message, file=str(first.path), hint=hint))
    made = {one.folder: _rendered(one, targets, single, change) for one in variants}
    folders = {folder: texts for folder, (_, texts) in made.items()}
    for found, _ in made.values():
        for source in found.values():
            for said in source.remarks:
                remark(said)
    if first.variant and targets is None:
        with _blaming(first):
            folders[first.spec.name] = _choice(
                [(one, made[one.folder][0].values()) for one in variants]
            )
    return folders


def render_choice(variants: Sequence[tuple[Loaded, Collection[str]]]) -> dict[str, str]:
    """Return the file that selects a variant of a spec, by filename.

    `variants` has the names of the files in each variant's folder. The result is empty if a variant
    has no file with the function.
    """
    with _blaming(variants[0][0]):
        return _choice(
            [
                (one, [x for name, x in _settled(one, None, single=False).items() if name in files])
                for one, files in variants
            ]
        )


def _choice(variants: Sequence[tuple[Loaded, Iterable[Source]]]) -> dict[str, str]:
    from kgen.targets.package import choosing

    source = choosing(variants)
    return {source.filename: _file([one for one, _ in variants], source)} if source else {}


def _rendered(
    loaded: Loaded,
    targets: Collection[str] | None,
    single: bool,
    change: Change = lambda loaded, source: source,
) -> tuple[dict[str, Source], dict[str, str]]:
    """Return the sources of the files of one spec, and their texts."""
    with _blaming(loaded):
        found = _settled(loaded, targets, single)
        sources = {name: change(loaded, source) for name, source in found.items()}
        return sources, {name: _file([loaded], source) for name, source in sources.items()}


def excerpts(loaded: Loaded, block: str) -> list[tuple[str, str]]:
    """Return the filename and the dedented text of each template block of this name in the files of
    a spec.
    """
    with _blaming(loaded):
        return [
            (name, textwrap.dedent(_tidy(text)))
            for name, source in _settled(loaded, None, single=False).items()
            for text in _blocks(source, block)
        ]


def render_source(variants: Sequence[Loaded], source: Source) -> str:
    """Render a file next to the kernels of a spec, from all its variants."""
    with _blaming(variants[0]):
        return _file(variants, source)


def render_package(loaded: Loaded, files: Collection[str]) -> str | None:
    """Render `__init__.py` for a folder with only these files of a spec; None if none has the
    function.
    """
    from kgen.targets.package import package

    with _blaming(loaded):
        settled = _settled(loaded, None, single=False)
        whole = package(loaded, [source for name, source in settled.items() if name in files])
        return _file([loaded], whole) if whole else None


def render_text(loaded: Loaded, template: Template) -> str:
    """Render a file that belongs to the user, without a header."""
    with _blaming(loaded):
        return _tidy(environment.rendered(template))


def _blaming(loaded: Loaded) -> AbstractContextManager[None]:
    return blaming(f"spec `{loaded.spec.name}` ({Path(loaded.path).name})")


def _settled(loaded: Loaded, targets: Collection[str] | None, single: bool) -> dict[str, Source]:
    """Return the source of each file, with names of the spec replaced that collide with names of
    the files.
    """
    sources = (_single if single else _sources)(named_apart(loaded), targets)
    if any(loaded.spec.name in source.reserved for source in sources.values()):
        raise KgenError([refusal(loaded, loaded.spec.name)])
    return sources


def _blocks(source: Source, block: str) -> list[str]:
    """Return the texts of the blocks of this name in a file and in all templates within it."""
    found: list[str] = []

    def kept(render: Callable[[Context], Iterator[str]]) -> Callable[[Context], Iterator[str]]:
        def rendered(context: Context) -> Iterator[str]:
            found.append("".join(render(context)))
            yield found[-1]

        return rendered

    for part in parts(source.text):
        env = environment.environment(environment.template_root(), part.language)
        apart = env.overlay()  # templates of its own
        for name in environment.template_texts(env, part.template):
            blocks = apart.get_template(name).blocks
            if block in blocks:
                blocks[block] = kept(blocks[block])
        apart.get_template(part.template).render(names(part))
    return found


def _sources(loaded: Loaded, targets: Collection[str] | None) -> dict[str, Source]:
    """Return the source of each file, by filename."""
    from kgen.targets import asked_targets, launch_file, sources
    from kgen.targets.package import package

    files: dict[str, Source] = {}
    asked = [target for target in asked_targets(loaded) if targets is None or target in targets]
    found = [source for target in asked for source in sources(loaded, target)]
    if any(source.launches for source in found):
        found.append(launch_file())
    if targets is None and (whole := package(loaded, found)):
        found.append(whole)
    for source in found:
        if not _is_filename(source.filename) or source.filename in files:
            raise ValueError(f"{loaded.spec.name} emits a file called {source.filename!r}")
        files[source.filename] = source
    return files


def _is_filename(name: str) -> bool:
    """True for the name of a module or of a file next to it: `triton.py`, `cuda.cu`."""
    stem, _, kind = name.partition(".")
    return name.isascii() and stem.isidentifier() and kind.isalpha() and kind.islower()


def _single(loaded: Loaded, targets: Collection[str] | None) -> dict[str, Source]:
    """Return the source of the file that needs no other: of several, the one with the highest
    rank.
    """
    files = [file for file in _sources(loaded, targets).values() if file.alone is not None]
    source = max(files, key=lambda file: file.rank or 0, default=None)
    if source is None:
        message = f"`{loaded.spec.name}` has no file that works without others"
        hint = "render its folder, or add the target `triton`"
        raise KgenError(Diagnostic("no-single-file", message, file=str(loaded.path), hint=hint))
    assert source.alone is not None
    name = f"{loaded.spec.name}.py"
    return {name: replace(source, filename=name, text=source.alone)}


def _body(source: Source) -> str:
    """One file without its header, and without trailing blanks: templates need not mind where a
    fragment is empty.
    """
    text = environment.with_fakes(_tidy(environment.rendered(source.text)), source.register_fake)
    if environment.DIGEST_OF_CODE not in text:
        return text
    # Two spellings of one kernel have the same code, and by it the same names of operators.
    return text.replace(environment.DIGEST_OF_CODE, digest(program(text.encode(), ".py").decode()))


def _tidy(rendered: str) -> str:
    return "\n".join(line.rstrip() for line in rendered.split("\n")).strip("\n") + "\n"


def _file(loaded: Sequence[Loaded], source: Source) -> str:
    """Return a file of a spec, or of all its variants, with its header."""
    body = laid_out(_body(source)) if source.comment == "#" else laid_out_in_c(_body(source))
    if source.shared:
        inputs = digest(
            "\0".join(f"{name}\0{text}" for name, text in environment.texts_of(source.text).items())
        )
        return stamp_shared(body, source.comment, inputs=inputs, spdx=loaded[0].spec.license)
    return stamp(
        body,
        source.comment,
        spec=loaded[0].spec.name,
        spec_file=UserText(Path(loaded[0].path).name),
        inputs=_inputs_hash(loaded, source),
        spdx=loaded[0].spec.license,
    )


def _inputs_hash(loaded: Sequence[Loaded], source: Source) -> str:
    """Return a hash of the model of the spec, without comments and layout of its YAML, and of its
    templates.

    The model keeps the order of its fields: the order of buffers is the order of the launcher's
    arguments.
    """
    texts = environment.texts_of(source.text)
    models = (one.spec.model_dump_json() for one in loaded)
    return digest("\0".join([*models, *(f"{name}\0{text}" for name, text in texts.items())]))
