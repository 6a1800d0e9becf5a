"""Collection of a run's parts from nodes with separate disks."""
