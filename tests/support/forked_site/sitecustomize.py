"""For processes of a fork: this package cannot be imported, and kernels that Triton's interpreter runs are listed."""

import os
import sys

sys.modules.update(dict.fromkeys(["fastkernels", "fk_integrations", "fk_bench"]))  # importing them fails

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__
    load, store = (
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )
    seen = set()

    def listed(self, *args, **kwargs):
        name = self.fn.__name__
        if name not in seen:
            seen.add(name)
            with open(os.environ["FORKED_KERNELS"], "a") as file:
                file.write(f"{name}\n")
        return run(self, *args, **kwargs)

    # Triton 3.9's interpreter makes integers of a mask that a scalar takes part in, and then refuses it.
    def masked_load(self, ptrs, mask, *args):
        mask.data = mask.data.astype(bool)
        return load(self, ptrs, mask, *args)

    def masked_store(self, ptrs, value, mask, *args):
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, *args)

    interpreter.GridExecutor.__call__ = listed
    interpreter.InterpreterBuilder.create_masked_load = masked_load
    interpreter.InterpreterBuilder.create_masked_store = masked_store
