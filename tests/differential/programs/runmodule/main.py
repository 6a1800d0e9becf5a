#: shell: $PYTHON -m app x; $PYTHON -m app.work; echo 'import app.work; print(app.work.SCORE)' | $PYTHON -; $PYTHON -c 'from tinyrl import Trainer; print(Trainer().fit(), __name__, __builtins__)'; $PYTHON app; $PYTHON -m no_such_module; $PYTHON -m tinyrl; $PYTHON no_such_file.py
"""-m, -c, standard input, a folder, and what is not there."""
