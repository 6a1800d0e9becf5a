import sys
from app.work import SCORE

print(SCORE, sys.argv[1:], __name__, __package__, __spec__ and __spec__.name)
