import time

time.sleep(0.1)
import tinyrl.trainer

VALUE = "other"
