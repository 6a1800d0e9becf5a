MINE = "importing"
