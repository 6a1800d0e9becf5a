MINE = "msgspec"
