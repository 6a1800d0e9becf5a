"""Behaviours of hooks. Each package contains the behaviours for one kind of target."""
