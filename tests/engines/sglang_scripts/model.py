"""Maker of the tiny model of examples/verl_cpu with this environment's own transformers: model.py FOLDER

Older releases of SGLang need transformers 4, which can't read a tokenizer saved by transformers 5.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "verl_cpu"))

from make_assets import make_model, make_tokenizer

folder = Path(sys.argv[1])
make_model(folder, make_tokenizer(folder))
