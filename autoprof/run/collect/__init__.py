"""Collection of the files of a run from nodes with separate disks."""
