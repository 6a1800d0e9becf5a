#: python: -m doctest {script}
"""doctest.

>>> from tinyrl import Trainer
>>> Trainer().fit()
['done', 'done']
>>> Trainer().update(lambda: 1 / 0)
Traceback (most recent call last):
    ...
ZeroDivisionError: division by zero
>>> Trainer.update.__doc__
'Update.'
"""
