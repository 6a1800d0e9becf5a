"""autoprof profiles LLM reinforcement-learning runs from outside: `AUTOPROF=1` in front of the command."""

__version__ = "0.1.0"
