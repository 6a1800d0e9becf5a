"""Stand-in for `nsys`: `profile` runs the command, and writes a report for each window that the process closes.

The process reports windows by lines in the file named by NSYS_STAND_IN_WINDOWS. Writing a report takes
NSYS_STAND_IN_WRITES_S seconds, during which a `.qdstrm` and then half of the report exist. The stand-in writes its
options into the folder NSYS_STAND_IN_LOG.
"""

import json
import os
import subprocess
import sys
import time


def main():
    if sys.argv[1:] == ["--version"]:
        print("NVIDIA Nsight Systems version 2026.1.1.0-stand-in")
        return 0
    if sys.argv[1:] == ["profile", "--help"]:
        print("--capture-range-end=none|stop|stop-shutdown|repeat[:N][:mode]|repeat-shutdown:N[:mode]")
        return 0
    options, command = split(sys.argv[2:])
    log = os.environ.get("NSYS_STAND_IN_LOG", "/nowhere")
    windows = os.path.join(log, f"windows-{os.getpid()}")
    child = subprocess.Popen(
        command, env=os.environ | {"NSYS_PROFILING_SESSION_ID": "1", "NSYS_STAND_IN_WINDOWS": windows}
    )
    output = (options.get("output") or options["o"]).replace("%p", str(child.pid))
    with open(os.path.join(log, f"{child.pid}.json"), "w") as file:
        json.dump({"options": options, "command": command, "output": output}, file)
    at_once = options.get("capture-range-end", "").endswith(":async")
    written = 0
    while True:
        ended = child.poll() is not None
        while (at_once or ended) and written < closed(windows):
            written += 1
            write(f"{output}.{written}", f"window {written} of {child.pid}")
        if ended:
            return child.returncode
        time.sleep(0.05)


def split(arguments):
    options = {}
    while arguments[0].startswith("-"):
        word = arguments.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        options[name] = value if equals else arguments.pop(0)
    return options, arguments


def closed(windows):
    try:
        with open(windows) as file:
            return file.read().split().count("stop")
    except FileNotFoundError:
        return 0


def write(base, content):
    pause = float(os.environ.get("NSYS_STAND_IN_WRITES_S", 1)) / 2
    with open(f"{base}.qdstrm", "w"):
        time.sleep(pause)
        with open(f"{base}.nsys-rep", "w") as file:
            file.write(content[:3])
            file.flush()
            time.sleep(pause)
            file.write(content[3:])
    os.unlink(f"{base}.qdstrm")


sys.exit(main())
