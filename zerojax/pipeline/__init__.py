"""Pipeline parallelism: stages of layers on the devices of `pipe`, microbatches passing through."""

from zerojax.pipeline.schedule import build_pipeline_schedule as build_pipeline_schedule
