"""Detection of objects: deformable attention, the best queries, and boxes from what a model predicts."""
