#: captures: no
"""cProfile, profile, trace, pdb and timeit of a program with stages."""

import cProfile
import io
import pstats
import timeit
import trace

from tinyrl import Trainer

profiler = cProfile.Profile()
print(profiler.runcall(Trainer().fit))
stats = pstats.Stats(profiler, stream=io.StringIO())
# Count only non-recursive calls: from 3.12 on, the profiler mixes the calls of all threads.
print(sorted((key[2], value[0]) for key, value in stats.stats.items() if key[0].endswith("trainer.py")))
tracer = trace.Trace(count=1, trace=0)
tracer.runfunc(Trainer().fit)
counted = tracer.results().counts
print(sorted((line, count) for (path, line), count in counted.items() if path.endswith("trainer.py")))
print(timeit.timeit("Trainer().fit()", globals=globals(), number=3) > 0)
