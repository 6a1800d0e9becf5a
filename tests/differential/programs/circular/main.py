"""Modules that import each other, and a hooked one, while they are half made."""

import circle.a
import circle.b

print(circle.a.Trainer().fit(), circle.b.late(), circle.a.SEEN, circle.b.SEEN)
try:
    import circle.broken
except ImportError as error:
    print(error.name, str(error).split("(")[0])
