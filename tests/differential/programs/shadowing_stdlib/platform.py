MINE = "platform"
