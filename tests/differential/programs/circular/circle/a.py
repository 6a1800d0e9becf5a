import circle.b
from tinyrl import Trainer

SEEN = hasattr(circle.b, "late")
