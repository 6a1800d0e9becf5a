MINE = "mine"
