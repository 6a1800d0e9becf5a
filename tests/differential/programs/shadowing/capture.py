MINE = "capture"
