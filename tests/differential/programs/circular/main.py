"""Modules that import each other and a hooked module while they are partly initialised."""

import circle.a
import circle.b

print(circle.a.Trainer().fit(), circle.b.late(), circle.a.SEEN, circle.b.SEEN)
try:
    import circle.broken
except ImportError as error:
    print(error.name, str(error).split("(")[0])
