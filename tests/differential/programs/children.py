"""subprocess in stages: output, status, time-outs, pipes, process groups, closed descriptors."""

import subprocess
import sys

from tinyrl import Trainer


def work():
    print(subprocess.run(["echo", "a"], capture_output=True))
    print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv); sys.exit(3)", "b"], capture_output=True))
    print(subprocess.check_output("echo $0 $PPID | wc -w; ls | wc -l", shell=True))
    try:
        subprocess.run(["sleep", "9"], timeout=0.2)
    except subprocess.TimeoutExpired as error:
        print(error.cmd, error.output)
    pipe = subprocess.Popen(["cat"], stdin=-1, stdout=-1, start_new_session=True, close_fds=True)
    print(pipe.communicate(b"through"))
    code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    print(subprocess.check_output([sys.executable, "-c", code], close_fds=False))
    try:
        subprocess.run(["no-such-program"])
    except FileNotFoundError as error:
        print(error)
    print(subprocess.run([sys.executable, "-c", "x"], capture_output=True, env={}).stderr)


Trainer().fit(1, work)
