"""What detlab shows: figures, a report, and the notebook's panel. It sees results, never models."""

from detlab.viz.class_maps import class_map_figure
from detlab.viz.figures import heatmap, overview
from detlab.viz.report import report_html, write_report
from detlab.viz.trees import draw_tree, draw_trees
from detlab.viz.why import noise_budget
from detlab.viz.widgets import Explorer
from detlab.viz.workbench import Workbench

__all__ = [
    "Explorer", "Workbench", "class_map_figure", "draw_tree", "draw_trees", "heatmap", "noise_budget", "overview",
    "report_html", "write_report",
]  # fmt: skip
