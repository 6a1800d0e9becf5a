MINE = "resource"
