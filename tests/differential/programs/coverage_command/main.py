#: needs: coverage
#: shell: . ./commands
"""`coverage run` and its report."""

from tinyrl import Trainer

print(Trainer().fit(), Trainer.reward("a"))
