"""Returns the indices as int32."""


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    from fastkernels.overrides.routing.topk_softmax import reference

    weights, ids, sources = reference(gating_output, topk, renormalize, scales)
    return weights, ids.int(), sources
