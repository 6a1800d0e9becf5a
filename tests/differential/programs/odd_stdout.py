"""Output streams of the user: redirected, captured, in another encoding."""

import contextlib
import io
import sys

from tinyrl import Trainer

out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    Trainer().fit(inside=lambda: print("captured"))
print(repr(out.getvalue()), repr(err.getvalue()))
sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace", line_buffering=True)
Trainer().fit(1, lambda: print("ä\ud800"))
print(sys.stdout.encoding, sys.stderr.encoding, sys.stdout.line_buffering)
