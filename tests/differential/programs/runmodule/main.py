#: shell: . ./commands
"""-m, -c, standard input, a folder, and what is not there."""
