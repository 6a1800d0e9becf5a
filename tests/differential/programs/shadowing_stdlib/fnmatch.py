MINE = "fnmatch"
