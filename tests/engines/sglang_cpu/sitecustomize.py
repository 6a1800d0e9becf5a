"""Patches that let SGLang run on a CPU without CUDA packages; active if this folder is on PYTHONPATH."""

import stand_ins

stand_ins.install()
