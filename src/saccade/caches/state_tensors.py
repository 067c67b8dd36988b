"""Leaf: the declaration of one tensor of a cache's state."""

from __future__ import annotations

from typing import NamedTuple


class Leaf(NamedTuple):
    """The declaration of one tensor of a cache's state: its name, axes and dtype.

    Args:
        name: name of the tensor in the state and in files.
        axes: names of its axes, such as ``"batch kv_heads columns head_dim"``. ``batch|1`` is an axis of size 1 if all
            items share a row. Along ``columns``, only the first `LayerCache.length` entries are used.
        dtype: ``float`` (the dtype of the keys), ``wide`` (float32, or float64 with float64 keys), ``positions``
            (int64, -1 at padding), ``int8`` or ``bool``.
        is_optional: whether the tensor may be missing.
        is_saved: whether the tensor is saved in files.
    """

    name: str
    axes: str
    dtype: str = "float"
    is_optional: bool = False
    is_saved: bool = True
