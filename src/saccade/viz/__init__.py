"""Draw figures of arrays and attention matrices with matplotlib, which is imported when the first figure is drawn."""

from typing import TYPE_CHECKING

from saccade.support.language import set_language
from saccade.support.name_hints import other_names
from saccade.viz.bipartite import bipartite
from saccade.viz.canvas import save
from saccade.viz.charts import channel_weights, profile, tradeoff
from saccade.viz.fonts import MissingGlyphsWarning
from saccade.viz.grids import head_grid
from saccade.viz.heatmaps import heatmap
from saccade.viz.mosaics import mosaic
from saccade.viz.overlays import spatial_map
from saccade.viz.page import live_report, report, report_widget
from saccade.viz.patch_overlays import overlay

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "heatmap",
    "mosaic",
    "head_grid",
    "profile",
    "bipartite",
    "channel_weights",
    "spatial_map",
    "overlay",
    "tradeoff",
    "report",
    "live_report",
    "report_widget",
    "set_language",
    "save",
    "MissingGlyphsWarning",
]
