"""The parts that know no op, model or host: registry, declarations, dispatch, tuned tables, environment."""
