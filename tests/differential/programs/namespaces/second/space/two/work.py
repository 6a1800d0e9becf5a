from tinyrl import Trainer
