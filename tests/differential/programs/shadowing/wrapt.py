MINE = "wrapt"
