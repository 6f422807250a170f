"""Output of a notebook cell that can be updated in place."""

from __future__ import annotations

import io

from IPython.display import display
from rich.console import Console, RenderableType

_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)


class CellOutput:
    """Output of the running notebook cell; its content can be replaced.

    Args:
        content: content that is shown first.
        width: width of the output, in characters.
    """

    def __init__(self, content: RenderableType, width: int) -> None:
        self._width = width
        self._handle = display(self._bundle(content), raw=True, display_id=True)

    def replace(self, content: RenderableType) -> None:
        """Replaces the content."""
        self._handle.update(self._bundle(content), raw=True)

    def _bundle(self, content: RenderableType) -> dict[str, str]:
        console = Console(file=io.StringIO(), width=self._width, record=True, force_jupyter=False)
        console.print(content)
        return {
            "text/html": console.export_html(code_format=_HTML, inline_styles=True, clear=False),
            "text/plain": console.export_text(),
        }
