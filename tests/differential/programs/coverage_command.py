#: needs: coverage
#: shell: $PYTHON -m coverage run --source=tinyrl --data-file=data coverage_command.py && $PYTHON -m coverage report --data-file=data; rm -f data
"""`coverage run` and its report."""

from tinyrl import Trainer

print(Trainer().fit(), Trainer.reward("a"))
