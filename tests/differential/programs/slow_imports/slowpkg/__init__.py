import time

time.sleep(0.2)
from slowpkg import other
import tinyrl

VALUE = "package"
