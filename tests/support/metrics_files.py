"""Reads the file that an example's --metrics wrote."""

import json


def read_metrics(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_losses(file):
    return [(record["step"], record["loss"]) for record in read_metrics(file)]
