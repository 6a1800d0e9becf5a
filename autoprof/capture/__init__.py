"""Recording in this process: captures, profilers, the files of a capture, and the finisher process."""
