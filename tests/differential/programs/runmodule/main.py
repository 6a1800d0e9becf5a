#: shell: . ./commands
"""-m, -c, standard input, a folder, and a missing file."""
