"""FlashInfer-Trace data sets: our ops, cases, candidates and verdicts written as one, and others read.

A data set is a folder with definitions/, workloads/, solutions/, traces/ and blob/ (https://bench.flashinfer.ai).
"""
