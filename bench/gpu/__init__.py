"""Test of autoprof on a GPU, in one command: `make gpu`, or `python -m bench.gpu`.

A row (`rows/`) runs programs (`programs/`) and yields facts, each with a figure. The runner (`runner.py`) prints them,
and writes one JSON and one table after each fact. The runner and the rows use only the standard library. The machine
needs torch and transformers; other packages may come from a folder of wheels (`wheels.py`). Nothing is installed.
"""
