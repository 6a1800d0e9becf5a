import time

time.sleep(0.1)
from tinyrl import Trainer

VALUE = f"actor {Trainer().fit()}"
