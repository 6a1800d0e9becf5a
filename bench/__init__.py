"""The benchmarks, and the peers they are run against: `make bench`, or `python -m bench [--quick] [NAMES...]`.

One benchmark is one module. It says how often it takes its turns (`TURNS`, `QUICK`) and has `run(turns)`, which returns
its tables and goals; its docstring is what RESULTS.md says about it. Code that must run by itself is in `children/`.
"""
