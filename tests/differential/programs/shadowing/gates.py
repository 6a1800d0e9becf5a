MINE = "gates"
