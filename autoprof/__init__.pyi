from autoprof.behaviours.blocks import stage as stage
from autoprof.behaviours.blocks import step as step
from autoprof.behaviours.session import load_ipython_extension as load_ipython_extension
from autoprof.behaviours.session import start as start
from autoprof.behaviours.session import stop as stop

__version__: str
