MINE = "queue"
