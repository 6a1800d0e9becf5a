#: needs: opentelemetry
"""Spans of OpenTelemetry around stages, in threads and tasks."""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tinyrl import Trainer

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("mine")


@tracer.start_as_current_span("work")
def work():
    return trace.get_current_span().name


async def awork(*_):
    with tracer.start_as_current_span("inner"):
        await asyncio.sleep(0)


with tracer.start_as_current_span("outer"):
    print(Trainer().fit(inside=work))
    asyncio.run(Trainer().afit(inside=awork))
names = {span.context.span_id: span.name for span in exporter.get_finished_spans()}
print([(span.name, span.parent and names.get(span.parent.span_id)) for span in exporter.get_finished_spans()])
