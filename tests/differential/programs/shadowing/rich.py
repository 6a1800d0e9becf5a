MINE = "rich"
