"""What detlab shows: figures, a report, and the notebook's panel. It sees results, never models."""

from detlab.viz.figures import heatmap, overview
from detlab.viz.report import report_html, write_report
from detlab.viz.widgets import Explorer

__all__ = ["Explorer", "heatmap", "overview", "report_html", "write_report"]
