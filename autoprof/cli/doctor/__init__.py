"""Command `autoprof doctor`: checks of an environment or a run."""
