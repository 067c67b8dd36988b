"""A figure that a notebook shows. Imports matplotlib: asked for by the first figure that is drawn."""

import io

from matplotlib import figure

__all__ = ["Figure"]


class Figure(figure.Figure):
    """A figure of matplotlib that is shown where a cell of a notebook ends with it.

    pyplot does not know our figures, so that nobody has to close them; of its own accord Jupyter shows those of pyplot.
    """

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png")
        return written.getvalue()
