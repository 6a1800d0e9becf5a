MINE = "calendar"
