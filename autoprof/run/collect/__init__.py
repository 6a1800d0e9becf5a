"""Collecting the parts of a run that its nodes have on disks of their own."""
