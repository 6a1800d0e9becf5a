"""sys.settrace and sys.setprofile of the user, set before and in stages."""

import sys
import threading

from tinyrl import Trainer

seen = []


def trace(frame, event, argument):
    if "tinyrl" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        seen.append((frame.f_code.co_name, event))
    return trace


Trainer().fit()
sys.settrace(trace)
Trainer().fit(1)
sys.settrace(None)
print(seen)
seen.clear()


def profile(frame, event, argument):
    if "tinyrl" in frame.f_code.co_filename and event in ("call", "return"):
        seen.append((frame.f_code.co_name, event))


sys.setprofile(profile)
Trainer().fit(1)
print(sys.getprofile() is profile, sys.gettrace())
sys.setprofile(None)
print(seen)
seen.clear()
Trainer().update(lambda: sys.setprofile(profile))
Trainer().update(lambda: None)
Trainer().update(lambda: sys.setprofile(None))
print(seen)
threading.setprofile(profile)
threading.settrace(trace)
seen.clear()
thread = threading.Thread(target=Trainer().update)
thread.start()
thread.join()
print(seen, threading.getprofile() is profile)
