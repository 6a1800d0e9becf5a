MINE = "runtime"
