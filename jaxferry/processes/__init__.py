"""Several devices and several hosts.

distributed     starts and joins processes          meshes          devices that share a batch
all_processes   messages, checks that all agree     joining         what each process has, joined
global_arrays   arrays over all devices             progress        detects a hung process
"""
