"""A thread that looks now and then where this process stands, and writes it down when somebody asks."""
