MINE = "packaging"
