import tinyrl.trainer

VALUE = "user"
