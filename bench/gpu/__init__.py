"""One command that shows on a GPU what autoprof does there: `make gpu`, or `python -m bench.gpu`.

A row (`rows/`) runs programs (`programs/`) and yields facts, each with a figure. The runner (`runner.py`) prints them
and writes one JSON and one table after each. The runner and the rows use the standard library alone, and ask of the
machine nothing but torch and transformers; the rest may come from a folder of wheels (`wheels.py`). Nothing is
installed.
"""
