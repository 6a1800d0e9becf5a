"""Driver that calls actors of every kind, and prints as JSON in which process each call ran.

driver.py ADDRESS|local [FOLDER]: with a folder, workers find a package `autoprof` there that raises on import.
"""

import json
import os
import sys

import ray
import rl_lib


class InMain:
    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


class PlainInMain:
    def work(self, value):
        return value + 1, os.getpid()


@ray.remote
class UsesMain:
    def work(self, value):
        return PlainInMain().work(value)


@ray.remote
class Shows:
    def environment(self):
        return {name: value for name, value in os.environ.items() if name.startswith(("AUTOPROF", "MINE"))}

    def modules(self):
        return sorted(name for name in sys.modules if name.split(".")[0] == "autoprof")


def main():
    address, *hidden = sys.argv[1:]
    variables = {"MINE": "kept", "PYTHONPATH": os.pathsep.join([*hidden, os.path.dirname(os.path.abspath(__file__))])}
    if os.environ.get("USER_STEPS"):
        variables["AUTOPROF_STEPS"] = os.environ["USER_STEPS"]
    local = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100_000_000}
    ray.init(
        address=address,
        runtime_env={"env_vars": variables},
        log_to_driver=True,
        **(local if address == "local" else {}),
    )
    called = {}
    kinds = {
        "Decorated": rl_lib.Decorated,
        "DecoratedWithOptions": rl_lib.DecoratedWithOptions,
        "Inherits": rl_lib.Inherits,
        "Later": ray.remote(rl_lib.Later),
        "InMain": ray.remote(InMain),
    }
    for name, kind in kinds.items():
        actor = kind.remote()
        for method in ("work", "awork"):
            value, pid = ray.get(getattr(actor, method).remote(41))
            called[f"{name}.{method}"] = [value, pid]
    called["PlainInMain.work"] = ray.get(UsesMain.remote().work.remote(41))
    server = rl_lib.Server.remote()
    asked = (
        ray.get(server.start_profile.remote(autoprof={"action": "stop"})) if "start_profile" in dir(server) else None
    )
    shows = Shows.remote()
    shown = {"environment": ray.get(shows.environment.remote()), "modules": ray.get(shows.modules.remote())}
    print("RESULT " + json.dumps({"called": called, "asked": asked, "driver": os.getpid(), **shown}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
