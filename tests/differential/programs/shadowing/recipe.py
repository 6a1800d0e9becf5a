MINE = "recipe"
