from autoprof.behaviours.script.blocks import stage as stage
from autoprof.behaviours.script.blocks import step as step
from autoprof.behaviours.script.notebook import load_ipython_extension as load_ipython_extension
from autoprof.behaviours.script.session import start as start
from autoprof.behaviours.script.session import stop as stop

__version__: str
