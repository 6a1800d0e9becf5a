#: set: PYTHONHASHSEED=0
"""Random numbers with a seed, which stages do not change."""

import random
import uuid

from tinyrl import Trainer

random.seed(1)
print(Trainer().fit(inside=random.random), random.getstate()[1][:3], hash("a"), len(str(uuid.uuid4())))
print(random.Random(3).random(), [id(a) == id(a) for a in "ab"], list({"a", "b", "c", "d"}))
