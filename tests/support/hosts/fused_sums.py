"""Counts of our pass of vLLM's compiler in a worker."""


class InWorkers:
    """worker_extension_cls of vLLM."""

    def fused_sums(self) -> int:
        """Sums that were fused with the norm behind them so far."""
        from fk_integrations.vllm import fusions

        found = fusions.rewriting(self.vllm_config)
        return -1 if found is None else found.summed
