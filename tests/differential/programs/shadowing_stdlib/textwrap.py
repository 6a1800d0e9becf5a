MINE = "textwrap"
