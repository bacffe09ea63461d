"""From a loaded spec to the text of its files, in memory."""

from __future__ import annotations

import ast
import symtable
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render import environment
from kgen.render.header import digest, stamp, stamp_shared
from kgen.render.program import program
from kgen.spec.names import named_apart, refusal
from kgen.spec.user_text import UserText
from kgen.targets.launching import FILENAME, LAUNCH_FILE, imported
from kgen.targets.template import Template, names, parts

if TYPE_CHECKING:
    from jinja2.runtime import Context

    from kgen.spec.load import Loaded
    from kgen.targets import Source


class InternalError(Exception):
    """Something broke in kgen itself while it worked on a spec. The cause is chained."""


@contextmanager
def blaming(spec: str, doing: str = "rendering", hint: str = "") -> Iterator[None]:
    """An exception that is not the user's to mend becomes an `InternalError` that names the spec, with a `hint`."""
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
    """Filename -> text for every file that the spec asks for, or those of `targets` alone.

    `single`: the one file `<name>.py` that does without others. Raises `KgenError` where there is none.
    """
    return _rendered(loaded, targets, single)[1]


def render_variants(
    variants: Sequence[Loaded],
    targets: Collection[str] | None = None,
    *,
    single: bool = False,
    remark: Callable[[str], None] = lambda said: None,
) -> dict[str, dict[str, str]]:
    """The same by folder for every variant of a spec, and with all targets the folder that has them: it chooses one.

    `remark` is called with each remark of each source.
    """
    first = variants[0]
    if single and len(variants) > 1:
        message = f"`{first.spec.name}` has variants, and one file is one of them"
        hint = f"render its folder, or take `{first.folder}/triton.py` with what lies beside it"
        raise KgenError(Diagnostic("no-single-file", message, file=str(first.path), hint=hint))
    made = {one.folder: _rendered(one, targets, single) for one in variants}
    folders = {folder: texts for folder, (_, texts) in made.items()}
    for found, _ in made.values():
        for source in found.values():
            for said in source.remarks:
                remark(said)
    if first.variant and targets is None:
        with _blaming(first):
            folders[first.spec.name] = _choice([(one, made[one.folder][0].values()) for one in variants])
    return folders


def render_choice(variants: Sequence[tuple[Loaded, Collection[str]]]) -> dict[str, str]:
    """Filename -> text of what chooses one of a spec's variants, of whose folders each has these of its files; nothing
    where one has no file with the function."""
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
    loaded: Loaded, targets: Collection[str] | None, single: bool
) -> tuple[dict[str, Source], dict[str, str]]:
    """What the files of one spec are made of, and their texts."""
    with _blaming(loaded):
        sources = _settled(loaded, targets, single)
        return sources, {name: _file([loaded], source) for name, source in sources.items()}


def excerpts(loaded: Loaded, block: str) -> list[tuple[str, str]]:
    """Filename and text of each place where a block of that name is in the files of a spec, set in as little as can
    be."""
    with _blaming(loaded):
        return [
            (name, textwrap.dedent(_tidy(text)))
            for name, source in _settled(loaded, None, single=False).items()
            for text in _blocks(source, block)
        ]


def render_source(variants: Sequence[Loaded], source: Source) -> str:
    """A file that stands beside the kernels of a spec, from all its variants."""
    with _blaming(variants[0]):
        return _file(variants, source)


def render_package(loaded: Loaded, files: Collection[str]) -> str | None:
    """`__init__.py` of a folder that has these of the spec's files and no others; None where none has the spec's
    function."""
    from kgen.targets.package import package

    with _blaming(loaded):
        settled = _settled(loaded, None, single=False)
        whole = package(loaded, [source for name, source in settled.items() if name in files])
        return _file([loaded], whole) if whole else None


def render_text(loaded: Loaded, template: Template) -> str:
    """A file of the user's to start from, without a header."""
    with _blaming(loaded):
        return _tidy(environment.rendered(template))


def _blaming(loaded: Loaded) -> AbstractContextManager[None]:
    return blaming(f"spec `{loaded.spec.name}` ({Path(loaded.path).name})")


def _settled(loaded: Loaded, targets: Collection[str] | None, single: bool) -> dict[str, Source]:
    """What each file is made of, with names within it that mean one thing each."""
    sources = (_single if single else _sources)(named_apart(loaded), targets)
    if any(loaded.spec.name in source.reserved for source in sources.values()):
        raise KgenError([refusal(loaded, loaded.spec.name)])
    return sources


def _blocks(source: Source, block: str) -> list[str]:
    """The texts of the blocks of a name in a file and in every template within it."""
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
    """What each file is made of."""
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
    """Whether it is one of a module, or of another file that may lie beside it: `triton.py`, `cuda.cu`."""
    stem, _, kind = name.partition(".")
    return name.isascii() and stem.isidentifier() and kind.isalpha() and kind.islower()


def _single(loaded: Loaded, targets: Collection[str] | None) -> dict[str, Source]:
    """What the one file is made of that does without others: of several the one that is called by default."""
    files = [file for file in _sources(loaded, targets).values() if file.alone is not None]
    source = max(files, key=lambda file: file.rank or 0, default=None)
    if source is None:
        message = f"`{loaded.spec.name}` has no file that does without others"
        hint = "render its folder, or ask for the target triton"
        raise KgenError(Diagnostic("no-single-file", message, file=str(loaded.path), hint=hint))
    assert source.alone is not None
    name = f"{loaded.spec.name}.py"
    return {name: replace(source, filename=name, text=source.alone)}


def _body(source: Source) -> str:
    """One file without its header, and without trailing blanks: templates need not mind where a fragment is empty."""
    text = _with_imports(_tidy(environment.rendered(source.text)))
    if environment.DIGEST_OF_CODE not in text:
        return text
    # Two spellings of one kernel have the same code, and by it the same names of operators.
    return text.replace(environment.DIGEST_OF_CODE, digest(program(text.encode(), ".py").decode()))


def _with_imports(text: str) -> str:
    """The text of a file with the names that it imports from `_launch.py`: those that it uses."""
    if environment.LAUNCH_NAMES not in text:
        return text
    tree = ast.parse(text.replace(environment.LAUNCH_NAMES, "_"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return text.replace(environment.LAUNCH_NAMES, imported(used & _launch_names()))


@cache
def _launch_names() -> frozenset[str]:
    """The names that `_launch.py` defines."""
    table = symtable.symtable(environment.rendered(LAUNCH_FILE), FILENAME, "exec")
    return frozenset(s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported())


def _tidy(rendered: str) -> str:
    return "\n".join(line.rstrip() for line in rendered.split("\n")).strip("\n") + "\n"


def _file(loaded: Sequence[Loaded], source: Source) -> str:
    """A file of a spec, or of all its variants."""
    if source.shared:
        inputs = digest(
            "\0".join(f"{name}\0{text}" for name, text in environment.texts_of(source.text).items())
        )
        return stamp_shared(_body(source), source.comment, inputs=inputs, spdx=loaded[0].spec.license)
    return stamp(
        _body(source),
        source.comment,
        spec=loaded[0].spec.name,
        spec_file=UserText(Path(loaded[0].path).name),
        inputs=_inputs_hash(loaded, source),
        spdx=loaded[0].spec.license,
    )


def _inputs_hash(loaded: Sequence[Loaded], source: Source) -> str:
    """Stands for the spec as understood (comments and layout of its YAML do not count) and its templates.

    The model keeps its order: that of buffers is the order of the launcher's arguments.
    """
    texts = environment.texts_of(source.text)
    models = (one.spec.model_dump_json() for one in loaded)
    return digest("\0".join([*models, *(f"{name}\0{text}" for name, text in texts.items())]))
