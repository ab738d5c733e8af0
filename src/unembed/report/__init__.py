"""Records -> a report: Markdown, and one page that needs nothing else.

`story.py` gathers what is to be told, `markdown.py` and `page.py` tell it, `plots.py` draws. All of them
know records and figures, and none knows how a text is recovered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unembed.records import Records
from unembed.report.markdown import markdown
from unembed.report.page import page
from unembed.report.story import tell
from unembed.whole import write_whole

__all__ = ["write_report"]


def write_report(records: Sequence[Records], folder: str | Path, *, title: str | None = None) -> list[Path]:
    """Write report.md and index.html to a folder; return where they are."""
    story, folder = tell(records, title=title), Path(folder)
    written = {folder / "report.md": markdown(story), folder / "index.html": page(story)}
    for path, text in written.items():
        write_whole(path, text)
    return list(written)
