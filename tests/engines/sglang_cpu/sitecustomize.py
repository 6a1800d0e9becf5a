"""Lets SGLang run on a CPU without CUDA packages: put this folder on PYTHONPATH."""

import stand_ins

stand_ins.install()
