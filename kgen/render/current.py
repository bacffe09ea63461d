"""Files on disk that differ from the rendering of their specs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.render import project, writer
from kgen.render.header import inputs_hash
from kgen.render.writer import Change

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


def differing(loaded: Sequence[Loaded], generated: Path) -> dict[Path, list[Change]]:
    """Return the files in the folders of each spec that differ from its rendering, by the path of
    the spec.

    A missing file counts, unless all files of a spec are missing. Manifests and adapters do not
    count. On a hit in the cache of `kgen render`, the spec is not rendered.
    """
    own = {name for one in loaded for name in (one.folder, one.spec.name)}
    found: dict[Path, list[Change]] = {}
    for path in dict.fromkeys(one.path for one in loaded if (generated / one.folder).is_dir()):
        (rendered,) = project.render_all([path], generated, cached=True)
        if rendered.spec_text is None:
            continue
        outputs = [output for output in rendered.outputs if output.name in own]
        changes = [
            change for output in outputs for change in writer.file_changes(output, generated)
        ]
        differ = [change for change in changes if change.state != "unchanged"]
        if differ and any(change.old is not None for change in changes):
            found[path] = differ
    return found


def of_the_same_text(change: Change) -> bool:
    """True unless the header of the file shows that the text of the spec, or a template, has
    changed.
    """
    if change.old is None or change.text is None:
        return True
    return inputs_hash(change.old.decode("utf-8", "replace")) == inputs_hash(change.text)
