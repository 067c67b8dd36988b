"""An HTML page that shows any model's attention, at full length, without a network connection."""

from saccade.viz.page.html_report import report
from saccade.viz.page.live import live_report
from saccade.viz.page.widget import report_widget

__all__ = ["live_report", "report", "report_widget"]
