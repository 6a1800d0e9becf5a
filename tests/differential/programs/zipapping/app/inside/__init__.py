from tinyrl import Trainer


class Mine(Trainer):
    pass
