"""Recorder of each process of a run, and of its imports of autoprof, verl, vLLM and Ray.

Each line is written immediately, because Ray kills its workers.
"""

import gc
import os
import sys


def _note(text: str) -> None:
    folder = os.environ.get("IMPORT_PROBE")
    if folder:
        descriptor = os.open(os.path.join(folder, f"{os.getpid()}.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (text + "\n").encode())
        os.close(descriptor)


def _watch(event: str, arguments: tuple) -> None:
    if event == "import" and arguments[0].split(".")[0] in ("autoprof", "verl", "vllm", "ray"):
        _note(f"import {arguments[0]}")


# Imports take most of a run, and garbage collection takes a sixth of an import without finding garbage.
gc.set_threshold(50_000, 20, 100)
_note(f"start {' '.join(sys.orig_argv)}")
for _name in [name for name in sys.modules if name.split(".")[0] == "autoprof"]:
    _note(f"import {_name}")
sys.addaudithook(_watch)
if any(word.startswith("verl.") for word in sys.orig_argv[1:3]):
    import wrapt

    @wrapt.when_imported("ray._private.state")
    def _take_job_ids(module):
        """Take the first job ids of this cluster, another number for each worker of pytest.

        verl 0.9.1 names its sockets for new weights by the job id, so two runs need different ids.
        """
        next_job_id = module.GlobalState.next_job_id

        def later_job_id(self):
            for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])):
                next_job_id(self)
            return next_job_id(self)

        module.GlobalState.next_job_id = later_job_id


if os.environ.get("FAULTS"):
    import inject_faults  # noqa: F401
