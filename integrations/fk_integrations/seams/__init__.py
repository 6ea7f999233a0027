"""The seams of Target.seam: one class a file, found by the file's stem (fk_integrations.patching.seam_interface)."""
