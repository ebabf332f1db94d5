"""A layer stack over the devices of a mesh axis, in stages that work on different microbatches."""

from jaxmem.pipeline.pipelined import Pipelined as Pipelined
from jaxmem.pipeline.pipelined import pipeline as pipeline
from jaxmem.pipeline.plan import PipelinePlan as PipelinePlan
from jaxmem.pipeline.plan import PipelineStage as PipelineStage
from jaxmem.pipeline.schedule import PipelineSchedule as PipelineSchedule
