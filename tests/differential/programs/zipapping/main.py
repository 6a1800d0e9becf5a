#: shell: $PYTHON -m zipapp app -o app.pyz && rm -r app && exec $PYTHON app.pyz a b
"""zipapp whose package is imported from the archive, with its data."""
