"""Attention over a sequence that the mesh axis `context` splits.

interface    `attention`: arguments, the choice of a method, errors
scores       scores, and which keys a query sees
blocks       running softmax over blocks of queries and keys, and its derivative
zigzag       the order of tokens in which a causal ring does equal work everywhere
ring, ulysses, gathered, local    the methods: one device's forward and backward
cudnn        cuDNN's kernel in place of blocks
call         what the methods share: options, operands, what backward reads
derivative   the attention as one equation, and its islands on the mesh
"""

from zerojax.context.cudnn import find_fault as find_fault
from zerojax.context.interface import attention as attention
