#: needs: ddtrace
#: set: DD_TRACE_ENABLED=false
#: set: DD_INSTRUMENTATION_TELEMETRY_ENABLED=false
#: set: DD_REMOTE_CONFIGURATION_ENABLED=false
"""Import hooks of ddtrace, and its patches of the standard library."""

import ddtrace.auto
from ddtrace import tracer
from tinyrl import Trainer


@tracer.wrap()
def work():
    return "traced"


print(Trainer().fit(inside=work), tracer.wrap()(Trainer().update)(lambda: 3))
