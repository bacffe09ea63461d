"""Files on disk that are not what their specs render to."""

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
    """By the path of each spec, the files in its own folders that differ from what it renders to now.

    Files that are not there count, too, unless a spec has none at all: then it is not rendered. Manifests and adapters
    do not count. Where the cache of `kgen render` vouches for the files, nothing is rendered.
    """
    own = {name for one in loaded for name in (one.folder, one.spec.name)}
    found: dict[Path, list[Change]] = {}
    for path in dict.fromkeys(one.path for one in loaded if (generated / one.folder).is_dir()):
        (rendered,) = project.render_all([path], generated, cached=True)
        if rendered.spec_text is None:
            continue
        outputs = [output for output in rendered.outputs if output.name in own]
        changes = [change for output in outputs for change in writer.file_changes(output, generated)]
        differ = [change for change in changes if change.state != "unchanged"]
        if differ and any(change.old is not None for change in changes):
            found[path] = differ
    return found


def of_the_same_text(change: Change) -> bool:
    """True unless the header of the file names another text of the spec, or other templates."""
    if change.old is None or change.text is None:
        return True
    return inputs_hash(change.old.decode("utf-8", "replace")) == inputs_hash(change.text)
