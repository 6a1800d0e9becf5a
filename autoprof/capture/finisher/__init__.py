"""Process that compresses, names and completes the files of a capture. Standard library only."""
