"""Objects in images and clips: what a request names or marks, the boxes and masks found for it, and masks as runs."""
