"""What a run did and why, from its run log: figures, pictures, HTML, stories, comparison, live view.

Reads only. These names are the room's interface; importing them is cheap (matplotlib, h5py and rich come when needed).
The functions `explain` and `compare` are imported here at once on purpose: so their names stay functions, not the
modules of the same name.
"""

from hybridsched.report.compare import compare
from hybridsched.report.explain import explain
from hybridsched.report.html import write_html
from hybridsched.report.live import LiveView, StatusLine
from hybridsched.report.summary import summarize

__all__ = ["LiveView", "StatusLine", "compare", "explain", "summarize", "write_html"]
