"""Rows, the most important first, in case the run is cut off.

Each module registers its rows when it is imported here.
"""

# The order of these imports is the order of the rows.
# ruff: noqa: I001
from bench.gpu.rows import basics as basics
from bench.gpu.rows import contents as contents
from bench.gpu.rows import trainers as trainers
from bench.gpu.rows import memory as memory
from bench.gpu.rows import causes as causes
from bench.gpu.rows import several as several
from bench.gpu.rows import conflicts as conflicts
from bench.gpu.rows import cost as cost
from bench.gpu.rows import engines as engines
from bench.gpu.facts import ROWS as ROWS
