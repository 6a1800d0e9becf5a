MINE = "statistics"
