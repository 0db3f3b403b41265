"""Pipeline parallelism: stages of layers on the devices of `pipe`, microbatches passing through."""

from zerojax.pipeline.check import check_pipeline as check_pipeline
from zerojax.pipeline.schedule import PipelineSchedule as PipelineSchedule
from zerojax.pipeline.schedule import build_pipeline_schedule as build_pipeline_schedule
from zerojax.pipeline.step import PipelineStep as PipelineStep
from zerojax.pipeline.ticks import PipelinePhase as PipelinePhase
