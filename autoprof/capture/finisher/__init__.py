"""The finisher: a process that compresses a trace, renames it and writes its meta file.

It uses only the standard library.
"""
