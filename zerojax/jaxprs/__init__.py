"""Traced programs as flat lists of equations, and the code that their interpreters share.

    flat         `flatten`: a jaxpr as instructions over slots, with nested `jit` calls inlined
    regions      control flow: the jaxprs in an equation, and the equation with other jaxprs in it
    analysis     a fact for every value, followed through equations and control flow
    entered      the table of the equations that each interpreter enters
    primitives   kinds of equations
    parameters   names that differ between versions of jax
    flops        the products in an equation

Interpreters import these names from here.
"""

from zerojax.jaxprs.analysis import Analysis as Analysis
from zerojax.jaxprs.entered import ENTERED as ENTERED
from zerojax.jaxprs.flat import BY_POSITION as BY_POSITION
from zerojax.jaxprs.flat import Constant as Constant
from zerojax.jaxprs.flat import FlatJaxpr as FlatJaxpr
from zerojax.jaxprs.flat import Instruction as Instruction
from zerojax.jaxprs.flat import Ref as Ref
from zerojax.jaxprs.flat import bind as bind
from zerojax.jaxprs.flat import evaluate as evaluate
from zerojax.jaxprs.flat import flatten as flatten
from zerojax.jaxprs.flat import is_among as is_among
from zerojax.jaxprs.flat import only_live as only_live
from zerojax.jaxprs.flat import read as read
from zerojax.jaxprs.flat import trace as trace
from zerojax.jaxprs.flops import FUSED_ATTENTION as FUSED_ATTENTION
from zerojax.jaxprs.flops import count_flops as count_flops
from zerojax.jaxprs.flops import dtype_of_products as dtype_of_products
from zerojax.jaxprs.flops import find_product as find_product
from zerojax.jaxprs.parameters import called as called
from zerojax.jaxprs.parameters import manual_axes as manual_axes
from zerojax.jaxprs.primitives import CHEAP as CHEAP
from zerojax.jaxprs.primitives import CUSTOM_DERIVATIVES as CUSTOM_DERIVATIVES
from zerojax.jaxprs.primitives import ELEMENTWISE as ELEMENTWISE
from zerojax.jaxprs.primitives import FILLS as FILLS
from zerojax.jaxprs.primitives import INLINED as INLINED
from zerojax.jaxprs.primitives import LINEAR as LINEAR
from zerojax.jaxprs.primitives import POINTWISE as POINTWISE
from zerojax.jaxprs.primitives import PRODUCTS as PRODUCTS
from zerojax.jaxprs.primitives import REDUCTIONS as REDUCTIONS
from zerojax.jaxprs.primitives import REMAT as REMAT
from zerojax.jaxprs.regions import Function as Function
from zerojax.jaxprs.regions import Region as Region
from zerojax.jaxprs.regions import checkpointed as checkpointed
from zerojax.jaxprs.regions import list_regions as list_regions
from zerojax.jaxprs.regions import rebind as rebind
from zerojax.jaxprs.regions import rebind_scan as rebind_scan
from zerojax.jaxprs.regions import rebind_shard_map as rebind_shard_map
