"""Benchmarks of autoprof and of similar tools (peers): `make bench`, or `python -m bench [--quick] [NAMES...]`.

Each benchmark is a module. `TURNS` and `QUICK` are its numbers of turns, without and with `--quick`. `run(turns)`
returns the tables and goals. RESULTS.md quotes the docstring of the module. Programs that need a separate process are
in `children/`.
"""
