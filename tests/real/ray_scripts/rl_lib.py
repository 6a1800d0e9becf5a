"""Library with Ray actors, used as a target. Some classes are decorated, one is passed to ray.remote() later."""

import os

import ray


class _Work:
    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote
class Decorated:
    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote(num_cpus=0)
class DecoratedWithOptions(_Work):
    def work(self, value):
        return super().work(value)


class Base:
    """Undecorated base class in the module of the actor class."""

    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote
class Inherits(Base):
    """Actor class that inherits its methods."""


class Later:
    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote
class Server:
    """Server actor without start_profile."""

    async def generate(self, value):
        return value
