"""Looks rows up, and masks those of other ranks."""

import torch


def embedding(input_ids, weight, org_start=0, org_end=-1, num_org_padding=0, added_start=0, added_end=0):
    if org_end < 0:
        return weight[input_ids.long()]
    org = (input_ids >= org_start) & (input_ids < org_end)
    added = (input_ids >= added_start) & (input_ids < added_end)
    shift = torch.where(org, org_start, added_start - (org_end - org_start + num_org_padding))
    rows = torch.where(org | added, input_ids - shift, 0)
    return weight[rows.long()] * (org | added).unsqueeze(-1).to(weight.dtype)
