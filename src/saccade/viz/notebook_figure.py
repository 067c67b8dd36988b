"""A matplotlib figure that a notebook displays. Importing this module imports matplotlib."""

import io

from matplotlib import figure


class Figure(figure.Figure):
    """A matplotlib figure that pyplot does not manage, and that Jupyter displays as the result of a cell."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
