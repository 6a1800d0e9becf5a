"""Benchmarks of autoprof beside similar tools (peers): `make bench`, or `python -m bench [--quick] [NAMES...]`.

Each module is one benchmark. It has the number of its turns (`TURNS`, `QUICK`) and `run(turns)`, which returns its
tables and goals. RESULTS.md quotes its docstring. Programs that need a separate process are in `children/`.
"""
