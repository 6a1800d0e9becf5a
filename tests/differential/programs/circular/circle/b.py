import circle.a

SEEN = hasattr(circle.a, "Trainer")


def late():
    return circle.a.Trainer().fit(1)
