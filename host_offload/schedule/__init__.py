"""Which record moves at which tick of a train step: pure functions and data."""

from host_offload.schedule.build import advise as advise
from host_offload.schedule.build import build_schedule as build_schedule
from host_offload.schedule.moves import Move as Move
from host_offload.schedule.moves import Window as Window
from host_offload.schedule.moves import horizon_of as horizon_of
from host_offload.schedule.moves import moves_of as moves_of
from host_offload.schedule.schedule import Phase as Phase
from host_offload.schedule.schedule import Schedule as Schedule
from host_offload.schedule.stacks import StackedSchedule as StackedSchedule
from host_offload.schedule.stacks import layers_kind as layers_kind
from host_offload.schedule.stacks import stacked_schedule as stacked_schedule
from host_offload.schedule.tiles import TiledSchedule as TiledSchedule
from host_offload.schedule.tiles import TileLoops as TileLoops
from host_offload.schedule.tiles import build_tiled_schedule as build_tiled_schedule
from host_offload.schedule.tiles import tiles_kind as tiles_kind
from host_offload.schedule.timeline import COLOURS as COLOURS
