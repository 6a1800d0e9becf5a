"""A report as data. `autoprof report --json` prints it as it is; pages and tables draw from it.

Times: `_ns` are ns since the epoch, `_s` are seconds; `start_s` and `end_s` count from the step's start and may lie
before or after it. Shares are from 0 to 1. Files are named relative to the run directory. What is not known is None.
"""
