"""A library with Ray actors, as a target: decorated where it is defined, and passed to ray.remote() later."""

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
    """A base that is not decorated, in the module of the actor class."""

    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote
class Inherits(Base):
    """What runs are the methods of its base."""


class Later:
    def work(self, value):
        return value + 1, os.getpid()

    async def awork(self, value):
        return value + 1, os.getpid()


@ray.remote
class Server:
    """A server actor without start_profile."""

    async def generate(self, value):
        return value
