"""Brings the parts of a run together that its nodes have on disks of their own."""
