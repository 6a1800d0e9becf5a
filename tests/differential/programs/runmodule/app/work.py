from tinyrl import score

SCORE = score(["a"])
print(__name__)
