"""model.py FOLDER: makes the tiny model of examples/verl_cpu with this environment's own transformers.

A tokenizer that transformers 5 saved can't be read by transformers 4, which older SGLangs need.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "verl_cpu"))

from make_assets import make_model, make_tokenizer

folder = Path(sys.argv[1])
make_model(folder, make_tokenizer(folder))
