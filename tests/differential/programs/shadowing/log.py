MINE = "log"
