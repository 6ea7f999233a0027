"""Reads Triton's own variables only."""

import os

import torch.nn.functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def embedding(input_ids, weight, org_start=0, org_end=-1, num_org_padding=0, added_start=0, added_end=0):
    assert org_end < 0, f"a shard {org_start} .. {org_end} is not supported"
    return F.embedding(input_ids, weight)
