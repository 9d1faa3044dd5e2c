"""From a loss function to segments: `partition`, and `print_table` to see what was found.

loss_fn --trace--> graph --analyse--> dataflow --cuts--> stretches --> segments --> derivative of each program
"""

from jaxferry.partition.build import layers_by_path, partition
from jaxferry.partition.cuts import Merge
from jaxferry.partition.derivative import REMAT, Derivative, differentiate
from jaxferry.partition.frozen import Trainable, frozen_leaves
from jaxferry.partition.host_reads import read_in_place
from jaxferry.partition.host_stores import store_in_place
from jaxferry.partition.layout import Layer, Leaf
from jaxferry.partition.rows import Gradient, RowGradient
from jaxferry.partition.segments import Partition, Segment
from jaxferry.partition.table import print_table, table

__all__ = [
    "REMAT",
    "Derivative",
    "Gradient",
    "Layer",
    "Leaf",
    "Merge",
    "Partition",
    "RowGradient",
    "Segment",
    "Trainable",
    "differentiate",
    "frozen_leaves",
    "layers_by_path",
    "partition",
    "print_table",
    "read_in_place",
    "store_in_place",
    "table",
]
