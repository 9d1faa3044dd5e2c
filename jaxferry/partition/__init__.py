"""Cuts a loss function into segments: `partition` finds them, `print_table` shows them.

loss_fn --trace--> graph --analyse--> dataflow --cuts--> stretches --> segments --> derivative of each program

`partition_forward` cuts any function of parameters for a run without derivatives.
"""

from jaxferry.partition.build import layers_by_path, partition, partition_forward
from jaxferry.partition.byte_order import check_byte_order
from jaxferry.partition.cuts import Merge
from jaxferry.partition.derivative import AUTO, REMAT, Derivative, differentiate
from jaxferry.partition.frozen import Trainable, frozen_leaves
from jaxferry.partition.graph import with_flags
from jaxferry.partition.host_reads import read_in_place
from jaxferry.partition.host_stores import store_in_place
from jaxferry.partition.layout import Layer, Leaf, Part, Span, Transfer, make_layer, wide_dtype
from jaxferry.partition.ownership import OwnedLayer, Ownership, held_whole
from jaxferry.partition.remat import check_remat, remat_of, with_remat
from jaxferry.partition.rows import Gradient, RowGradient
from jaxferry.partition.segments import ForwardPartition, Partition, Segment, Use
from jaxferry.partition.shared_layout import SharedLayer, shared
from jaxferry.partition.table import print_table, table
from jaxferry.partition.tracing import traced_jaxpr

__all__ = [
    "AUTO",
    "REMAT",
    "Derivative",
    "ForwardPartition",
    "Gradient",
    "Layer",
    "Leaf",
    "Merge",
    "OwnedLayer",
    "Ownership",
    "Part",
    "Partition",
    "RowGradient",
    "Segment",
    "SharedLayer",
    "Span",
    "Trainable",
    "Transfer",
    "Use",
    "check_byte_order",
    "check_remat",
    "differentiate",
    "frozen_leaves",
    "held_whole",
    "layers_by_path",
    "make_layer",
    "partition",
    "partition_forward",
    "print_table",
    "read_in_place",
    "remat_of",
    "shared",
    "store_in_place",
    "table",
    "traced_jaxpr",
    "wide_dtype",
    "with_flags",
    "with_remat",
]
